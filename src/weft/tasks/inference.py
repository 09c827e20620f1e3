"""Inference and evaluation: examples to answers and metrics, for the trainer, the command line and the server."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
import torch

from weft.config.schema import Section
from weft.data.batching.loader import plan
from weft.data.batching.packed_items import PackedItems, pack
from weft.data.corpus.format import Shards
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.nn.layers.packed_linear import frozen_weights
from weft.tasks.base import Answer, Batch, Head, Item, Task
from weft.tasks.metrics import ConfusionMatrix
from weft.tasks.prepare import encode_all

CHUNK_SIZE = 1024  # examples a chunk: enough for batches of similar lengths
BUDGET, BUDGET_ON_CPU = 16384, 4096  # tokens in a batch
MAX_LOGITS, MAX_LOGITS_ON_GPU = 1 << 23, 1 << 28  # logits of a decoding step: fit the caches, or the GPU's memory

F = TypeVar("F")
G = TypeVar("G")


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
    for example, item_outputs in outputs(task, head, examples, limit, options, budget, start):
        yield task.answer(example, item_outputs)


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
        while chunk := list(islice(stream, CHUNK_SIZE)):
            yield from _chunk_outputs(task, head, chunk, limit, options, budget, offset)
            offset += len(chunk)


def _chunk_outputs(
    task: Task,
    head: Head,
    examples: Sequence[Any],
    limit: TruncationPolicy,
    options: Section,
    budget: int | None,
    offset: int,
) -> Iterator[tuple[Any, list[Any]]]:
    encoded = _encode_examples(task, [task.without_labels(example) for example in examples], limit, offset)
    for number, items in enumerate(encoded):
        if not items:
            raise DataError(f"example {offset + number + 1}: nothing is left of it to answer; {limit}".rstrip("; "))
    owners = [index for index, items in enumerate(encoded) for _ in items]
    by_example: list[list[Any]] = [[] for _ in examples]
    try:
        by_item = dict(
            _item_outputs(task, head, [item for items in encoded for item in items], options, budget, offset)
        )
    except DataError as error:
        raise _find_failing_example(task, head, encoded, options, offset) or error from None
    for number, owner in enumerate(owners):
        by_example[owner].append(by_item[number])
    yield from zip(examples, by_example, strict=True)


def _find_failing_example(
    task: Task, head: Head, encoded: Sequence[list[Item]], options: Section, offset: int
) -> DataError | None:
    """Return the error of the first example that the head cannot answer, the longest first."""
    longest_first = sorted(range(len(encoded)), key=lambda number: -sum(len(item[0]) for item in encoded[number]))
    for number in longest_first:
        try:
            list(_item_outputs(task, head, encoded[number], options, None, offset + number))
        except DataError as error:
            return DataError(f"example {offset + number + 1}: {error}")
    return None


def _encode_examples(task: Task, examples: Sequence[Any], limit: TruncationPolicy, offset: int = 0) -> list[list[Item]]:
    numbered = ((f"example {number}", example) for number, example in enumerate(examples, offset + 1))
    return list(encode_all(numbered, task, task.tokenizer, limit, None))


def _item_outputs(
    task: Task, head: Head, items: list[Item], options: Section, budget: int | None, offset: int
) -> Iterator[tuple[int, Any]]:
    data, device = pack(items, num_token_arrays=task.num_token_arrays), _device(head)
    logits_per_item, max_logits = head.scored(options), MAX_LOGITS if device.type == "cpu" else MAX_LOGITS_ON_GPU
    max_items = max(1, max_logits // logits_per_item) if logits_per_item else len(items)

    def answer(indices: np.ndarray) -> Iterator[tuple[int, Any]]:
        batch = _batch(task, data, indices).numbered((indices + offset).tolist())
        with torch.inference_mode():
            return zip(indices.tolist(), head.predict(batch.to(device), options), strict=True)

    batches = plan(data, budget or _budget(device), seed=None)
    parts = [part for indices in batches for part in np.array_split(indices, -(-len(indices) // max_items))]
    with _eval_mode(head):
        for outputs in map_in_threads(answer, parts) if device.type == "cpu" else map(answer, parts):
            yield from outputs


def _budget(device: torch.device) -> int:
    return BUDGET_ON_CPU if device.type == "cpu" else BUDGET


def _batch(task: Task, data: PackedItems, indices: np.ndarray) -> Batch:
    return task.collate([data[index] for index in indices.tolist()], np.random.default_rng(0))


def map_in_threads(answer: Callable[[F], G], batches: Sequence[F]) -> Iterator[G]:
    """Yield the results in order, with one batch a thread: small matrix products do not parallelize well."""
    threads = torch.get_num_threads()
    if threads == 1 or len(batches) == 1:
        yield from map(answer, batches)
        return
    futures: deque[Future[G]] = deque()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for batch in batches:
                futures.append(pool.submit(answer, batch))
                if len(futures) > threads:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
    finally:
        torch.set_num_threads(threads)


def reread(task: Task, head: Head, example: Any, limit: TruncationPolicy) -> tuple[list[str], list[str], Batch]:
    """Return source tokens, target tokens and the teacher-forced batch of an example with its own best output."""
    items = task.encode(task.without_labels(example) if task.has_question(example) else example, task.tokenizer, limit)
    if len(items) != 1:
        raise DataError(
            f"the text is read in {len(items)} windows, of data.max_length={limit.longest} tokens at most, and only "
            "one can be looked at; give a shorter text"
        )
    if task.reads_itself:
        return task.teacher_forced(items, [])
    outputs = [output for _, output in sorted(_item_outputs(task, head, items, task.options(), None, 0))]
    return task.teacher_forced(items, outputs)


@dataclass(frozen=True)
class EvaluationResult:
    """The metrics of an evaluation and, for tasks with labels, the confusion matrix."""

    metrics: dict[str, float]
    confusion: ConfusionMatrix | None
    note: str = ""  # a remark on the metrics


def evaluate(
    task: Task, head: Head, examples: Sequence[Any], limit: TruncationPolicy, budget: int | None = None
) -> dict[str, float]:
    """Return the loss and the task's metrics on examples."""
    return judge(task, head, examples, limit, budget).metrics


@frozen_weights()
def judge(
    task: Task, head: Head, examples: Sequence[Any], limit: TruncationPolicy, budget: int | None = None
) -> EvaluationResult:
    """Return the loss, the task's metrics and the confusion matrix on examples."""
    if not examples:
        raise DataError("not one example is left to evaluate on")
    with torch.inference_mode(), _eval_mode(head):
        measured = task.measure(head, examples, limit)
    if measured is not None:
        return EvaluationResult(measured.metrics, None, measured.note)
    encoded = _encode_examples(task, examples, limit)
    usable = [(example, items) for example, items in zip(examples, encoded, strict=True) if items]
    if not usable:
        raise DataError("not one example is left to evaluate on")
    data = pack((item for _, items in usable for item in items), num_token_arrays=task.num_token_arrays)
    loss = mean_loss(task, head, data, budget)
    evaluated = [example for example, _ in usable]
    answers = list(predict(task, head, evaluated, limit, task.options(), budget))
    return EvaluationResult({"loss": loss, **task.score(answers, evaluated)}, task.confusion(answers, evaluated))


@frozen_weights()
def evaluate_prepared(task: Task, head: Head, data: Shards, place: str) -> EvaluationResult:
    """Return the metrics on a prepared corpus; raise if the task needs the texts."""
    with torch.inference_mode(), _eval_mode(head):
        measured = task.measure_prepared(head, data)
    if measured is None:
        raise ConfigError(
            f"{place}: is prepared: it has tokens, but not the texts, which the task {task.config.name!r} needs; "
            "give the text itself"
        )
    return EvaluationResult(measured.metrics, None, measured.note)


def mean_loss(task: Task, head: Head, data: PackedItems, budget: int | None = None) -> float:
    """Return the mean loss: the sum over the parts of the loss of each part's mean."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    device = _device(head)

    def losses(indices: np.ndarray) -> tuple[dict[str, float], Mapping[str, int]]:
        batch = _batch(task, data, indices)
        with torch.inference_mode():
            return {part: float(value) for part, value in head(batch.to(device))[0].items()}, batch.counts

    batches = plan(data, budget or _budget(device), seed=None)
    with _eval_mode(head):
        for batch_sums, batch_counts in (
            map_in_threads(losses, batches) if device.type == "cpu" else map(losses, batches)
        ):
            for part, value in batch_sums.items():
                sums[part] = sums.get(part, 0.0) + value
                counts[part] = counts.get(part, 0) + batch_counts[part]
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
