"""Several tasks at once: one body, a head on it for each, batches of one task each (Caruana 1997; Luong et al. 2016).

A step minimises the loss of the tasks whose batches it reads, Σ sum / count over the parts of each, as Algorithm 1 of
MT-DNN (Liu et al. 2019) does; which tasks those are, `weft.data.batching.loader.plan_grouped_batches` draws. A task
with n batches has a share of them in proportion to n^(1/T) (Arivazhagan et al. 2019, section 4): T = `temperature`.

The tasks share the body, the tokenizer and the training. Each has its own examples, options, answers and metrics: a
model of several tasks answers as one of them (`Pipeline.for_task`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from torch import nn

from weft.config.run import Run
from weft.config.schema import Named
from weft.config.sections import TasksConfig
from weft.errors import ConfigError, RoleError, did_you_mean, in_task
from weft.models.base import Model, Role, SelfFitted
from weft.registry import resolve
from weft.tasks.base import Task
from weft.tasks.batch import Batch, Item
from weft.tasks.capabilities import CustomEvaluation, Metrics, StreamReading
from weft.tasks.encoding import EvaluationData
from weft.tasks.evaluation import evaluate
from weft.tasks.head import Head, Sums
from weft.tokenization.trainable import Tokenizer


class MultiHead(Head):
    """A body, and a head on it for each task; a batch goes through the head of its task."""

    leaves_unused = True

    def __init__(self, body: Model, heads: Mapping[str, Head]) -> None:
        super().__init__(body)
        self.heads = nn.ModuleDict(heads)

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Return the sums of the head's parts of the loss, each with the name of the task before its own."""
        head, own = self._head_and_batch(batch)
        sums, _ = head(own)
        return {f"{batch.task}/{part}": value for part, value in sums.items()}, None

    def flops(self, batch: Batch) -> int:
        """Return the FLOPs of the head of the batch's task."""
        head, own = self._head_and_batch(batch)
        return head.flops(own)

    def head_of(self, name: str) -> Head:
        """Return the head of a task; its body is that of all."""
        head = self.heads[name]
        assert isinstance(head, Head)
        return head

    def _head_and_batch(self, batch: Batch) -> tuple[Head, Batch]:
        """Return the head of a batch's task, and the batch as that head knows it."""
        counts = {part.removeprefix(f"{batch.task}/"): count for part, count in batch.counts.items()}
        return self.head_of(batch.task), replace(batch, counts=counts)


class MultiTask(CustomEvaluation):
    """Several tasks, each with a head on one body.

    Items are those of each task, followed by the number of the task; a batch is of one task.

    A metric of a task has the task's name before its own, as `intent/accuracy`; `mean` is the mean of the metrics that
    select the best model of each task. Where of some the lower is better and of others the higher, there is no mean,
    and the loss selects the best model.
    """

    Config: ClassVar[type[Named]] = TasksConfig
    metrics: tuple[str, ...] = ("mean",)
    metric = "mean"
    config: TasksConfig

    def __init__(self, config: Named) -> None:
        self.parts: dict[str, Task] = {}
        super().__init__(config)

    def configure(self, config: Any) -> None:
        """Set the configuration of all tasks, and the metrics, which depend on theirs."""
        super().configure(config)
        for name, part in self.parts.items():
            part.configure(config.tasks[name])
        preferences = {part.lower_is_better for part in self.parts.values()}
        self.metric, self.lower_is_better = ("mean" if len(preferences) < 2 else "loss"), preferences == {True}
        own = [f"{name}/{metric}" for name, part in self.parts.items() for metric in ("loss", *part.metrics)]
        self.metrics = (*(["mean"] if self.metric == "mean" else []), *own)

    def combine(self, parts: Mapping[str, Task]) -> None:
        """Set the tasks, each made for the model."""
        for name in parts:
            if hasattr(nn.ModuleDict, name):
                raise ConfigError(f"tasks.{name}: the name has another meaning in PyTorch; choose another one")
        self.parts = dict(parts)
        self.configure(self.config)

    def part(self, name: str | None) -> Task:
        """Return one of the tasks; raise an error if there is none of this name."""
        if name is None:
            names, first = ", ".join(self.parts), next(iter(self.parts))
            raise ConfigError(f"task: this model has several, {names}; name one: task={first!r}, or --task {first}")
        if name not in self.parts:
            raise ConfigError(f"task: the model has none called {name!r}; {did_you_mean(name, self.parts)}")
        return self.parts[name]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all tasks."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        for part in self.parts.values():
            part.tokenizer = tokenizer

    def roles_for(self, roles: frozenset[Role]) -> frozenset[Role]:
        """Return the roles that the tasks need."""
        return frozenset[Role]().union(*(part.required_roles for part in self.parts.values()))

    def check(self, run: Run) -> None:
        """Raise an error for what a task refuses, or what cannot be trained batch by batch beside others."""
        if issubclass(resolve("model", run.model.name), SelfFitted):
            raise RoleError(
                f"model.name: {run.model.name!r} fits itself, to one task; name a model that has a gradient"
            )
        for name, part in self.parts.items():
            with in_task(name):
                part.check(run.for_task(name))
                if isinstance(part, StreamReading) and not _reads_documents(part):
                    raise ConfigError(
                        "task.sequences: beside other tasks the data are read row by row, and not as one stream; set "
                        "it to documents"
                    )

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join the items of one task into its batch."""
        name = list(self.parts)[int(items[0][-1][0])]
        batch = self.parts[name].collate([item[:-1] for item in items], rng)
        return replace(batch, counts={f"{name}/{part}": count for part, count in batch.counts.items()}, task=name)

    def head(self, model: Any) -> MultiHead:
        """Return the body with the heads of all tasks; the pooler stays if one of them uses it."""
        refusals: list[None] = []
        model.drop_pooler = lambda: refusals.append(None)  # in place of the method
        heads = {name: part.head(model) for name, part in self.parts.items()}
        del model.drop_pooler
        if len(refusals) == len(heads):
            model.drop_pooler()
        return MultiHead(model, heads)

    def evaluate(self, head: Head, data: EvaluationData) -> Metrics:
        """Return the metrics of each task that has data to evaluate on."""
        assert isinstance(head, MultiHead)
        results = {}
        for name, part in data.parts.items():
            with in_task(name):
                results[name] = evaluate(self.parts[name], head.head_of(name), part)
        notes = [f"tasks.{name}: {result.note}" for name, result in results.items() if result.note]
        return Metrics(self.join({name: result.metrics for name, result in results.items()}), "; ".join(notes))

    def join(self, metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return the metrics of the tasks as one: the sum of the losses, the mean, and those of each task."""
        joined = {"loss": sum(own["loss"] for own in metrics.values())}
        if self.metric == "mean":
            joined["mean"] = sum(own[self.parts[name].metric] for name, own in metrics.items()) / len(metrics)
        return joined | {f"{name}/{key}": value for name, own in metrics.items() for key, value in own.items()}

    def prefers_lower(self, metric: str) -> bool:
        """Return whether the lower is better of a metric of one of the tasks, or of all."""
        name, _, own = metric.partition("/")
        return self.parts[name].prefers_lower(own) if own else super().prefers_lower(metric)


def _reads_documents(part: StreamReading) -> bool:
    return "documents" in (getattr(part, "sequences", None), getattr(part.config, "sequences", None))
