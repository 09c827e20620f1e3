"""The check that a model's outputs and answers are numbers: NaN and infinity are errors, not answers."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from weft.errors import DataError
from weft.tasks.base import Answer, Task

NOT_FINITE = "the model computes NaN or infinite numbers for it; use another checkpoint, or the precision fp32"


def finite_answer(task: Task, example: Any, item_outputs: list[Any], number: int) -> Answer:
    """Return the answer to example `number`; raise DataError if a number in it is NaN or infinite."""
    answer = task.answer(example, item_outputs)
    if not all(map(math.isfinite, _numbers_in(answer))):
        raise DataError(f"example {number}: {NOT_FINITE}")
    return answer


def check_outputs(outputs: Any) -> None:
    """Raise DataError if a head's outputs have NaN or infinity; the score -inf stands for what is impossible."""
    if any(math.isnan(value) or value == math.inf for value in _numbers_in(outputs)):
        raise DataError(NOT_FINITE)


def _numbers_in(value: Any) -> Iterator[float]:
    """Yield the floating-point numbers in lists, mappings, dataclasses, arrays and tensors."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_numbers_in, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_numbers_in, value))
    elif isinstance(value, Tensor):
        yield from value.detach().double().flatten().tolist() if value.is_floating_point() else ()
    elif isinstance(value, np.ndarray):
        yield from value.astype(float).ravel().tolist() if value.dtype.kind == "f" else ()
    elif is_dataclass(value):
        yield from chain.from_iterable(_numbers_in(getattr(value, part.name)) for part in fields(value))
