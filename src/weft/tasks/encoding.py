"""Encoding of examples: to items, in chunks; and labelled examples encoded once for every evaluation of a run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from weft.data.batching.packed_items import PackedItems, pack
from weft.data.readers.examples import Skipped
from weft.data.truncation import TruncationPolicy
from weft.errors import DataError
from weft.tasks.base import Task
from weft.tasks.batch import Item
from weft.tokenization.trainable import Tokenizer

ENCODE_CHUNK = 1024  # examples encoded in one call of the tokenizer

LocatedExample = tuple[Any, Any]  # the location of an example, such as file:line, and the example
_T = TypeVar("_T")


def encode_all(
    examples: Iterable[LocatedExample],
    task: Task,
    tokenizer: Tokenizer,
    limit: TruncationPolicy,
    skipped: Skipped | None,
) -> Iterator[list[Item]]:
    """Yield the items of each example, encoded in chunks; an invalid example raises, or is counted in `skipped`.

    The tokenizer, which releases the GIL, encodes one chunk in a thread while the next is read.
    """

    def encode(chunk: list[LocatedExample]) -> tuple[list[list[Item]], TruncationPolicy] | None:
        chunk_limit = TruncationPolicy(limit.max_length, limit.policy)
        try:
            return task.encode_batch([example for _, example in chunk], tokenizer, chunk_limit), chunk_limit
        except DataError:
            return None

    with ThreadPoolExecutor(1) as pool:
        for chunk, future in _prefetch((chunk, pool.submit(encode, chunk)) for chunk in _chunks(examples)):
            encoded = future.result()
            if encoded is None:
                yield from _encode_singly(chunk, task, tokenizer, limit, skipped)
            else:
                limit.add(encoded[1])
                yield from encoded[0]


def encode_chunk(
    chunk: Sequence[LocatedExample], task: Task, tokenizer: Tokenizer, limit: TruncationPolicy, skipped: Skipped | None
) -> Iterable[list[Item]]:
    """Return the items of each example, encoded at once and, unlike `encode_all`, in this thread."""
    chunk_limit = TruncationPolicy(limit.max_length, limit.policy)
    try:
        encoded = task.encode_batch([example for _, example in chunk], tokenizer, chunk_limit)
    except DataError:
        return _encode_singly(chunk, task, tokenizer, limit, skipped)
    limit.add(chunk_limit)
    return encoded


def _chunks(examples: Iterable[LocatedExample]) -> Iterator[list[LocatedExample]]:
    stream = iter(examples)
    while chunk := list(islice(stream, ENCODE_CHUNK)):
        yield chunk


def _prefetch(stream: Iterable[_T]) -> Iterator[_T]:
    """Yield the items of a stream, each after the next has been requested."""
    pending: list[_T] = []
    for item in stream:
        yield from pending
        pending = [item]
    yield from pending


def _encode_singly(
    chunk: Iterable[LocatedExample], task: Task, tokenizer: Tokenizer, limit: TruncationPolicy, skipped: Skipped | None
) -> Iterator[list[Item]]:
    for place, example in chunk:
        try:
            yield task.encode(example, tokenizer, limit)
        except DataError as error:
            located = DataError(f"{place}: {error}")
            if skipped is None:
                raise located from None
            skipped.add(located)
            yield []


@dataclass(frozen=True)
class EvaluationData:
    """Labelled examples, encoded once for all evaluations: with their labels for the loss, and without them."""

    task: Task
    examples: list[Any]
    items: PackedItems  # of all examples, with their labels
    limit: TruncationPolicy
    parts: Mapping[str, "EvaluationData"] = field(default_factory=dict)  # of several tasks, those of each

    @classmethod
    def of(
        cls, task: Task, examples: Iterable[LocatedExample], limit: TruncationPolicy, skipped: Skipped | None = None
    ) -> "EvaluationData":
        """Encode examples; leave out those of which nothing is left."""
        usable: list[Any] = []

        def items() -> Iterator[Item]:
            located = list(examples)
            encoded = encode_all(located, task, task.tokenizer, limit, skipped)
            for (_, example), own_items in zip(located, encoded, strict=True):
                if own_items:
                    usable.append(example)
                    yield from own_items

        packed = pack(items(), num_token_arrays=task.num_token_arrays)
        return cls(task, usable, packed, limit)

    @cached_property
    def unlabelled(self) -> tuple[PackedItems, np.ndarray]:
        """The items of the examples without labels, and the index (n + 1,) of each example's first item."""
        limit, starts = TruncationPolicy(self.limit.max_length, self.limit.policy), [0]

        def items() -> Iterator[Item]:
            questions = ((f"example {number}", self.task.without_labels(example)) for number, example in self._numbered)
            for own_items in encode_all(questions, self.task, self.task.tokenizer, limit, None):
                starts.append(starts[-1] + len(own_items))
                yield from own_items

        return pack(items(), num_token_arrays=self.task.num_token_arrays), np.array(starts)

    @property
    def _numbered(self) -> Iterable[tuple[int, Any]]:
        return enumerate(self.examples, 1)
