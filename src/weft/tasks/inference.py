"""From examples to answers, and from answers to scores: one way for the trainer, the command line and the server."""

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
from weft.data.batching.packed import PackedItems, pack
from weft.data.corpus.format import Shards
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.nn.layers.linear import frozen_weights
from weft.tasks.base import Answer, Batch, Head, Item, Task
from weft.tasks.metrics import Confusion
from weft.tasks.prepare import encode_all

AT_ONCE = 1024  # examples held at a time: enough to fill batches with like lengths, however long the stream is
BUDGET, BUDGET_ON_CPU = 16384, 4096  # tokens in a batch
SCORED, SCORED_ON_GPU = 1 << 23, 1 << 28  # numbers that a step of a search may score: what caches, or memories, hold

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
    """Yield an answer for each example, in order, the first being number `start`; memory does not grow."""
    for example, found in outputs(task, head, examples, limit, options, budget, start):
        yield task.answer(example, found)


def outputs(
    task: Task,
    head: Head,
    examples: Iterable[Any],
    limit: TruncationPolicy,
    options: Section,
    budget: int | None = None,
    start: int = 0,
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each example with what the head gives for its items, of which `predict` has the task make an answer."""
    stream, done = iter(examples), start
    with frozen_weights():
        while chunk := list(islice(stream, AT_ONCE)):
            yield from _chunk_outputs(task, head, chunk, limit, options, budget, done)
            done += len(chunk)


def _chunk_outputs(
    task: Task,
    head: Head,
    examples: Sequence[Any],
    limit: TruncationPolicy,
    options: Section,
    budget: int | None,
    done: int,
) -> Iterator[tuple[Any, list[Any]]]:
    encoded = _encoded(task, [task.asked(example) for example in examples], limit, done)
    for number, items in enumerate(encoded):
        if not items:
            raise DataError(f"example {done + number + 1}: nothing is left of it to answer; {limit}".rstrip("; "))
    owners = [index for index, items in enumerate(encoded) for _ in items]
    own: list[list[Any]] = [[] for _ in examples]
    try:
        found = dict(_outputs(task, head, [item for items in encoded for item in items], options, budget, done))
    except DataError as error:
        raise _refused(task, head, encoded, options, done) or error from None
    for number, owner in enumerate(owners):
        own[owner].append(found[number])
    yield from zip(examples, own, strict=True)


def _refused(task: Task, head: Head, encoded: Sequence[list[Item]], options: Section, done: int) -> DataError | None:
    """Find which of some examples the head cannot answer, the longest first, and name it."""
    longest = sorted(range(len(encoded)), key=lambda number: -sum(len(item[0]) for item in encoded[number]))
    for number in longest:
        try:
            list(_outputs(task, head, encoded[number], options, None, done + number))
        except DataError as error:
            return DataError(f"example {done + number + 1}: {error}")
    return None


def _encoded(task: Task, examples: Sequence[Any], limit: TruncationPolicy, done: int = 0) -> list[list[Item]]:
    numbered = ((f"example {number}", example) for number, example in enumerate(examples, done + 1))
    return list(encode_all(numbered, task, task.tokenizer, limit, None))


def _outputs(
    task: Task, head: Head, items: list[Item], options: Section, budget: int | None, done: int
) -> Iterator[tuple[int, Any]]:
    data, device, scored = pack(items, num_token_arrays=task.num_token_arrays), _device(head), head.scored(options)
    most = max(1, (SCORED if device.type == "cpu" else SCORED_ON_GPU) // scored) if scored else len(items)

    def answer(indices: np.ndarray) -> Iterator[tuple[int, Any]]:
        batch = _batch(task, data, indices).numbered((indices + done).tolist())
        with torch.inference_mode():
            return zip(indices.tolist(), head.predict(batch.to(device), options), strict=True)

    planned = plan(data, budget or _budget(device), seed=None)
    chosen = [part for indices in planned for part in np.array_split(indices, -(-len(indices) // most))]
    with _evaluating(head):
        for outputs in side_by_side(answer, chosen) if device.type == "cpu" else map(answer, chosen):
            yield from outputs


def _budget(device: torch.device) -> int:
    return BUDGET_ON_CPU if device.type == "cpu" else BUDGET


def _batch(task: Task, data: PackedItems, indices: np.ndarray) -> Batch:
    return task.collate([data[index] for index in indices.tolist()], np.random.default_rng(0))


def side_by_side(answer: Callable[[F], G], batches: Sequence[F]) -> Iterator[G]:
    """Answer as many batches at a time as there are threads, in order: small products share threads badly."""
    threads = torch.get_num_threads()
    if threads == 1 or len(batches) == 1:
        yield from map(answer, batches)
        return
    waiting: deque[Future[G]] = deque()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for batch in batches:
                waiting.append(pool.submit(answer, batch))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        torch.set_num_threads(threads)


def reread(task: Task, head: Head, example: Any, limit: TruncationPolicy) -> tuple[list[str], list[str], Batch]:
    """Answer one example and return the tokens on both sides with the batch that reads its own winning output."""
    items = task.encode(task.asked(example) if task.has_question(example) else example, task.tokenizer, limit)
    if len(items) != 1:
        raise DataError(
            f"the text is read in {len(items)} windows, of data.longest={limit.longest} tokens at most, and only one "
            "can be looked at; give a shorter text"
        )
    if task.reads_itself:
        return task.teacher_forced(items, [])
    outputs = [output for _, output in sorted(_outputs(task, head, items, task.options(), None, 0))]
    return task.teacher_forced(items, outputs)


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation found: the metrics, and where answers are labels, which was taken for which."""

    metrics: dict[str, float]
    confusion: Confusion | None
    note: str = ""  # what a reader of the metrics should know


def evaluate(
    task: Task, head: Head, examples: Sequence[Any], limit: TruncationPolicy, budget: int | None = None
) -> dict[str, float]:
    """Score a head on examples: the loss and the task's metrics."""
    return judge(task, head, examples, limit, budget).metrics


@frozen_weights()
def judge(
    task: Task, head: Head, examples: Sequence[Any], limit: TruncationPolicy, budget: int | None = None
) -> EvaluationResult:
    """Score a head on examples, and say which labels it took for which."""
    if not examples:
        raise DataError("not one example is left to evaluate on")
    with torch.inference_mode(), _evaluating(head):
        measured = task.measure(head, examples, limit)
    if measured is not None:
        return EvaluationResult(measured.metrics, None, measured.note)
    encoded = _encoded(task, examples, limit)
    kept = [(example, items) for example, items in zip(examples, encoded, strict=True) if items]
    if not kept:
        raise DataError("not one example is left to evaluate on")
    loss = mean_loss(
        task, head, pack((item for _, items in kept for item in items), num_token_arrays=task.num_token_arrays), budget
    )
    judged = [example for example, _ in kept]
    answers = list(predict(task, head, judged, limit, task.options(), budget))
    return EvaluationResult({"loss": loss, **task.score(answers, judged)}, task.confusion(answers, judged))


@frozen_weights()
def judge_prepared(task: Task, head: Head, data: Shards, place: str) -> EvaluationResult:
    """Score a head on a prepared corpus, where the task needs no texts for that."""
    with torch.inference_mode(), _evaluating(head):
        measured = task.measure_prepared(head, data)
    if measured is None:
        raise ConfigError(
            f"{place}: is prepared: it has tokens, but not the texts, which the task {task.config.name!r} needs; "
            "give the text itself"
        )
    return EvaluationResult(measured.metrics, None, measured.note)


def mean_loss(task: Task, head: Head, data: PackedItems, budget: int | None = None) -> float:
    """Return the sum over the parts of each part's mean."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    device = _device(head)

    def losses(indices: np.ndarray) -> tuple[dict[str, float], Mapping[str, int]]:
        batch = _batch(task, data, indices)
        with torch.inference_mode():
            return {part: float(value) for part, value in head(batch.to(device))[0].items()}, batch.counts

    planned = plan(data, budget or _budget(device), seed=None)
    with _evaluating(head):
        for found, counted in side_by_side(losses, planned) if device.type == "cpu" else map(losses, planned):
            for part, value in found.items():
                sums[part] = sums.get(part, 0.0) + value
                counts[part] = counts.get(part, 0) + counted[part]
    return sum(sums[part] / max(counts[part], 1) for part in sums)


class _evaluating:  # noqa: N801
    """Dropout off inside, and as it was after."""

    def __init__(self, head: Head) -> None:
        self._head, self._was = head, head.training

    def __enter__(self) -> None:
        self._head.eval()

    def __exit__(self, *error: object) -> None:
        self._head.train(self._was)


def _device(head: Head) -> torch.device:
    return next(chain(head.parameters(), head.buffers())).device
