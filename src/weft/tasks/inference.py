"""Inference: answers to examples, in order and in bounded memory, for the command line, the server and evaluations."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any

import numpy as np

from weft.config.schema import Section
from weft.data.batching.packed_items import pack_in_memory
from weft.data.truncation import TruncationPolicy
from weft.errors import DataError, RoleError
from weft.nn.layers.packed_linear import frozen_weights
from weft.tasks.base import Answer, Task
from weft.tasks.batch import Batch, Item
from weft.tasks.capabilities import TeacherForcing
from weft.tasks.encoding import encode_chunk
from weft.tasks.finite_answers import check_outputs, finite_answer
from weft.tasks.head import Head
from weft.tasks.inference_batches import plan_inference_batches, run_batches

INFERENCE_CHUNK = 1024  # examples a chunk: enough for batches of similar lengths
MAX_LOGITS, MAX_LOGITS_ON_GPU = 1 << 23, 1 << 28  # logits of a decoding step: fit the caches, or the GPU's memory


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
            yield from zip(chunk, chunk_outputs(task, head, encoded, limit, options, budget, numbers), strict=True)
            offset += len(chunk)


def chunk_outputs(
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
    data = pack_in_memory(items, task.num_token_arrays)
    logits_per_item = head.logits_per_item(options)
    max_logits = MAX_LOGITS if head.device.type == "cpu" else MAX_LOGITS_ON_GPU
    max_items = max(1, max_logits // logits_per_item) if logits_per_item else len(items)

    def answer(indices: np.ndarray, batch: Batch) -> Iterator[tuple[int, Any]]:
        batch_outputs = head.predict(batch.numbered(rows[indices].tolist()), options)
        check_outputs(batch_outputs)
        return zip(indices.tolist(), batch_outputs, strict=True)

    batches = plan_inference_batches(head, data, budget)
    parts = [part for indices in batches for part in np.array_split(indices, -(-len(indices) // max_items))]
    for outputs in run_batches(task, head, data, parts, answer):
        yield from outputs


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
