"""The manifest of a checkpoint: manifest.json, written last, has the size and SHA-256 of each file."""

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from weft.checkpoint.atomic_io import (
    digest,
    is_folder,
    iter_paths,
    new_folder,
    open_descriptor,
    sync_folder,
    wrap_os_errors,
    wrap_read_errors,
    write_new,
)
from weft.config.schema import Section
from weft.config.small_files import read_small_file
from weft.errors import CheckpointError

CHECKPOINT_MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


class File(Section):
    """The expected SHA-256 and size of one file."""

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class CheckpointManifest(Section):
    """The step of a checkpoint, and its files."""

    format: Literal[1] = 1
    step: int = Field(ge=0)
    files: dict[str, File]


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against its manifest, and return the manifest."""
    try:
        return check_files(folder).model_dump()
    except CheckpointError as error:
        raise CheckpointError(f"{error}; copy the checkpoint again or use another") from None


def save_folder(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Write one checkpoint outside a run, in a new folder; the folder appears complete or not at all."""
    with wrap_os_errors(folder, "cannot be saved", "choose a new folder where you may write"):
        if folder.exists():
            raise CheckpointError(f"{folder}: exists already; choose a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        return write_checkpoint(folder, step, write)


def write_checkpoint(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Write a checkpoint to a temporary folder, flush it, and rename it to `folder`."""
    with new_folder(folder) as temporary:
        write(temporary)
        seal(temporary, step)
    sync_folder(folder.parent)
    return folder


def seal(folder: Path, step: int) -> None:
    """Flush every file of a folder, and write the manifest last."""
    files: dict[str, File] = {}
    for path in iter_paths(folder):
        if is_folder(path):
            sync_folder(path)
            continue
        assert stat.S_ISREG(path.lstat().st_mode), f"{path}: a checkpoint holds plain files"
        with open_descriptor(path, os.O_RDONLY) as handle:
            os.fsync(handle)
            size = os.fstat(handle).st_size
            files[path.relative_to(folder).as_posix()] = File(sha256=digest(handle), bytes=size)
    assert CHECKPOINT_MANIFEST not in files, f"{CHECKPOINT_MANIFEST} is written here alone"
    manifest = CheckpointManifest(step=step, files=files)
    write_new(folder / CHECKPOINT_MANIFEST, json.dumps(manifest.model_dump(), indent=1).encode())
    sync_folder(folder)


def check_files(folder: Path) -> CheckpointManifest:
    """Check every file against the manifest; raise an error that names the first mismatch and its reason."""
    manifest = _read_manifest(folder)
    with wrap_read_errors(folder):
        files = [path for path in iter_paths(folder) if not is_folder(path)]
    present = {path.relative_to(folder).as_posix() for path in files} - {CHECKPOINT_MANIFEST}
    for name in sorted(manifest.files.keys() - present):
        raise CheckpointError(f"{folder / name}: missing")
    for name in sorted(present - manifest.files.keys()):
        raise CheckpointError(
            f"{folder / name}: not listed in {CHECKPOINT_MANIFEST}, so it was not saved with this checkpoint"
        )
    for name, file in manifest.files.items():
        _inspect_file(folder / name, file)
    return manifest


def _inspect_file(path: Path, file: File) -> None:
    try:
        with open_descriptor(
            path, os.O_RDONLY | os.O_NONBLOCK
        ) as handle:  # a named pipe in place of a file must not block
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: not a plain file")
            if status.st_size != file.bytes:
                raise CheckpointError(f"{path}: must have {file.bytes} bytes, but has {status.st_size}")
            if digest(handle) != file.sha256:
                raise CheckpointError(f"{path}: its contents have changed since it was saved (SHA-256 differs)")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _read_manifest(folder: Path) -> CheckpointManifest:
    path = folder / CHECKPOINT_MANIFEST
    try:
        manifest = CheckpointManifest.model_validate_json(read_small_file(path), strict=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first_error = error.errors()[0]
        key = ".".join(map(str, first_error["loc"]))
        raise CheckpointError(f"{path}: damaged: {key + ': ' if key else ''}{first_error['msg']}") from None
    name = folder.resolve().name
    if NAME.fullmatch(name) and order(Path(name))[0] != manifest.step:
        raise CheckpointError(f"{path}: damaged: it says step {manifest.step}, but the folder is {name}")
    return manifest


def order(folder: Path) -> tuple[int, int]:
    """Return step and save number from a checkpoint's name: (400, 2) for `step-00000400.2`."""
    match = NAME.fullmatch(folder.name)
    assert match, folder
    return int(match[1]), int(match[2] or 1)
