"""The directory of a run: checkpoints, two symbolic links and a lock, safe against a full disk and a kill at any time.

    run.yaml, metrics.jsonl       written by others
    lock                          held by `flock` while a run trains; contains its process id
    checkpoints/step-00000400/    any files, and manifest.json: the size and SHA-256 of each
    checkpoints/average-00000400/ the mean of the last checkpoints at step 400, where that is the best
    last, best                    relative symbolic links to checkpoints

A checkpoint is written under a temporary name, flushed, completed by its manifest and only then renamed; a link is
replaced by `os.replace`; an old checkpoint is renamed to a temporary name before it is deleted. So a folder named
`step-*` is always complete, and a link always points to a complete one. A link can be replaced atomically but a folder
cannot, so a step that is saved again goes beside the old one, as `step-00000400.2`, and the old one is deleted once no
link points to it.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.checkpoint.atomic_io import (
    TEMPORARY,
    remove,
    sync_folder,
    temporary_in,
    wrap_os_errors,
    wrap_read_errors,
    write_atomic,
    write_new,
)
from weft.checkpoint.manifest import (
    CHECKPOINT_MANIFEST,
    NAME,
    check_files,
    order,
    save_folder,
    verify_checkpoint,
    write_checkpoint,
)
from weft.errors import CheckpointError

__all__ = ["CHECKPOINT_MANIFEST", "Store", "resolve_checkpoint", "save_folder", "verify_checkpoint", "verify_or_offer"]

# Descriptors of the locks that this process holds. A forked worker closes its copies: otherwise it would keep the lock
# after the run that forked it has died.
_held_locks: set[int] = set()


def _close_locks() -> None:
    while _held_locks:
        os.close(_held_locks.pop())


os.register_at_fork(after_in_child=_close_locks)


class Store:
    """The directory of one run; `keep` is the number of newest checkpoints kept, beside `last` and `best`.

    Only checkpoints for which `is_regular` is true count: one saved on a signal does not displace them.
    """

    def __init__(self, root: Path, keep: int = 2, is_regular: Callable[[Path], bool] | None = None) -> None:
        self.root = Path(root)
        self.keep = keep
        self.is_regular = is_regular or (lambda folder: True)
        self._checkpoints = self.root / "checkpoints"
        self._lock: int | None = None

    def prepare(self) -> None:
        """Create the directory, check that it is writable and, under the lock, remove a killed run's leftovers."""
        with wrap_os_errors(self.root, "cannot hold a run", "choose another --out"):
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            self._remove_temporary()
            for folder in (self.root, self._checkpoints):
                test_file = temporary_in(folder)
                write_new(test_file, b"")
                test_file.unlink()
        for link in (self.root / "last", self.root / "best"):
            if link.exists() and not link.is_symlink():
                raise CheckpointError(
                    f"{link}: must be a link into checkpoints/, but is not (was the run copied without its links?); "
                    "delete it and run again: the checkpoints themselves are kept"
                )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the directory for this process; the kernel releases the lock when the process dies, however it dies."""
        with wrap_os_errors(self.root, "cannot be locked", "choose another --out"):
            self.root.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._acquire(lock)
            except BaseException:
                os.close(lock)
                raise
        _held_locks.add(lock)
        self._lock = lock
        try:
            yield
        finally:
            self._lock = None
            if lock in _held_locks:  # otherwise this is a forked child: the lock belongs to its parent
                _held_locks.remove(lock)
                os.close(lock)

    def _acquire(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
            owner = f"another run (process {holder})" if holder.isdigit() else "another run"
            message = f"{owner} is training in {self.root}; wait for it or choose another --out"
            raise CheckpointError(message) from None
        os.ftruncate(lock, os.pwrite(lock, f"{os.getpid()}\n".encode(), 0))

    def save(self, step: int, write: Callable[[Path], None], best: bool = False) -> Path:
        """Save what `write(folder)` writes as the checkpoint of `step`, update the links, and prune older ones."""
        previous = self.last()
        state = f"the previous checkpoint {previous.name} is whole" if previous else "there is no earlier checkpoint"
        remedy = f"{state}; free some room or mend the disk, then run again with --resume"
        with wrap_os_errors(self.root, f"step {step} could not be saved", remedy):
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            self._remove_temporary()
            folder = write_checkpoint(self._unused_path(step), step, write)
            # `best` first: a crash in between must not leave a `last` whose state has a best that no link points to.
            self._update_links(folder, *(["best"] if best else []), "last")
        with wrap_os_errors(self.root, f"{folder.name} is saved, but older ones could not be pruned", "mend the disk"):
            self._prune()
        return folder

    def _unused_path(self, step: int) -> Path:
        saves = [save for folder in self._newest_first() for saved, save in [order(folder)] if saved == step]
        return self._checkpoints / (f"step-{step:08d}.{saves[0] + 1}" if saves else f"step-{step:08d}")

    def _update_links(self, folder: Path, *links: str) -> None:
        for link in links:
            temporary = temporary_in(self.root)
            try:
                temporary.symlink_to(folder.relative_to(self.root))
                os.replace(temporary, self.root / link)
            except BaseException:
                remove(temporary)
                raise
        sync_folder(self.root)

    def save_average(self, step: int, write: Callable[[Path], None]) -> Path:
        """Save what `write(folder)` writes as the average at `step`, and point `best` to it; `last` is unchanged."""
        remedy = "free some room or mend the disk, then run again with --resume"
        with wrap_os_errors(self.root, f"the average at step {step} could not be saved", remedy):
            self._remove_temporary()
            self._prune()  # also an average that `best` did not yet point to when the run was killed
            folder = write_checkpoint(self._checkpoints / average_name(step), step, write)
            self._update_links(folder, "best")
            self._prune()
        return folder

    def _prune(self) -> None:
        regular = [folder for folder in self._oldest_first() if self.is_regular(folder)]
        linked = [target for link in ("last", "best") if (target := self._target(link))]
        retained = {folder.resolve() for folder in [*regular[-self.keep :], *linked]}
        folders = [*self._newest_first(), *self._checkpoints.glob("average-*")]
        obsolete = {folder: temporary_in(self._checkpoints) for folder in folders if folder.resolve() not in retained}
        for folder, temporary in obsolete.items():
            folder.rename(temporary)
        if obsolete:  # the renames must be on the disk first, or a power cut could restore a half-deleted folder
            sync_folder(self._checkpoints)
        for temporary in obsolete.values():
            remove(temporary)

    def _remove_temporary(self) -> None:
        if self._lock not in _held_locks:  # without the lock, another process may be writing these files
            return
        for folder in (self.root, self._checkpoints):
            for path in folder.glob(f"{TEMPORARY}*"):
                remove(path)

    def write_text(self, name: str, text: str) -> None:
        """Write a text file beside the checkpoints, atomically."""
        with wrap_os_errors(self.root, f"{name} could not be written", "free some room or mend the disk"):
            write_atomic(self.root / name, text.encode())

    def mark_best(self, step: int) -> None:
        """Point `best` at the checkpoint of `step`."""
        with wrap_os_errors(
            self.root, f"step {step} could not be marked as the best", "free some room or mend the disk"
        ):
            for folder in self._newest_first():
                if order(folder)[0] == step:
                    return self._update_links(folder, "best")
        steps = ", ".join(map(str, self.steps())) or "none"
        raise CheckpointError(f"{self.root}: there is no checkpoint of step {step}, only of: {steps}")

    def adopt(self, run: Path) -> None:
        """Link `last`, `best` and the metrics to those of a run inside this directory."""
        with wrap_os_errors(self.root, f"could not be linked to {run.name}", "free some room or mend the disk"):
            for name in ("best", "last", "metrics.jsonl"):
                self._update_links(run / name, name)

    def last(self) -> Path | None:
        """Return the checkpoint to resume from: the target of the link `last`, else the newest."""
        with wrap_read_errors(self.root):
            return self._existing_target("last") or next(iter(self._newest_first()), None)

    def best(self) -> Path | None:
        """Return the checkpoint that the link `best` points to."""
        with wrap_read_errors(self.root):
            return self._existing_target("best")

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints in order of step; of a step that was saved again, the later one."""
        with wrap_read_errors(self.root):
            return self._oldest_first()

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in order."""
        return [order(folder)[0] for folder in self.checkpoints()]

    def check_space(self, needed: int) -> None:
        """Raise an error if the file system has fewer than `needed` bytes free."""
        with wrap_os_errors(self.root, "cannot be measured", "choose another --out"):
            disk = shutil.disk_usage(self.root)
        if disk.total and disk.free < needed:  # some network file systems report a total of 0
            raise CheckpointError(
                f"{self.root}: a checkpoint needs {needed / 1e6:,.1f} MB, but the file system has "
                f"{disk.free / 1e6:,.1f} MB free; free some room or choose another --out"
            )

    def _existing_target(self, link: str) -> Path | None:
        target = self._target(link)
        return target if target and target.is_dir() else None

    def _target(self, link: str) -> Path | None:
        """Return a link's target, which may not exist; a run copied without links has folders in their place."""
        try:
            return self.root / (self.root / link).readlink()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self.root / link

    def _oldest_first(self) -> list[Path]:
        return list({order(folder)[0]: folder for folder in reversed(self._newest_first())}.values())

    def _newest_first(self) -> list[Path]:
        """Return the checkpoints, newest first; of a step that was saved again, the later one first."""
        try:
            folders = [path for path in self._checkpoints.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(folders, key=order, reverse=True)


def average_name(step: int) -> str:
    """Return the folder name of an average, which has no training state and cannot be resumed from."""
    return f"average-{step:08d}"


def verify_or_offer(store: Store) -> Path | None:
    """Return the checkpoint to resume from, verified; if it is damaged, the error names the newest intact one."""
    folder = store.last()
    if folder is None:
        return None
    try:
        check_files(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_recovery_advice(store, folder)}") from None
    return folder


def _recovery_advice(store: Store, damaged: Path) -> str:
    unusable = [damaged]
    for folder in store._newest_first():
        if folder.resolve() == damaged.resolve():
            continue
        try:
            step = check_files(folder).step
        except CheckpointError:
            unusable.append(folder)
            continue
        names = " and ".join(map(str, unusable))
        return f"delete {names} and run again with --resume: it continues from step {step}, which is whole"
    return "no other checkpoint of this run is whole: train afresh, with another --out"


def resolve_checkpoint(path: Path) -> Path:
    """Return the checkpoint of a path: a checkpoint's own folder, or the best, else the last, of a run's directory."""
    with wrap_read_errors(path):
        if (path / CHECKPOINT_MANIFEST).is_file():
            return path.resolve()  # a link such as `last` may change while the checkpoint is read
        store = Store(path)
        checkpoint = store.best() or store.last()
        if checkpoint:
            return checkpoint
        if (path / "run.yaml").is_file() or (path / "checkpoints").is_dir():
            raise CheckpointError(f"{path}: a run that has no checkpoint yet; wait for its first, or train it")
        kind = "is a folder" if path.is_dir() else "is a file" if path.exists() else "does not exist"
    raise CheckpointError(
        f"{path}: {kind}; looked for a checkpoint (a folder with {CHECKPOINT_MANIFEST}), a run's directory "
        "(with best, last or checkpoints/step-*) or a Hugging Face directory (with config.json); give one of these"
    )
