"""The errors that a user can cause; the command line prints them without a traceback and exits with 2.

    WeftError
    ├── ConfigError       a recipe, an override or an option
    ├── DataError         a file, a row, a label
    ├── CheckpointError   a saved run: damaged, changed, locked, no room to write it
    ├── RoleError         a model does not support what a task needs
    └── TrainingError     the training itself: the loss is not a number

A message names the key or file, the value and a remedy: "model.heads must divide model.width: got 12 and 500; try 10".
"""

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

MAX_SHOWN = 200  # characters of a value in a message
MAX_NAMES = 60  # of known names that a message lists
MAX_COMPARED = 5_000  # names that an unknown one is compared with
MAX_MESSAGE = 4_000  # characters of a message: what it quotes may be of any length


class WeftError(Exception):
    """The root of all errors that weft raises on purpose."""

    def __str__(self) -> str:
        """Return the message; of a very long one the beginning, with the place, and the end, with the remedy."""
        text = super().__str__()
        half = MAX_MESSAGE // 2
        return text if len(text) <= MAX_MESSAGE else f"{text[:half]} … {text[-half:]}"


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
    """Return a hint for an unknown name: the most similar known name or, if none is similar, the first of them."""
    known = sorted(known)
    match = nearest(name, known)
    if match is not None:
        return f"did you mean {match!r}?"
    more = f" and {len(known) - MAX_NAMES:,} more" if len(known) > MAX_NAMES else ""
    return f"known: {', '.join(known[:MAX_NAMES])}{more}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the most similar known name; None if none is similar, or if there are too many to compare."""
    known = sorted(known)
    if len(known) > MAX_COMPARED or len(name) > MAX_SHOWN:
        return None
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.6)), None)


def disk_remedy(error: OSError) -> str:
    """Return what to do about a file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free some room"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make it writable, or choose another place"
    if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST):
        return "move what is there, or choose another place"
    return "choose a shorter name" if error.errno == errno.ENAMETOOLONG else "check the path and its disk"


def abbreviate(value: object, most: int = MAX_SHOWN) -> str:
    """Return a value as Python writes it, for a message; of a long one, the beginning."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


@contextmanager
def in_task(name: str) -> Iterator[None]:
    """Put the name of one of several tasks before the message of an error that is raised inside."""
    try:
        yield
    except WeftError as error:
        lines = str(error).splitlines()
        places = [
            f"tasks.{name}{'.' if line.startswith(('task.', 'data.', 'task:', 'data:')) else ': '}" for line in lines
        ]
        raise type(error)("\n".join(map("".join, zip(places, lines, strict=True)))) from None
