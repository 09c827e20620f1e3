"""The directory of a run: whole checkpoints, two links and a lock, which survive a full disk and a kill at any instant.

    run.yaml, metrics.jsonl       written by others
    lock                          held by `flock` while a run trains; says its process
    checkpoints/step-00000400/    any files, and manifest.json: the size and SHA-256 of each
    checkpoints/average-00000400/ the mean of the last checkpoints at step 400, where that is the best
    last, best                    relative links to checkpoints

A checkpoint is filled under a temporary name, flushed, sealed by its manifest and only then renamed; a link is swapped
by `os.replace`; what is no longer needed takes a temporary name again before it is deleted. So a folder named `step-*`
is whole and a link leads to a whole one, whatever happens. A link can be swapped in one instant but a folder cannot, so
a step that is saved again goes beside the old one, as `step-00000400.2`, and the old one goes once no link needs it.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.checkpoint.atomic_io import TEMPORARY, explained, readable, remove, sync_folder, temporary_in, write_new
from weft.checkpoint.manifest import MANIFEST, NAME, build, inspect, order, save_folder, verify
from weft.errors import CheckpointError

__all__ = ["MANIFEST", "Store", "resolve_checkpoint", "save_folder", "verify", "verify_or_offer"]

# Descriptors of the locks that this process holds. A forked worker drops its copies: it would keep the lock alive after
# the death of the run that forked it.
_held: set[int] = set()


def _drop_locks() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_drop_locks)


class Store:
    """The directory of one run; `keep` says how many of the newest checkpoints stay, beside `last` and `best`.

    With `every`, those count whose step is a multiple of it: what a signal made in between does not push one out.
    """

    def __init__(self, root: Path, keep: int = 2, every: int | None = None) -> None:
        self.root = Path(root)
        self.keep = keep
        self.every = every or 1
        self._checkpoints = self.root / "checkpoints"
        self._lock: int | None = None

    def prepare(self) -> None:
        """Make the directory, see that it can be written and, under the lock, remove what a killed run left behind."""
        with explained(self.root, "cannot hold a run", "choose another --out"):
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            self._sweep()
            for place in (self.root, self._checkpoints):
                probe = temporary_in(place)
                write_new(probe, b"")
                probe.unlink()
        for link in (self.root / "last", self.root / "best"):
            if link.exists() and not link.is_symlink():
                raise CheckpointError(
                    f"{link}: must be a link into checkpoints/, but is not (was the run copied without its links?); "
                    "delete it and run again: the checkpoints themselves are kept"
                )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory for this process; the kernel lets go of it when the process dies, however it dies."""
        with explained(self.root, "cannot be locked", "choose another --out"):
            self.root.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._claim(lock)
            except BaseException:
                os.close(lock)
                raise
        _held.add(lock)
        self._lock = lock
        try:
            yield
        finally:
            self._lock = None
            if lock in _held:  # else this is a forked child: the lock is its parent's
                _held.remove(lock)
                os.close(lock)

    def _claim(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
            who = f"another run (process {holder})" if holder.isdigit() else "another run"
            message = f"{who} is training in {self.root}; wait for it or choose another --out"
            raise CheckpointError(message) from None
        os.ftruncate(lock, os.pwrite(lock, f"{os.getpid()}\n".encode(), 0))

    def save(self, step: int, write: Callable[[Path], None], best: bool = False) -> Path:
        """Keep what `write(folder)` writes as the checkpoint of `step`, point the links to it, and prune older ones."""
        previous = self.last()
        whole = f"the previous checkpoint {previous.name} is whole" if previous else "there is no earlier checkpoint"
        remedy = f"{whole}; free some room or mend the disk, then run again with --resume"
        with explained(self.root, f"step {step} could not be saved", remedy):
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            self._sweep()
            folder = build(self._free_name(step), step, write)
            # `best` first: a crash in between must not leave a `last` whose state knows a best that no link has.
            self._point(folder, *(["best"] if best else []), "last")
        with explained(self.root, f"{folder.name} is saved, but older ones could not be pruned", "mend the disk"):
            self._prune()
        return folder

    def _free_name(self, step: int) -> Path:
        used = [again for folder in self._found() for number, again in [order(folder)] if number == step]
        return self._checkpoints / (f"step-{step:08d}.{used[0] + 1}" if used else f"step-{step:08d}")

    def _point(self, folder: Path, *links: str) -> None:
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
        """Keep what `write(folder)` writes as the average at `step`, and point `best` to it; `last` stays."""
        remedy = "free some room or mend the disk, then run again with --resume"
        with explained(self.root, f"the average at step {step} could not be saved", remedy):
            self._sweep()
            self._prune()  # also of an average that was not yet the best when the run was killed
            folder = build(self._checkpoints / average_name(step), step, write)
            self._point(folder, "best")
            self._prune()
        return folder

    def _prune(self) -> None:
        regular = [folder for folder in self._by_step() if order(folder)[0] % self.every == 0]
        links = [target for link in ("last", "best") if (target := self._target(link))]
        kept = {folder.resolve() for folder in [*regular[-self.keep :], *links]}
        found = [*self._found(), *self._checkpoints.glob("average-*")]
        doomed = {folder: temporary_in(self._checkpoints) for folder in found if folder.resolve() not in kept}
        for folder, temporary in doomed.items():
            folder.rename(temporary)
        if doomed:  # the new names must be on the disk first, or a power cut could bring back half a folder
            sync_folder(self._checkpoints)
        for temporary in doomed.values():
            remove(temporary)

    def _sweep(self) -> None:
        if self._lock not in _held:  # what looks left over may be what another process is writing
            return
        for place in (self.root, self._checkpoints):
            for path in place.glob(f"{TEMPORARY}*"):
                remove(path)

    def write_text(self, name: str, text: str) -> None:
        """Put a text file beside the checkpoints, whole or not at all."""
        with explained(self.root, f"{name} could not be written", "free some room or mend the disk"):
            temporary = temporary_in(self.root)
            write_new(temporary, text.encode())
            os.replace(temporary, self.root / name)

    def mark_best(self, step: int) -> None:
        """Point `best` at the checkpoint of `step`."""
        with explained(self.root, f"step {step} could not be marked as the best", "free some room or mend the disk"):
            for folder in self._found():
                if order(folder)[0] == step:
                    return self._point(folder, "best")
        there = ", ".join(map(str, self.steps())) or "none"
        raise CheckpointError(f"{self.root}: there is no checkpoint of step {step}, only of: {there}")

    def adopt(self, run: Path) -> None:
        """Let `last`, `best` and the metrics be those of a run inside this directory."""
        with explained(self.root, f"could not be linked to {run.name}", "free some room or mend the disk"):
            for name in ("best", "last", "metrics.jsonl"):
                self._point(run / name, name)

    def last(self) -> Path | None:
        """Return the checkpoint to resume from: that of the link `last`, else the newest."""
        with readable(self.root):
            return self._linked("last") or next(iter(self._found()), None)

    def best(self) -> Path | None:
        """Return the checkpoint of the link `best`."""
        with readable(self.root):
            return self._linked("best")

    def checkpoints(self) -> list[Path]:
        """List the checkpoints by step; of a step that was saved again, the later one."""
        with readable(self.root):
            return self._by_step()

    def steps(self) -> list[int]:
        """List the steps that have a checkpoint, in order."""
        return [order(folder)[0] for folder in self.checkpoints()]

    def check_space(self, needed: int) -> None:
        """Refuse when the file system has less room than `needed` bytes."""
        with explained(self.root, "cannot be measured", "choose another --out"):
            disk = shutil.disk_usage(self.root)
        if disk.total and disk.free < needed:  # some network file systems do not tell: their total is 0
            raise CheckpointError(
                f"{self.root}: a checkpoint needs {needed / 1e6:,.1f} MB, but the file system has "
                f"{disk.free / 1e6:,.1f} MB free; free some room or choose another --out"
            )

    def _linked(self, link: str) -> Path | None:
        target = self._target(link)
        return target if target and target.is_dir() else None

    def _target(self, link: str) -> Path | None:
        """Return what a link names, there or not; a run that was copied without links has folders in their place."""
        try:
            return self.root / (self.root / link).readlink()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self.root / link

    def _by_step(self) -> list[Path]:
        return list({order(folder)[0]: folder for folder in reversed(self._found())}.values())

    def _found(self) -> list[Path]:
        """List the checkpoints, the newest first; of a step that was saved again, the later one first."""
        try:
            folders = [path for path in self._checkpoints.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(folders, key=order, reverse=True)


def average_name(step: int) -> str:
    """Name the folder of an average: no checkpoint to go on from, for it has no state."""
    return f"average-{step:08d}"


def verify_or_offer(store: Store) -> Path | None:
    """Return the checkpoint to resume from, verified; when it is damaged, name the newest one that is whole."""
    folder = store.last()
    if folder is None:
        return None
    try:
        inspect(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_offer(store, folder)}") from None
    return folder


def _offer(store: Store, damaged: Path) -> str:
    doomed = [damaged]
    for folder in store._found():
        if folder.resolve() == damaged.resolve():
            continue
        try:
            step = inspect(folder).step
        except CheckpointError:
            doomed.append(folder)
            continue
        names = " and ".join(map(str, doomed))
        return f"delete {names} and run again with --resume: it continues from step {step}, which is whole"
    return "no other checkpoint of this run is whole: train afresh, with another --out"


def resolve_checkpoint(path: Path) -> Path:
    """Find the checkpoint that a user means: a checkpoint's folder, or a run's directory (its best, else its last)."""
    with readable(path):
        if (path / MANIFEST).is_file():
            return path.resolve()  # a link such as `last` may move on while the checkpoint is read
        store = Store(path)
        found = store.best() or store.last()
        if found:
            return found
        if (path / "run.yaml").is_file() or (path / "checkpoints").is_dir():
            raise CheckpointError(f"{path}: a run that has no checkpoint yet; wait for its first, or train it")
        kind = "is a folder" if path.is_dir() else "is a file" if path.exists() else "does not exist"
    raise CheckpointError(
        f"{path}: {kind}; looked for a checkpoint (a folder with {MANIFEST}), a run's directory (with best, last or "
        "checkpoints/step-*) or a Hugging Face directory (with config.json); give one of these"
    )
