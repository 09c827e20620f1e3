"""Crash-safe file operations (create, flush, temporary names), and `OSError` as `CheckpointError`."""

import errno
import filecmp
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


def iter_paths(folder: Path) -> Iterator[Path]:
    """Yield every path under a folder, depth first: the contents of a sub-folder before the sub-folder."""
    for path in sorted(folder.iterdir()):
        if is_folder(path):
            yield from iter_paths(path)
        yield path


def is_folder(path: Path) -> bool:
    """Return whether the path is a directory, not a symbolic link to one."""
    return path.is_dir() and not path.is_symlink()


def temporary_in(folder: Path) -> Path:
    """Return a new temporary path in a folder; a file left there by a killed run is removed by the next save."""
    return folder / f"{TEMPORARY}{secrets.token_hex(8)}"


def remove(path: Path) -> None:
    """Remove an unreferenced file or folder; if that fails, the next save removes it."""
    if is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()


@contextmanager
def open_descriptor(path: Path, flags: int) -> Iterator[int]:
    """Open a file descriptor, and close it on exit."""
    handle = os.open(path, flags, 0o666)
    try:
        yield handle
    finally:
        os.close(handle)


def digest(handle: int) -> str:
    """Return the SHA-256 of a descriptor's bytes from its current position on."""
    sha256 = hashlib.sha256()
    while chunk := os.read(handle, _CHUNK):
        sha256.update(chunk)
    return sha256.hexdigest()


def write_new(path: Path, data: bytes) -> None:
    """Write a new file, and flush it to the disk."""
    with open_descriptor(path, _NEW) as handle:
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[os.write(handle, remaining) :]
        os.fsync(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, flush it, and rename it: readers see the old file or the whole new one."""
    temporary = temporary_in(path.parent)
    try:
        write_new(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` on success and removed on an error."""
    temporary = temporary_in(folder.parent)
    try:
        temporary.mkdir()
        yield temporary
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def new_files(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder whose files are moved into `folder`, new or not, on success; on an error none is.

    A file that is there already must be the same.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(folder) as temporary:
            yield temporary
        return
    temporary = temporary_in(folder)
    try:
        temporary.mkdir()
        yield temporary
        files = [path.relative_to(temporary) for path in iter_paths(temporary) if path.is_file()]
        for file in files:
            if (folder / file).exists() and not filecmp.cmp(folder / file, temporary / file, shallow=False):
                raise CheckpointError(f"{folder / file}: exists already, and differs; choose a new folder")
        for file in files:
            (folder / file).parent.mkdir(exist_ok=True)
            os.replace(temporary / file, folder / file)
    finally:
        remove(temporary)


def sync_folder(folder: Path) -> None:
    """Flush a directory's entries to the disk."""
    with open_descriptor(folder, os.O_RDONLY) as handle:
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # from network file systems that cannot flush a directory
                raise


@contextmanager
def wrap_os_errors(path: Path, problem: str, remedy: str) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError` that names the path, the problem and the remedy."""
    try:
        yield
    except FileExistsError as error:
        raise CheckpointError(f"{path}: {problem}: {error.filename} is not a folder; {remedy}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {problem}: {error.strerror or error}; {remedy}") from error
    except SafetensorError as error:  # safetensors reports a full disk this way
        raise CheckpointError(f"{path}: {problem}: {error}; {remedy}") from error


def wrap_read_errors(path: Path) -> AbstractContextManager[None]:
    """Turn an `OSError` while reading `path` into a `CheckpointError`."""
    return wrap_os_errors(path, "cannot be read", "check its permissions and its disk")
