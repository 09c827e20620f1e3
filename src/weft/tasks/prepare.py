"""From a recipe's data to examples, a tokenizer and packed items: the way that training and evaluation share."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from weft.config.schema import Data, Named
from weft.data.batching.packed import PackedItems, pack
from weft.data.readers.columns import Given, joined, spread
from weft.data.readers.examples import Skipped, read_examples
from weft.data.samples.datasets import SAMPLES, read_sample
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError, did_you_mean
from weft.tasks.base import Item, Task
from weft.tasks.corpus.reuse import prepared_folder, prepared_split, prepared_task, prepared_tokenizer, refused
from weft.tokenization.trainable import Tokenizer, train_tokenizer

AT_ONCE = 1024  # examples a call of the tokenizer

T = TypeVar("T")
Placed = tuple[Any, Any]  # where an example comes from, such as file:line, and the example


def has_split(data: Data, split: str) -> bool:
    """Say whether the recipe has this part of the data."""
    return data.sample is not None or getattr(data, split) is not None


def data_for(recipe: Data, data: str | Path | None) -> tuple[Data, str]:
    """Say what to read: the recipe's test (or else validation) data, a file in the recipe's columns, or a sample."""
    if data is None:
        return recipe, "test" if recipe.sample or recipe.test else "valid"
    name, _, split = str(data).partition(":")
    if name in SAMPLES and not Path(data).exists():
        return recipe.model_copy(update={"sample": name}), split or "test"
    return recipe.model_copy(update={"sample": None, "test": str(data)}), "test"


def read_split(data: Data, split: str, task: Task, skipped: Skipped) -> Iterator[Placed]:
    """Stream the examples of `train`, `valid` or `test` with their places."""
    if data.sample is not None:
        sampled = _sampled(data.sample, split, task, data.columns)
        return _answered(sampled, data, task, skipped)
    source = getattr(data, split)
    if prepared_folder(data, split):
        return refused(data, split)
    if not source:  # the recipe of a model that came from elsewhere has an empty list
        raise ConfigError(f"data.{split}: required here, but not given; add a file")
    return _answered(read_examples(source, data, task.Example, skipped), data, task, skipped)


def _sampled(name: str, split: str, task: Task, columns: Given | None) -> Iterator[Placed]:
    for place, found in read_sample(name, split):
        row = _chosen(name, found, columns) if columns else found
        try:
            yield place, task.Example.model_validate(row)
        except ValidationError:
            fields, wanted = ", ".join(row), ", ".join(task.Example.model_fields)
            raise DataError(
                f"data.sample: a row of {name} has {fields}, but the task {task.config.name!r} reads {wanted}; "
                "see weft data list"
            ) from None


def _chosen(name: str, row: Mapping[str, Any], columns: Given) -> dict[str, Any]:
    given, lists = spread(columns)
    for field, column in given.items():
        if column not in row:
            raise ConfigError(
                f"data.columns.{field}: a row of the sample {name} has no {column!r}; {did_you_mean(str(column), row)}"
            )
    return joined({field: row[str(column)] for field, column in given.items()}, lists)


def _answered(examples: Iterable[Placed], data: Data, task: Task, skipped: Skipped) -> Iterator[Placed]:
    for place, example in examples:
        try:
            check_answer(task, place, example)
        except DataError as error:
            if data.on_bad_rows == "error":
                raise
            skipped.add(error)
        else:
            yield place, example


def check_answer(task: Task, place: Any, example: Any) -> None:
    """Refuse an example that says what is asked but not what is right: it can neither teach nor judge."""
    for name in task.label_fields:
        if getattr(example, name) is None:
            raise DataError(f"{place}: {name}: required to train or evaluate, but not given; see data.columns")


def settled(data: Data, task: Task) -> Named:
    """Fill in what the recipe's task leaves to the training data."""
    task = prepared_task(data, task)
    return task.resolve_config(example for _, example in read_split(data, "train", task, Skipped()))


def fit_tokenizer(config: Named, data: Data, task: Task) -> Tokenizer:
    """Train the tokenizer on the training split, streamed once for each side; a prepared one has its own."""
    if prepared := prepared_tokenizer(config, data):
        return prepared

    def side(which: int) -> Iterator[str]:
        for _, example in read_split(data, "train", task, Skipped()):
            yield from task.texts(example)[which]

    return train_tokenizer(config, side(0), side(1))


def encode_all(
    examples: Iterable[Placed], task: Task, tokenizer: Tokenizer, limit: TruncationPolicy, skipped: Skipped | None
) -> Iterator[list[Item]]:
    """Encode a stream, many examples at a time; an example that cannot be is an error, or counted in `skipped`.

    A thread has the tokenizer, which needs no Python while it works, busy with one chunk while the next is read.
    """

    def encode(chunk: list[Placed]) -> tuple[list[list[Item]], TruncationPolicy] | None:
        part = TruncationPolicy(limit.longest, limit.policy)
        try:
            return task.encode_batch([example for _, example in chunk], tokenizer, part), part
        except DataError:
            return None

    with ThreadPoolExecutor(1) as pool:
        for chunk, coming in _one_ahead((chunk, pool.submit(encode, chunk)) for chunk in _chunks(examples)):
            encoded = coming.result()
            if encoded is None:
                yield from _one_by_one(chunk, task, tokenizer, limit, skipped)
            else:
                limit.add(encoded[1])
                yield from encoded[0]


def encode_chunk(
    chunk: Sequence[Placed], task: Task, tokenizer: Tokenizer, limit: TruncationPolicy, skipped: Skipped | None
) -> Iterable[list[Item]]:
    """Encode some examples at once and, unlike `encode_all`, in this thread: for one of several processes."""
    part = TruncationPolicy(limit.longest, limit.policy)
    try:
        encoded = task.encode_batch([example for _, example in chunk], tokenizer, part)
    except DataError:
        return _one_by_one(chunk, task, tokenizer, limit, skipped)
    limit.add(part)
    return encoded


def _chunks(examples: Iterable[Placed]) -> Iterator[list[Placed]]:
    stream = iter(examples)
    while chunk := list(islice(stream, AT_ONCE)):
        yield chunk


def _one_ahead(stream: Iterable[T]) -> Iterator[T]:
    """Ask for each one before handing out the one before it."""
    held: list[T] = []
    for one in stream:
        yield from held
        held = [one]
    yield from held


def _one_by_one(
    chunk: Iterable[Placed], task: Task, tokenizer: Tokenizer, limit: TruncationPolicy, skipped: Skipped | None
) -> Iterator[list[Item]]:
    for place, example in chunk:
        try:
            yield task.encode(example, tokenizer, limit)
        except DataError as error:
            placed = DataError(f"{place}: {error}")
            if skipped is None:
                raise placed from None
            skipped.add(placed)
            yield []


def pack_split(
    data: Data, split: str, task: Task, tokenizer: Tokenizer, folder: Path | None = None
) -> tuple[PackedItems, str]:
    """Encode a whole split to a memory-mapped file; return it and a report of what was skipped or cut."""
    if prepared := prepared_split(data, split, task, tokenizer):
        return prepared
    skipped, limit = Skipped(), TruncationPolicy(data.longest, data.too_long)
    examples = read_split(data, split, task, skipped)
    encoded = encode_all(examples, task, tokenizer, limit, skipped if data.on_bad_rows == "skip" else None)
    packed = pack((item for items in encoded for item in items), folder, num_token_arrays=task.num_token_arrays)
    return packed, told(split, len(packed), skipped, limit)


def read_whole(data: Data, split: str, task: Task, tokenizer: Tokenizer) -> tuple[list[Any], str]:
    """Read a split to evaluate on, without what is skipped or dropped; return it and a report of that."""
    skipped, limit = Skipped(), TruncationPolicy(data.longest, data.too_long)
    placed = list(read_split(data, split, task, skipped))
    encoded = encode_all(placed, task, tokenizer, limit, skipped if data.on_bad_rows == "skip" else None)
    examples = [example for (_, example), items in zip(placed, encoded, strict=True) if items]
    return examples, told(split, len(examples), skipped, limit)


def told(split: str, left: int, skipped: Skipped, limit: TruncationPolicy) -> str:
    """Say what was skipped or cut; that nothing is left is an error."""
    notice = "; ".join(part for part in (str(skipped), str(limit)) if part)
    if not left:
        raise DataError(f"data.{split}: not one example is left to use; {notice}".rstrip("; "))
    return notice
