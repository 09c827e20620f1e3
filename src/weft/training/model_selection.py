"""What makes one evaluation better than another."""

import math
from collections.abc import Mapping

from weft.config.schema import Run
from weft.errors import ConfigError, did_you_mean
from weft.tasks.base import Task


def metric_of(run: Run, task: Task) -> str:
    """Say what makes a model the best."""
    return run.train.metric or task.metric


def sign_of(run: Run, task: Task) -> int:
    """1 where less of the metric is better, else -1."""
    return 1 if metric_of(run, task) == "loss" or task.lower_is_better else -1


def rank_of(run: Run, task: Task, found: Mapping[str, float]) -> list[float]:
    """Order evaluations, the best first: by the metric, and where that is the same, by the loss."""
    metric = metric_of(run, task)
    if metric not in found:
        told = "the evaluation gave no" if metric in task.metrics else "the task has no metric"
        raise ConfigError(f"train.metric: {told} {metric!r}; {did_you_mean(metric, found)}")
    ordered = (sign_of(run, task) * found[metric], found.get("loss", 0.0))
    return [one if math.isfinite(one) else math.inf for one in ordered]
