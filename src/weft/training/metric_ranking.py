"""Model selection: the order of evaluations by the chosen metric."""

import math
from collections.abc import Mapping

from weft.config.run import Run
from weft.errors import ConfigError, did_you_mean
from weft.tasks.base import Task


def metric_of(run: Run, task: Task) -> str:
    """Return the name of the metric that selects the best model."""
    return run.train.metric or task.metric


def sign_of(run: Run, task: Task) -> int:
    """Return 1 if a lower metric is better, else -1."""
    return 1 if task.prefers_lower(metric_of(run, task)) else -1


def ranking_key(run: Run, task: Task, metrics: Mapping[str, float]) -> list[float]:
    """Return the sort key of an evaluation, smaller is better: the metric, then the loss; infinity if not finite."""
    metric = metric_of(run, task)
    if metric not in metrics:
        reason = "the evaluation gave no" if metric in task.metrics else "the task has no metric"
        raise ConfigError(f"train.metric: {reason} {metric!r}; {did_you_mean(metric, metrics)}")
    key = (sign_of(run, task) * metrics[metric], metrics.get("loss", 0.0))
    return [value if math.isfinite(value) else math.inf for value in key]
