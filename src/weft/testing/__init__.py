"""Property tests for models, weft's own and users' own: `check_model(MyModel, {"width": 16})`.

The model's roles select the properties, which are checked on small ragged batches, in float64 and eval mode, on the CPU
(`case`). A property is a function: its name is the statement that it checks, its docstring the likely cause of a
failure. Equal means up to rounding, 1e-9 of the values' magnitude (`properties`).
"""

from collections.abc import Mapping
from typing import Any

import torch

from weft.config.schema import Named, read_section
from weft.models.base import Model
from weft.testing.case import Case
from weft.testing.properties import PROPERTIES, Check

__all__ = ["PROPERTIES", "Case", "check_model", "prove"]


def check_model(
    kind: type[Model],
    config: Mapping[str, Any] | Named | None = None,
    vocab: int = 23,
    target_vocab: int | None = None,
    seed: int = 0,
) -> list[str]:
    """Check a model class with a config by its roles; return the names of the properties that hold.

    Outputs are equal up to 1e-9 of their magnitude, far more than matrix kernels for different shapes differ by. They
    are bitwise equal for the same input: read twice, from saved weights, from a state that was used before.
    Raise AssertionError with the first property that does not hold, by how much, and the likely cause.
    """
    if not isinstance(config, Named):
        config = read_section(kind.Config, {"name": kind.__name__.lower(), **(config or {})}, "model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        case = Case(kind, config, vocab, target_vocab)
        return [prove(check, case) for check, needs in PROPERTIES.items() if needs <= case.promises]


def prove(check: Check, case: Case) -> str:
    """Return the property's name; raise AssertionError if it does not hold."""
    name = check.__name__.replace("_", " ")
    try:
        with torch.no_grad():
            check(case)
    except Exception as error:
        reason = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        raise AssertionError(f"{case.kind.__name__}: not so: {name}: {reason}. Likely: {check.__doc__}") from error
    return name
