"""The few things that the store asks of a file system, and how its refusals are told."""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from weft.errors import CheckpointError

TEMPORARY = ".tmp-"
_CHUNK = 1 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def walk(folder: Path) -> Iterator[Path]:
    """Yield all that is under a folder, what is in a sub-folder before the sub-folder itself."""
    for path in sorted(folder.iterdir()):
        if is_folder(path):
            yield from walk(path)
        yield path


def is_folder(path: Path) -> bool:
    """Say whether this is a folder itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def temporary_in(place: Path) -> Path:
    """Name something that is not there yet and that the next save may remove."""
    return place / f"{TEMPORARY}{secrets.token_hex(8)}"


def remove(path: Path) -> None:
    """Remove what no name or link leads to any more; what cannot be removed now is swept by the next save."""
    if is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a descriptor, and close it."""
    handle = os.open(path, flags, 0o666)
    try:
        yield handle
    finally:
        os.close(handle)


def digest(handle: int) -> str:
    """Return the SHA-256 of what is left to read."""
    found = hashlib.sha256()
    while chunk := os.read(handle, _CHUNK):
        found.update(chunk)
    return found.hexdigest()


def write_new(path: Path, data: bytes) -> None:
    """Write a file that is not there yet, and flush it."""
    with opened(path, _NEW) as handle:
        left = memoryview(data)
        while left:
            left = left[os.write(handle, left) :]
        os.fsync(handle)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder."""
    with opened(folder, os.O_RDONLY) as handle:
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems cannot flush a folder, and say so by this
                raise


@contextmanager
def explained(place: Path, problem: str, remedy: str) -> Iterator[None]:
    """Turn the operating system's refusal into an error that names the place, the problem and the remedy."""
    try:
        yield
    except FileExistsError as error:
        raise CheckpointError(f"{place}: {problem}: {error.filename} is in the place of a folder; {remedy}") from error
    except OSError as error:
        raise CheckpointError(f"{place}: {problem}: {error.strerror or error}; {remedy}") from error
    except SafetensorError as error:  # so the library reports a full disk
        raise CheckpointError(f"{place}: {problem}: {error}; {remedy}") from error


def readable(place: Path) -> AbstractContextManager[None]:
    """Tell of a place that cannot be read."""
    return explained(place, "cannot be read", "check its permissions and its disk")
