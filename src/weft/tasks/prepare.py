"""Data preparation: read a recipe's splits, train the tokenizer, and pack the encoded examples."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from weft.config.schema import Named
from weft.config.sections import Data, TasksData
from weft.data.batching.packed_items import GroupedItems, PackedItems, pack
from weft.data.readers.column_mapping import ColumnSpec, join_list_fields, split_list_columns
from weft.data.readers.examples import Skipped, read_examples
from weft.data.readers.held_out import RowKind, read_held_out
from weft.data.readers.records import read_as_recipe
from weft.data.samples.datasets import SAMPLES, read_sample
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError, did_you_mean, in_task
from weft.tasks.base import Task
from weft.tasks.corpus.reuse import prepared_folder, prepared_split, prepared_task, prepared_tokenizer, refuse_prepared
from weft.tasks.encoding import EvaluationData, LocatedExample, encode_all
from weft.tasks.multitask import MultiTask
from weft.tokenization.trainable import Tokenizer, train_tokenizer

_T = TypeVar("_T")


def has_split(data: Data, split: str) -> bool:
    """Return whether the recipe has this split; of several tasks, whether one has it."""
    if isinstance(data, TasksData):
        return any(has_split(own, split) for own in data.tasks.values())
    held_out = split == "valid" and data.validation_fraction is not None
    return held_out or data.sample is not None or getattr(data, split) is not None


def data_for(
    recipe: Data, data: str | Path | None, columns: ColumnSpec | None = None, fields: Sequence[str] = ()
) -> tuple[Data, str]:
    """Return data and split to evaluate on: the recipe's test (else validation) data, a file, or a sample.

    `columns` of a file, by field, override the recipe's; `fields` are those that it must have (`labelled_fields`).
    """
    if data is None:
        if columns:
            raise ConfigError(f"columns: are of a file, but no file is given with {dict(columns)}; name one")
        return recipe, "test" if recipe.sample or recipe.test else "valid"
    name, _, split = str(data).partition(":")
    if name in SAMPLES and not Path(data).exists():
        return recipe.model_copy(update={"sample": name}), split or "test"
    read = read_as_recipe(recipe, str(data), columns, fields)
    return read.model_copy(update={"sample": None, "test": str(data)}), "test"


def labelled_fields(task: Task) -> list[str]:
    """Return the fields that every labelled example has."""
    required = [name for name, info in task.Example.model_fields.items() if info.is_required()]
    return [*required, *task.required_optional_fields, *task.label_fields]


def read_split(data: Data, split: str, task: Task, skipped: Skipped) -> Iterator[LocatedExample]:
    """Yield the examples of `train`, `valid` or `test` with their locations."""
    if isinstance(data, TasksData):
        raise ConfigError("tasks: have data of their own, with different examples; name a recipe of one task")
    if data.sample is not None:
        examples = _read_sample(data.sample, split, task, data.columns)
        return _with_labels(examples, data, task, skipped)
    source = getattr(data, split)
    if prepared_folder(data, split):
        return refuse_prepared(data, split)
    if data.validation_fraction is not None and split != "test":
        rows = RowKind(task.Example, task.input_fields, task.stratify_by)
        return _with_labels(read_held_out(data, split, rows, skipped), data, task, skipped)
    if not source:  # the recipe of a converted model has an empty list
        raise ConfigError(f"data.{split}: required here, but not given; add a file")
    return _with_labels(read_examples(source, data, task.Example, skipped), data, task, skipped)


def _read_sample(name: str, split: str, task: Task, columns: ColumnSpec | None) -> Iterator[LocatedExample]:
    for place, fields in read_sample(name, split):
        row = _select_columns(name, fields, columns) if columns else fields
        try:
            yield place, task.Example.model_validate(row)
        except ValidationError:
            names, wanted = ", ".join(row), ", ".join(task.Example.model_fields)
            raise DataError(
                f"data.sample: a row of {name} has {names}, but the task {task.config.name!r} reads {wanted}; "
                "see weft data list"
            ) from None


def _select_columns(name: str, row: Mapping[str, Any], columns: ColumnSpec) -> dict[str, Any]:
    mapping, lists = split_list_columns(columns)
    for field, column in mapping.items():
        if column not in row:
            raise ConfigError(
                f"data.columns.{field}: a row of the sample {name} has no {column!r}; {did_you_mean(str(column), row)}"
            )
    return join_list_fields({field: row[str(column)] for field, column in mapping.items()}, lists)


def _with_labels(
    examples: Iterable[LocatedExample], data: Data, task: Task, skipped: Skipped
) -> Iterator[LocatedExample]:
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
    """Raise if an example has no label: it cannot be used to train or evaluate."""
    for name in task.label_fields:
        if getattr(example, name) is None:
            raise DataError(f"{place}: {name}: required to train or evaluate, but not given; see data.columns")


def _each(data: Data, task: MultiTask, function: Callable[[Data, Task], _T]) -> dict[str, _T]:
    """Return what a function returns for the data and the task of each of several."""
    assert isinstance(data, TasksData)
    results: dict[str, _T] = {}
    for name, part in task.parts.items():
        with in_task(name):
            results[name] = function(data.tasks[name], part)
    return results


def resolve_task_config(data: Data, task: Task) -> Named:
    """Return the task's configuration with what is left to the training data, such as the labels."""
    if isinstance(task, MultiTask):
        return task.config.model_copy(update={"tasks": _each(data, task, resolve_task_config)})
    task = prepared_task(data, task)
    whole = data.model_copy(update={"validation_fraction": None})  # labels and pairs are of all rows
    return task.resolve_config(example for _, example in read_split(whole, "train", task, Skipped()))


def fit_tokenizer(config: Named, data: Data, task: Task) -> Tokenizer:
    """Train the tokenizer on the training split, streamed once for each side; a prepared corpus has its own."""
    if prepared := prepared_tokenizer(config, data):
        return prepared

    return train_tokenizer(config, _side(data, task, 0), _side(data, task, 1))


def _side(data: Data, task: Task, index: int) -> Iterator[str]:
    """Yield the texts that train the tokenizer, of the source side (0) or of the target side (1)."""
    if isinstance(task, MultiTask):
        yield from chain.from_iterable(_each(data, task, lambda own, part: _side(own, part, index)).values())
        return
    for _, example in read_split(data, "train", task, Skipped()):
        yield from task.texts(example)[index]


def pack_split(
    data: Data, split: str, task: Task, tokenizer: Tokenizer, folder: Path | None = None
) -> tuple[PackedItems, str]:
    """Encode a whole split to a memory-mapped file; return it and a report of what was skipped or cut."""
    if isinstance(task, MultiTask):
        pairs = _each(data, task, lambda own, part: pack_split(own, split, part, tokenizer, folder))
        return GroupedItems([items for items, _ in pairs.values()]), _join_notices(pairs)
    if prepared := prepared_split(data, split, task, tokenizer):
        return prepared
    skipped, limit = Skipped(), _truncation_policy(data, task)
    examples = read_split(data, split, task, skipped)
    encoded = encode_all(examples, task, tokenizer, limit, skipped if data.on_bad_rows == "skip" else None)
    packed = pack((item for items in encoded for item in items), folder, num_token_arrays=task.num_token_arrays)
    return packed, summarize_skipped(split, len(packed), skipped, limit)


def _truncation_policy(data: Data, task: Task) -> TruncationPolicy:
    """Return what happens to long sequences; its error knows whether `data.max_length` can be larger."""
    positions = task.position_limit
    is_largest = positions is not None and data.max_length >= positions - task.num_special_tokens
    return TruncationPolicy(data.max_length, data.truncation, is_largest=is_largest)


def read_evaluation_data(data: Data, split: str, task: Task) -> tuple[EvaluationData, str]:
    """Return the examples of a split, encoded, without those skipped or dropped, and a report of these."""
    if isinstance(task, MultiTask):
        pairs = _each(
            data, task, lambda own, part: read_evaluation_data(own, split, part) if has_split(own, split) else None
        )
        return _join_evaluation(task, {name: pair for name, pair in pairs.items() if pair is not None})
    skipped, limit = Skipped(), _truncation_policy(data, task)
    examples = read_split(data, split, task, skipped)
    encoded = EvaluationData.of(task, examples, limit, skipped if data.on_bad_rows == "skip" else None)
    return encoded, summarize_skipped(split, len(encoded.examples), skipped, limit)


def _join_evaluation(task: MultiTask, pairs: Mapping[str, tuple[EvaluationData, str]]) -> tuple[EvaluationData, str]:
    """Return the evaluation data of several tasks as one, and their reports."""
    parts = {name: own for name, (own, _) in pairs.items()}
    examples = [example for own in parts.values() for example in own.examples]
    items = GroupedItems([own.items for own in parts.values()])
    limit = next(iter(parts.values())).limit
    return EvaluationData(task, examples, items, limit, parts), _join_notices(pairs)


def _join_notices(pairs: Mapping[str, tuple[Any, str]]) -> str:
    return "; ".join(f"tasks.{name}: {notice}" for name, (_, notice) in pairs.items() if notice)


def summarize_skipped(split: str, remaining: int, skipped: Skipped, limit: TruncationPolicy) -> str:
    """Return a report of what was skipped or cut; raise if no example is left."""
    notice = "; ".join(part for part in (str(skipped), str(limit)) if part)
    if not remaining:
        raise DataError(f"data.{split}: not one example is left to use; {notice}".rstrip("; "))
    return notice
