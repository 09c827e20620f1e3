"""What a task can do beyond training and prediction, declared by its base classes: `class LM(TextStreaming, …)`.

Callers ask `isinstance(task, TextStreaming)`; where a task lacks what is asked for, they raise an error that says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from weft.config.run import Run
from weft.config.schema import Section
from weft.data.batching.lm_stream import SpanSampler
from weft.data.batching.packed_items import PackedItems
from weft.data.batching.static_shape import StaticShape
from weft.data.corpus.format import CorpusSplit
from weft.data.truncation import TruncationPolicy
from weft.decoding.continuous import GenerationRequest
from weft.decoding.generate import Hypothesis
from weft.tasks.base import Answer, Task
from weft.tasks.batch import Batch, Item
from weft.tasks.classification_report import ClassificationReport
from weft.tasks.encoding import EvaluationData
from weft.tasks.head import Head, missing_method
from weft.tasks.incremental_text import IncrementalText
from weft.tasks.metrics import ConfusionMatrix


class StaticBatches(Task):
    """Batches that can be padded to one shape, so that a training can be compiled."""

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """Return the number of tokens that each item adds to a batch: (1, items), or (2, items) with the source first.

        None where the batches, as configured, have no static shape.
        """
        raise missing_method(self, "sequence_lengths")

    def num_positions(self, shape: StaticShape) -> int:
        """Return the maximum number of positions in `Batch.positions` for a static shape; by default, every token."""
        return shape.sizes[-1]

    def max_sequence_length(self, data: PackedItems) -> int | None:
        """Return the length of the longest sequence in the items."""
        lengths = self.sequence_lengths(data)
        return None if lengths is None else int(lengths.max(initial=0))


class StreamReading(StaticBatches):
    """Training data read as one continuous stream of tokens, in windows of one shape."""

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """Return None: the stream is read in windows."""
        return None

    def sampler(self, data: PackedItems, run: Run, streams: int) -> SpanSampler | None:
        """Return how the stream is read; None where the data, as configured, is read item by item."""
        raise missing_method(self, "sampler")


class SelfFitting(Task):
    """Training of a model that has its own `fit`, without gradients."""

    @property
    def eos(self) -> int | None:
        """The token that ends each item, where items are stored without it."""
        return None


class TextStreaming(Task):
    """Answers that are generated text, available in increments."""

    def stream(
        self, head: Head, example: Any, limit: TruncationPolicy, options: Section, row: int = 0
    ) -> Iterator[str]:
        """Yield the answer's text in increments; sampling is seeded as for example number `row` of a list."""
        raise missing_method(self, "stream")


class TextGeneration(TextStreaming):
    """Answers that are generated token by token, in a batch that sequences join and leave."""

    def generation_request(
        self, head: Head, example: Any, limit: TruncationPolicy, options: Section, row: int = 0
    ) -> GenerationRequest:
        """Return what to generate for an example, for a batch that sequences join (`weft.decoding.continuous`)."""
        raise missing_method(self, "generation_request")

    def decode_generated(self, request: GenerationRequest, ids: Sequence[int]) -> str:
        """Return the text of generated ids, without eos."""
        raise missing_method(self, "decode_generated")

    def incremental_text(self, request: GenerationRequest, stop: Sequence[str] = ()) -> IncrementalText:
        """Return the text of generated ids as it grows."""
        return IncrementalText(lambda ids: self.decode_generated(request, ids), stop)

    def generated_outputs(self, head: Head, request: GenerationRequest, candidates: Sequence[Hypothesis]) -> list[Any]:
        """Return the outputs, for `answer`, of candidates that were generated."""
        return [list(candidates)]


class TeacherForcing(Task):
    """A second pass that reads the model's own answer as its target: for attention and gradients."""

    forces_input: ClassVar[bool] = False  # whether the target is the input itself, and no answer is generated for it

    def has_question(self, example: Any) -> bool:
        """Return whether an example asks for an answer."""
        return not self.forces_input

    def teacher_forced(self, items: list[Item], outputs: list[Any]) -> tuple[list[str], list[str], Batch]:
        """Return the tokens on both sides, and the batch that feeds the predicted output back to the model."""
        raise missing_method(self, "teacher_forced")


@dataclass(frozen=True)
class Metrics:
    """Metrics, the loss among them, and a note on how to read them."""

    metrics: dict[str, float]
    note: str = ""


class CustomEvaluation(Task):
    """Metrics computed by the head on the data, such as perplexity, and not from answers."""

    def evaluate(self, head: Head, data: EvaluationData) -> Metrics:
        """Return the metrics of a head on encoded examples."""
        raise missing_method(self, "evaluate")


class PreparedEvaluation(CustomEvaluation):
    """Metrics that need no texts, but tokens alone: those of a prepared corpus."""

    def evaluate_prepared(self, head: Head, data: CorpusSplit) -> Metrics:
        """Return the metrics of a head on a prepared corpus."""
        raise missing_method(self, "evaluate_prepared")


class LabelPrediction(Task):
    """Answers that are labels."""

    def confusion(self, answers: Sequence[Answer], examples: Sequence[Any]) -> ConfusionMatrix | None:
        """Return the confusion matrix; None where an answer, as configured, is not one label."""
        raise missing_method(self, "confusion")

    def report(self, answers: Sequence[Answer], examples: Sequence[Any]) -> ClassificationReport | None:
        """Return the classification report, by default that of the confusion matrix; None where there are no labels."""
        matrix = self.confusion(answers, examples)
        return None if matrix is None else ClassificationReport.of_confusion(matrix)

    @property
    def positive_label(self) -> str | None:
        """The label that the metric `f1` is of, where there are two; None, the default, where it is of all."""
        return None


def positive_label(task: Task) -> str | None:
    """Return the label that a task's metric `f1` is of, where there are two."""
    return task.positive_label if isinstance(task, LabelPrediction) else None


@dataclass(frozen=True)
class WrongAnswer:
    """A wrong answer beside the gold one, both as plain data for JSON."""

    gold: Any
    predicted: Any
    score: float  # the model's own, such as the probability of what it predicts
    quality: float = 0.0  # how nearly right it is: the worst answers come first, and of equal ones the most confident
    details: Mapping[str, Any] = field(default_factory=dict)  # more to write down


class ErrorAnalysis(Task):
    """Answers that are right or wrong, so that the wrong ones can be listed."""

    def errors(self, answers: Sequence[Answer], examples: Sequence[Any]) -> list[WrongAnswer | None]:
        """Return for each example its wrong answer, or None where the answer is right."""
        raise missing_method(self, "errors")
