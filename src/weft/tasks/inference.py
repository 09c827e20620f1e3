"""Inference and evaluation: examples to answers and metrics, for the trainer, the command line and the server."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from weft.config.schema import Section
from weft.data.batching.loader import plan_batches
from weft.data.batching.packed_items import PackedItems, pack_in_memory
from weft.data.corpus.format import CorpusSplit
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError, RoleError
from weft.nn.layers.packed_linear import frozen_weights
from weft.tasks.base import Answer, Task
from weft.tasks.batch import Batch, Item
from weft.tasks.capabilities import (
    CustomEvaluation,
    ErrorAnalysis,
    LabelPrediction,
    PreparedEvaluation,
    TeacherForcing,
)
from weft.tasks.classification_report import ClassificationReport
from weft.tasks.encoding import EvaluationData, encode_chunk
from weft.tasks.finite_answers import check_outputs, finite_answer
from weft.tasks.head import Head
from weft.tasks.length_report import LengthReport
from weft.tasks.metrics import ConfusionMatrix
from weft.tasks.sharding import add_up, gather, interleave, num_ranks, share

INFERENCE_CHUNK = 1024  # examples a chunk: enough for batches of similar lengths
BUDGET, BUDGET_ON_CPU = 16384, 4096  # tokens in a batch
MAX_LOGITS, MAX_LOGITS_ON_GPU = 1 << 23, 1 << 28  # logits of a decoding step: fit the caches, or the GPU's memory

_A = TypeVar("_A")
_B = TypeVar("_B")


def predict(
    task: Task,
    head: Head,
    examples: Iterable[Any],
    limit: TruncationPolicy,
    options: Section,
    budget: int | None = None,
    start: int = 0,
) -> Iterator[Answer]:
    """Yield an answer for each example, in order, the first being number `start`; memory is bounded."""
    pairs = outputs(task, head, examples, limit, options, budget, start)
    for number, (example, item_outputs) in enumerate(pairs, start + 1):
        yield finite_answer(task, example, item_outputs, number)


def predict_or_errors(
    task: Task,
    head: Head,
    examples: Iterable[Any],
    limit: TruncationPolicy,
    options: Section,
    start: int = 0,
) -> Iterator[Answer | DataError]:
    """Yield an answer for each example, or the error of one that has none; an example may be an error itself."""
    stream, offset = iter(examples), start
    with frozen_weights():
        while chunk := list(islice(stream, INFERENCE_CHUNK)):
            encoded = _encode_or_errors(task, chunk, limit, offset)
            outputs_or_errors = _outputs_or_errors(task, head, encoded, options, offset)
            for number, (example, item_outputs) in enumerate(zip(chunk, outputs_or_errors, strict=True), offset + 1):
                yield _answer_or_error(task, example, item_outputs, number)
            offset += len(chunk)


def _answer_or_error(task: Task, example: Any, item_outputs: list[Any] | DataError, number: int) -> Answer | DataError:
    if isinstance(item_outputs, DataError):
        return item_outputs
    try:
        return finite_answer(task, example, item_outputs, number)
    except DataError as error:
        return error


def _encode_or_errors(
    task: Task, chunk: Sequence[Any], limit: TruncationPolicy, offset: int
) -> list[list[Item] | DataError]:
    """Return the items of each example, encoded at once, or one by one where one of them is wrong."""
    questions = [example if isinstance(example, DataError) else task.without_labels(example) for example in chunk]
    chunk_limit = TruncationPolicy(limit.max_length, limit.policy)
    try:
        valid = [question for question in questions if not isinstance(question, DataError)]
        encoded = iter(task.encode_batch(valid, task.tokenizer, chunk_limit) if valid else ())
    except DataError:
        numbered = enumerate(questions, offset + 1)
        return [_encode_or_error(task, question, limit, number) for number, question in numbered]
    limit.add(chunk_limit)
    results = [question if isinstance(question, DataError) else next(encoded) for question in questions]
    return [result or _nothing_left_error(number, limit) for number, result in enumerate(results, offset + 1)]


def _encode_or_error(task: Task, question: Any, limit: TruncationPolicy, number: int) -> list[Item] | DataError:
    if isinstance(question, DataError):
        return question
    try:
        return task.encode(question, task.tokenizer, limit) or _nothing_left_error(number, limit)
    except DataError as error:
        return DataError(f"example {number}: {error}")


def _outputs_or_errors(
    task: Task, head: Head, encoded: Sequence[list[Item] | DataError], options: Section, offset: int
) -> list[list[Any] | DataError]:
    """Return each example's outputs or its error; examples that the head cannot answer are found by halving."""
    items = [[] if isinstance(result, DataError) else result for result in encoded]
    try:
        outputs = _example_outputs(task, head, items, options, None, offset + np.arange(len(items)))
    except DataError as error:
        if len(encoded) == 1:
            return [DataError(f"example {offset + 1}: {error}")]
        half = len(encoded) // 2
        first = _outputs_or_errors(task, head, encoded[:half], options, offset)
        return first + _outputs_or_errors(task, head, encoded[half:], options, offset + half)
    return [result if isinstance(result, DataError) else own for result, own in zip(encoded, outputs, strict=True)]


def outputs(
    task: Task,
    head: Head,
    examples: Iterable[Any],
    limit: TruncationPolicy,
    options: Section,
    budget: int | None = None,
    start: int = 0,
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each example with the head's outputs for its items, from which `Task.answer` makes the answer."""
    stream, offset = iter(examples), start
    with frozen_weights():
        while chunk := list(islice(stream, INFERENCE_CHUNK)):
            questions = map(task.without_labels, chunk)
            located = [(f"example {number}", question) for number, question in enumerate(questions, offset + 1)]
            encoded = list(encode_chunk(located, task, task.tokenizer, limit, None))
            numbers = offset + np.arange(len(chunk))
            yield from zip(chunk, _chunk_outputs(task, head, encoded, limit, options, budget, numbers), strict=True)
            offset += len(chunk)


def _chunk_outputs(
    task: Task,
    head: Head,
    encoded: Sequence[list[Item]],
    limit: TruncationPolicy,
    options: Section,
    budget: int | None,
    numbers: np.ndarray,
) -> list[list[Any]]:
    """Return the outputs for the items of each example, given the numbers of the examples, from 0."""
    for number, items in zip(numbers.tolist(), encoded, strict=True):
        if not items:
            raise _nothing_left_error(number + 1, limit)
    try:
        return _example_outputs(task, head, encoded, options, budget, numbers)
    except DataError as error:
        raise _find_failing_example(task, head, encoded, options, numbers) or error from None


def _nothing_left_error(number: int, limit: TruncationPolicy) -> DataError:
    return DataError(f"example {number}: nothing is left of it to answer; {limit}".rstrip("; "))


def _example_outputs(
    task: Task, head: Head, encoded: Sequence[list[Item]], options: Section, budget: int | None, numbers: np.ndarray
) -> list[list[Any]]:
    lengths = [len(items) for items in encoded]
    rows = np.repeat(numbers, lengths)
    by_item = dict(_item_outputs(task, head, [item for items in encoded for item in items], options, budget, rows))
    return [[by_item[index] for index in range(*span)] for span in pairwise(accumulate(lengths, initial=0))]


def _find_failing_example(
    task: Task, head: Head, encoded: Sequence[list[Item]], options: Section, numbers: np.ndarray
) -> DataError | None:
    """Return the error of the first example that the head cannot answer, the longest first."""
    longest_first = sorted(range(len(encoded)), key=lambda index: -sum(len(item[0]) for item in encoded[index]))
    for index in longest_first:
        try:
            _example_outputs(task, head, [encoded[index]], options, None, numbers[[index]])
        except DataError as error:
            return DataError(f"example {numbers[index] + 1}: {error}")
    return None


def _item_outputs(
    task: Task, head: Head, items: list[Item], options: Section, budget: int | None, rows: np.ndarray
) -> Iterator[tuple[int, Any]]:
    """Yield each item's index and output; `rows` are the numbers of the items' examples, on which samples depend."""
    data, device = pack_in_memory(items, task.num_token_arrays), _device(head)
    logits_per_item = head.logits_per_item(options)
    max_logits = MAX_LOGITS if device.type == "cpu" else MAX_LOGITS_ON_GPU
    max_items = max(1, max_logits // logits_per_item) if logits_per_item else len(items)

    def answer(indices: np.ndarray) -> Iterator[tuple[int, Any]]:
        batch = _batch(task, data, indices).numbered(rows[indices].tolist())
        with torch.inference_mode():
            batch_outputs = head.predict(batch.to(device), options)
        check_outputs(batch_outputs)
        return zip(indices.tolist(), batch_outputs, strict=True)

    batches = plan_batches(data, budget or _budget(device), seed=None)
    parts = [part for indices in batches for part in np.array_split(indices, -(-len(indices) // max_items))]
    with _eval_mode(head):
        for outputs in map_in_threads(answer, parts) if device.type == "cpu" else map(answer, parts):
            yield from outputs


def _budget(device: torch.device) -> int:
    return BUDGET_ON_CPU if device.type == "cpu" else BUDGET


def _batch(task: Task, data: PackedItems, indices: np.ndarray) -> Batch:
    return task.collate([data[index] for index in indices.tolist()], np.random.default_rng(0))


def map_in_threads(answer: Callable[[_A], _B], batches: Sequence[_A]) -> Iterator[_B]:
    """Yield the results in order, with one batch a thread: small matrix products do not parallelize well."""
    threads = torch.get_num_threads()
    if threads == 1 or len(batches) == 1:
        yield from map(answer, batches)
        return
    futures: deque[Future[_B]] = deque()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for batch in batches:
                futures.append(pool.submit(copy_context().run, answer, batch))
                if len(futures) > threads:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
    finally:
        torch.set_num_threads(threads)


def teacher_forced_batch(
    task: Task, head: Head, example: Any, limit: TruncationPolicy
) -> tuple[list[str], list[str], Batch]:
    """Return source tokens, target tokens and the batch in which the model reads its own best output as its target."""
    if not isinstance(task, TeacherForcing):
        raise RoleError(f"task: {task.config.name!r} has no output to read again")
    items = task.encode(task.without_labels(example) if task.has_question(example) else example, task.tokenizer, limit)
    if len(items) != 1:
        raise DataError(
            f"the text is read in {len(items)} windows, of data.max_length={limit.max_length} tokens at most, and only "
            "one can be looked at; give a shorter text"
        )
    if task.forces_input:
        return task.teacher_forced(items, [])
    outputs = [output for _, output in sorted(_item_outputs(task, head, items, task.options(), None, np.zeros(1, int)))]
    return task.teacher_forced(items, outputs)


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
        """Return it as plain data for JSON, without the wrong answers: the metrics, and what is said of labels.

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
    """Return the loss, the task's metrics and what it says of labels on labelled examples; `errors`: wrong answers too.

    Wrong answers can be asked of tasks with `ErrorAnalysis` only. `advance` is called with the number of examples that
    were answered since the last call. `by_length`: where answers are no labels, also the metrics by length of input.
    """
    if not data.examples:
        raise DataError("not one example is left to evaluate on")
    if isinstance(task, CustomEvaluation):
        with torch.inference_mode(), _eval_mode(head):
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
    outputs = _chunk_outputs(task, head, encoded, data.limit, task.options(), budget, numbers)
    for number, item_outputs in zip(numbers.tolist(), outputs, strict=True):
        yield finite_answer(task, data.examples[number], item_outputs, number + 1)


@frozen_weights()
def evaluate_prepared(task: Task, head: Head, data: CorpusSplit, place: str) -> EvaluationResult:
    """Return the metrics on a prepared corpus; raise if the task needs the texts."""
    if not isinstance(task, PreparedEvaluation):
        raise ConfigError(
            f"{place}: is prepared: it has tokens, but not the texts, which the task {task.config.name!r} needs; "
            "give the text itself"
        )
    with torch.inference_mode(), _eval_mode(head):
        direct = task.evaluate_prepared(head, data)
    return EvaluationResult(direct.metrics, note=direct.note)


def mean_loss(task: Task, head: Head, data: PackedItems, budget: int | None = None) -> float:
    """Return the mean loss: the sum over the parts of the loss of each part's mean."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    device = _device(head)

    def losses(indices: np.ndarray) -> tuple[dict[str, float], Mapping[str, int]]:
        batch = _batch(task, data, indices)
        with torch.inference_mode():
            return {part: float(value) for part, value in head(batch.to(device))[0].items()}, batch.counts

    batches = share(plan_batches(data, budget or _budget(device), seed=None))
    with _eval_mode(head):
        for batch_sums, batch_counts in (
            map_in_threads(losses, batches) if device.type == "cpu" else map(losses, batches)
        ):
            for part, value in batch_sums.items():
                sums[part] = sums.get(part, 0.0) + value
                counts[part] = counts.get(part, 0) + batch_counts[part]
    sums, counts = add_up(sums), add_up(counts)
    return sum(sums[part] / max(counts[part], 1) for part in sums)


class _eval_mode:  # noqa: N801
    """Context manager: evaluation mode inside, the mode before it afterwards."""

    def __init__(self, head: Head) -> None:
        self._head, self._was_training = head, head.training

    def __enter__(self) -> None:
        self._head.eval()

    def __exit__(self, *error: object) -> None:
        self._head.train(self._was_training)


def _device(head: Head) -> torch.device:
    return next(chain(head.parameters(), head.buffers())).device
