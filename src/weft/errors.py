"""The errors that a user can cause; the command line prints them without a traceback and exits with 2.

    WeftError
    ├── ConfigError       a recipe, an override or an option
    ├── DataError         a file, a row, a label
    ├── CheckpointError   a saved run: damaged, changed, locked, no room to write it
    ├── RoleError         a model does not support what a task needs
    └── TrainingError     the training itself: the loss is not a number

A message names the key or file, the value and a remedy: "model.heads must divide model.width: got 12 and 500; try 10".
"""

from collections.abc import Iterable
from difflib import get_close_matches


class WeftError(Exception):
    """The root of all errors that weft raises on purpose."""


class ConfigError(WeftError):
    """A recipe, an override or an option is wrong."""


class DataError(WeftError):
    """A file, a row or a label is wrong; the message starts with file:line where there is one."""


class CheckpointError(WeftError):
    """A saved run is damaged, does not fit, is in use, or cannot be written."""


class RoleError(WeftError):
    """A task needs what a model, as configured, does not support."""


class TrainingError(WeftError):
    """Training cannot go on."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the most similar known name or, if none is similar, all of them."""
    known = sorted(known)
    match = nearest(name, known)
    return f"did you mean {match!r}?" if match is not None else f"known: {', '.join(known)}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the most similar known name; None if none is similar."""
    return next(iter(get_close_matches(name, sorted(known), n=1, cutoff=0.6)), None)
