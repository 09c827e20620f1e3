"""Evaluation: the loss, the metrics and the wrong answers on labelled examples, or on a prepared corpus."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from weft.data.batching.packed_items import PackedItems
from weft.data.corpus.format import CorpusSplit
from weft.errors import ConfigError, DataError
from weft.nn.layers.packed_linear import frozen_weights
from weft.tasks.base import Answer, Task
from weft.tasks.batch import Batch
from weft.tasks.capabilities import CustomEvaluation, ErrorAnalysis, LabelPrediction, PreparedEvaluation
from weft.tasks.classification_report import ClassificationReport
from weft.tasks.encoding import EvaluationData
from weft.tasks.finite_answers import finite_answer
from weft.tasks.head import Head
from weft.tasks.inference import INFERENCE_CHUNK, chunk_outputs
from weft.tasks.inference_batches import eval_mode, plan_inference_batches, run_batches
from weft.tasks.length_report import LengthReport
from weft.tasks.metrics import ConfusionMatrix
from weft.tasks.sharding import add_up, gather, interleave, num_ranks, share


@dataclass(frozen=True)
class EvaluationResult:
    """The metrics of an evaluation; for tasks with labels, the confusion matrix and the classification report.

    `errors`, where they are asked for, are the wrong answers as plain data for JSON; `list_errors` has their order.
    """

    metrics: dict[str, float]
    confusion: ConfusionMatrix | None = None
    note: str = ""  # a remark on the metrics
    report: ClassificationReport | None = None
    positive_label: str | None = None  # the label that the metric `f1` is of, where there are two
    errors: list[dict[str, Any]] | None = None
    by_length: LengthReport | None = None  # where it is asked for, and answers are no labels

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: the metrics and the reports, without the wrong answers.

        An infinite metric, such as the perplexity of a text that has the probability 0, is None.
        """
        plain: dict[str, Any] = {name: None if math.isinf(value) else value for name, value in self.metrics.items()}
        if self.positive_label is not None:
            plain["positive_label"] = self.positive_label
        if self.report is not None:
            plain["report"] = self.report.to_dict()
        if self.confusion is not None:
            plain["confusion"] = self.confusion.to_dict()
        if self.by_length is not None:
            plain["by_length"] = self.by_length.to_dict()
        return plain


@frozen_weights()
def evaluate(
    task: Task,
    head: Head,
    data: EvaluationData,
    budget: int | None = None,
    errors: bool = False,
    advance: Callable[[int], object] | None = None,
    by_length: bool = False,
) -> EvaluationResult:
    """Return the loss and the task's metrics on labelled examples; of labels, the confusion matrix and the report too.

    `errors` adds the wrong answers, of tasks with `ErrorAnalysis` only. `by_length` adds the metrics by length of
    input, where answers are no labels. `advance` is called with the number of examples answered since the last call.
    """
    if not data.examples:
        raise DataError("not one example is left to evaluate on")
    if isinstance(task, CustomEvaluation):
        with torch.inference_mode(), eval_mode(head):
            direct = task.evaluate(head, data)
        return EvaluationResult(direct.metrics, note=direct.note)
    loss = mean_loss(task, head, data.items, budget)
    answers = list(answer_all(task, head, data, budget, advance))
    result = EvaluationResult(
        {"loss": loss, **task.loss_metrics(loss), **task.score(answers, data.examples)},
        errors=list_errors(task, answers, data.examples) if errors else None,
    )
    if isinstance(task, LabelPrediction):
        confusion, report = task.confusion(answers, data.examples), task.report(answers, data.examples)
        result = replace(result, confusion=confusion, report=report, positive_label=task.positive_label)
    if by_length and result.report is None:
        result = replace(result, by_length=LengthReport.of(task, answers, data.examples))
    return result


@frozen_weights()
def evaluate_prepared(task: Task, head: Head, data: CorpusSplit, place: str) -> EvaluationResult:
    """Return the metrics on a prepared corpus; raise if the task needs the texts."""
    if not isinstance(task, PreparedEvaluation):
        raise ConfigError(
            f"{place}: is prepared: it has tokens, but not the texts, which the task {task.config.name!r} needs; "
            "give the text itself"
        )
    with torch.inference_mode(), eval_mode(head):
        direct = task.evaluate_prepared(head, data)
    return EvaluationResult(direct.metrics, note=direct.note)


def list_errors(task: Task, answers: Sequence[Answer], examples: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the wrong answers, the worst and of equal ones the most confident first.

    Each has the example's fields without its labels, `gold`, `predicted` and `score`.
    """
    assert isinstance(task, ErrorAnalysis)
    pairs = zip(examples, task.errors(answers, examples), strict=True)
    wrong = [(example, error) for example, error in pairs if error is not None]
    wrong.sort(key=lambda pair: (pair[1].quality, -pair[1].score))
    return [
        task.without_labels(example).model_dump(mode="json", exclude_none=True)
        | {"gold": error.gold, "predicted": error.predicted, "score": error.score, **error.details}
        for example, error in wrong
    ]


def answer_all(
    task: Task,
    head: Head,
    data: EvaluationData,
    budget: int | None = None,
    advance: Callable[[int], object] | None = None,
) -> Iterator[Answer]:
    """Yield the answers to labelled examples, from their encoding without labels; processes share each chunk."""
    items, starts = data.unlabelled
    for first in range(0, len(data.examples), INFERENCE_CHUNK * num_ranks()):
        numbers = np.arange(first, min(first + INFERENCE_CHUNK * num_ranks(), len(data.examples)))
        answers = list(_numbered_answers(task, head, data, share(numbers), budget, items, starts))
        yield from interleave(gather(answers)) if num_ranks() > 1 else answers
        if advance:
            advance(len(numbers))


def _numbered_answers(
    task: Task,
    head: Head,
    data: EvaluationData,
    numbers: np.ndarray,
    budget: int | None,
    items: PackedItems,
    starts: np.ndarray,
) -> Iterator[Answer]:
    """Yield the answers to the examples of these numbers."""
    encoded = [[items[index] for index in range(starts[number], starts[number + 1])] for number in numbers.tolist()]
    outputs = chunk_outputs(task, head, encoded, data.limit, task.options(), budget, numbers)
    for number, item_outputs in zip(numbers.tolist(), outputs, strict=True):
        yield finite_answer(task, data.examples[number], item_outputs, number + 1)


def mean_loss(task: Task, head: Head, data: PackedItems, budget: int | None = None) -> float:
    """Return the mean loss: the sum over the parts of the loss of each part's mean."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}

    def losses(indices: np.ndarray, batch: Batch) -> tuple[dict[str, float], Mapping[str, int]]:
        return {part: float(value) for part, value in head(batch)[0].items()}, batch.counts

    batches = share(plan_inference_batches(head, data, budget))
    for batch_sums, batch_counts in run_batches(task, head, data, batches, losses):
        for part, value in batch_sums.items():
            sums[part] = sums.get(part, 0.0) + value
            counts[part] = counts.get(part, 0) + batch_counts[part]
    sums, counts = add_up(sums), add_up(counts)
    return sum(sums[part] / max(counts[part], 1) for part in sums)
