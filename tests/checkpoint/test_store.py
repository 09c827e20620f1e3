"""A run's directory stays whole: every file-system operation is failed, and the process killed at it, in turn."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from weft.checkpoint import manifest as manifest_module
from weft.checkpoint import store as store_module
from weft.checkpoint.store import (
    CHECKPOINT_MANIFEST,
    Store,
    resolve_checkpoint,
    save_folder,
    verify_checkpoint,
    verify_or_offer,
)
from weft.errors import CheckpointError

# Later Pythons warn of a fork in a process with threads; the children here touch files and exit, nothing else.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

REAL_FSYNC = os.fsync
FILES = {"model.safetensors": 3000, "state/optimizer.safetensors": 5000}


def payload(tag: str) -> dict[str, bytes]:
    return {name: (tag.encode() * size)[:size] for name, size in FILES.items()}


def writer(tag: str, after_half: Callable[[], None] = lambda: None) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name, data in payload(tag).items():
            (folder / name).parent.mkdir(exist_ok=True)
            with (folder / name).open("wb") as file:
                file.write(data[: len(data) // 2])
                file.flush()
                after_half()
                file.write(data[len(data) // 2 :])

    return write


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def temporaries(root: Path) -> list[Path]:
    return [*root.glob(".tmp-*"), *root.glob("checkpoints/.tmp-*")]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "run", keep=2)
    store.prepare()
    return store


def saved(store: Store, *steps: int, best: int | None = None) -> Store:
    for step in steps:
        store.save(step, writer(f"{step} "), best=step == best)
    return store


# Faults: the n-th file-system operation fails, or the process is killed at it.

CHANGES = ("open", "write", "mkdir", "rename", "replace", "symlink", "unlink", "rmdir")  # what a kill can come between
WRITING = (*CHANGES, "fsync", "close")  # what a disk that is full or read-only refuses from then on
OPERATIONS = (*WRITING, "read", "readlink", "stat", "lstat", "fstat", "scandir", "listdir")


class Faults:
    """Counts the operations and strikes at the n-th, or, when `lasting`, at it and all that follow."""

    def __init__(
        self, at: int, strike: Callable[[], None], operations: tuple[str, ...] = OPERATIONS, lasting: bool = False
    ) -> None:
        self.at, self.strike, self.flops, self.lasting, self.count = at, strike, operations, lasting, 0
        self.trace: list[tuple[str, str]] = []
        self._paths: dict[int, str] = {}

    def tick(self) -> None:
        self.count += 1
        if self.count == self.at or (self.lasting and self.count > self.at):
            self.strike()

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **options: Any) -> Any:
            if name == "close":  # the kernel closes even when it reports an error
                real(*args)
                return self.tick()
            self.tick()
            result = real(*args, **options)
            if name == "open":
                self._paths[result] = str(args[0])
            path = self._paths.get(args[0]) or args[1 if name in ("rename", "replace") else 0]
            self.trace.append((name, str(path)))
            return result

        return operation

    @contextmanager
    def __call__(self) -> Iterator["Faults"]:
        with pytest.MonkeyPatch.context() as patch:
            for name in self.flops:
                patch.setattr(os, name, self._wrap(name, getattr(os, name)))
            yield self


def refuse(number: int) -> Callable[[], None]:
    def strike() -> None:
        raise OSError(number, os.strerror(number))

    return strike


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Naive(Store):
    """What the checks must catch: it writes in place, and swaps a link by removing it first."""

    def save(self, step: int, write: Callable[[Path], None], best: bool = False) -> Path:
        folder = self.root / "checkpoints" / f"step-{step:08d}"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write(folder)
            manifest_module.seal(folder, step)
            (self.root / "last").unlink(missing_ok=True)
            (self.root / "last").symlink_to(folder.relative_to(self.root))
        except OSError as error:
            raise CheckpointError(f"step {step} could not be saved; the previous checkpoint is whole") from error
        return folder


SCENARIOS = {  # what is there, then what is saved: step, best
    "the first": ((), 100, True),
    "the next and best": ((100, 200, 300), 400, True),
    "the same step again": ((100, 300), 300, True),
}


@pytest.fixture(scope="module", params=SCENARIOS)
def scenario(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, bool]:
    before, step, best = SCENARIOS[request.param]
    template = tmp_path_factory.mktemp("template") / "run"
    Store(template).prepare()
    saved(Store(template), *before, best=100)
    return template, step, best


def problems(scenario: tuple[Path, int, bool], root: Path, returned: Path | None) -> list[str]:
    """Return the problems after a save into a copy of the scenario's run that failed, was killed, or `returned`."""
    template, step, best = scenario
    wrong = []
    links = [root / link for link in ("last", "best") if (template / link).exists()]
    for folder in [*root.glob("checkpoints/step-*"), *links]:
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            wrong.append(str(error))
    old = Store(template).last()
    if old and old.name != f"step-{step:08d}" and not (root / "checkpoints" / old.name).exists():
        wrong.append(f"{old.name} is lost")
    if wrong:
        return wrong
    allowed = [payload("new ")] + ([contents(old)] if old and returned is None else [])
    if (old or returned) and contents(root / "last") not in allowed:
        wrong.append("last is neither the old nor the new checkpoint")
    new = {link for link in ("last", "best") if (root / link).exists() and contents(root / link) == payload("new ")}
    if best and new == {"last"}:
        wrong.append("last is the new best, but best is not")
    return wrong


def recover(kind: type[Store], root: Path) -> None:
    store = kind(root)
    with store.lock():
        store.prepare()
        assert temporaries(root) == []
        folder = store.save(900, writer("later "))
    assert store.last() == folder
    assert contents(folder) == payload("later ")
    assert store.steps()[-1] == 900
    shutil.rmtree(root)


EXPLAINED = (
    r"step \d+ could not be saved.*(the previous checkpoint .*is whole|there is no earlier checkpoint)"
    r"|step-\d+(\.2)? is saved, but older ones could not be pruned|cannot be read"
)


def fail_each_operation(
    kind: type[Store], scenario: tuple[Path, int, bool], place: Path, lasting: bool
) -> tuple[int, list[str]]:
    """Refuse each operation of a save in turn; return how many there are and all that went wrong."""
    template, step, best = scenario
    wrong: list[str] = []
    for n in count(1):
        root = shutil.copytree(template, place / str(n), symlinks=True)
        refusal = refuse([errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT][n % 4])
        faults = Faults(n, refusal, WRITING if lasting else OPERATIONS, lasting)
        returned = None
        with (store := kind(root)).lock():
            try:
                with faults():
                    returned = store.save(step, writer("new ", faults.tick), best)
            except CheckpointError as error:
                wrong += [] if re.search(EXPLAINED, str(error)) else [f"{n}: {error}"]
        wrong += [f"{n}: {line}" for line in problems(scenario, root, returned)]
        if faults.count < n:
            return n - 1, wrong
        recover(kind, root)
    raise AssertionError


@pytest.mark.parametrize("lasting", [False, True], ids=["one refusal", "refusals from then on"])
def test_a_save_survives_the_refusal_of_each_operation(
    scenario: tuple[Path, int, bool], tmp_path: Path, lasting: bool
) -> None:
    operations, wrong = fail_each_operation(Store, scenario, tmp_path, lasting)
    assert operations > 15
    assert wrong == []


def test_the_checks_catch_a_saver_that_writes_in_place(tmp_path: Path) -> None:
    template = tmp_path / "template"
    saved(Store(template), 100, 300, best=100)
    _, wrong = fail_each_operation(Naive, (template, 300, False), tmp_path, lasting=False)
    assert any(CHECKPOINT_MANIFEST in line for line in wrong)
    _, wrong = fail_each_operation(Naive, (template, 400, False), tmp_path / "next", lasting=False)
    assert any("last/" in line for line in wrong)


def in_child(function: Callable[[], object]) -> int:
    """Start a copy of this process that calls `function` and exits; return its process."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at_each_operation(kind: type[Store], scenario: tuple[Path, int, bool], place: Path) -> tuple[int, list[str]]:
    template, step, best = scenario
    wrong: list[str] = []
    for n in count(1):
        root = shutil.copytree(template, place / str(n), symlinks=True)
        faults = Faults(n, kill_self, CHANGES)

        def train(root: Path = root, faults: Faults = faults) -> None:
            with (store := kind(root)).lock(), faults():
                store.save(step, writer("new ", faults.tick), best)

        code = ended(in_child(train))
        wrong += [f"{n}: {line}" for line in problems(scenario, root, root if code == 0 else None)]
        recover(kind, root)
        if code != -signal.SIGKILL:
            return n - 1, [*wrong, *([f"exit {code}"] if code else [])]
    raise AssertionError


def test_a_save_survives_a_kill_at_each_operation(scenario: tuple[Path, int, bool], tmp_path: Path) -> None:
    operations, wrong = kill_at_each_operation(Store, scenario, tmp_path)
    assert operations > 15
    assert wrong == []


def test_the_checks_catch_a_saver_that_a_kill_breaks(tmp_path: Path) -> None:
    template = tmp_path / "template"
    saved(Store(template), 100, 300, best=100)
    _, wrong = kill_at_each_operation(Naive, (template, 400, False), tmp_path)
    assert any("step-00000400" in line for line in wrong)
    assert any("last/" in line for line in wrong)


def unflushed(store: Store) -> list[str]:
    """Save step 400; return what a power cut could lose, as it was not flushed before a later step relied on it."""
    with Faults(0, kill_self)() as faults:
        store.save(400, writer("new "))
    trace = faults.trace
    temporary = next(path for name, path in trace if name == "mkdir")
    renamed = trace.index(("rename", str(store.root / "checkpoints/step-00000400")))
    linked = trace.index(("replace", str(store.root / "last")))
    pruned = [i for i, (name, path) in enumerate(trace) if name == "rename" and i > linked]
    deleted = next(i for i, (name, _) in enumerate(trace) if name in ("unlink", "rmdir"))
    needs = [(str(Path(temporary, name)), 0, renamed) for name in [*FILES, CHECKPOINT_MANIFEST, "state", ""]]
    checkpoints = str(store.root / "checkpoints")
    needs += [(checkpoints, renamed, linked), (str(store.root), linked, pruned[0]), (checkpoints, pruned[-1], deleted)]
    return [path for path, start, end in needs if ("fsync", path) not in trace[start:end]]


def test_everything_is_flushed_before_it_is_relied_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", REAL_FSYNC)
    assert unflushed(saved(store, 100, 200, 300)) == []


def test_a_saver_that_does_not_flush_folders_is_caught(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(store, 100, 200, 300)
    for module in (manifest_module, store_module):
        monkeypatch.setattr(module, "sync_folder", lambda folder: None)
    assert str(store.root) in unflushed(store)


def test_a_file_system_that_cannot_flush_folders_is_served(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(handle: int) -> None:
        if os.path.isdir(f"/dev/fd/{handle}"):  # noqa: PTH112
            raise OSError(errno.EINVAL, "Invalid argument")
        REAL_FSYNC(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    verify_checkpoint(store.save(100, writer("new ")))


# Real errors of the kernel.


def save_tensors(folder: Path) -> None:
    save_file({"weight": np.zeros(400_000, np.float32)}, folder / "model.safetensors")


def save_bytes(folder: Path) -> None:
    (folder / "model.bin").write_bytes(bytes(1_600_000))


@pytest.mark.parametrize("write", [save_bytes, save_tensors])
def test_a_file_that_may_not_grow(store: Store, write: Callable[[Path], None]) -> None:
    saved(store, 100)

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match=r"File too large.*previous checkpoint step-00000100 is whole"):
            store.save(200, write)

    assert ended(in_child(child)) == 0
    assert temporaries(store.root) == []
    assert verify_or_offer(store) == store.root / "checkpoints/step-00000100"


ON_A_SMALL_DISK = """
import sys
from pathlib import Path
from weft.checkpoint.store import Store, verify_checkpoint
from weft.errors import CheckpointError
store = Store(Path(sys.argv[1]) / "run")
def write(size):
    return lambda folder: [(folder / name).write_bytes(bytes(size)) for name in "abcd"]
with store.lock():
    store.prepare()
    store.save(100, write(1000))
    for attempt in range(2):
        try:
            store.save(200, write(400_000))
        except CheckpointError as error:
            print(error)
    verify_checkpoint(store.last())
    store.save(200, write(1000))
    assert store.steps() == [100, 200], store.steps()
"""


def test_a_full_disk(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    try:
        subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small disk cannot be mounted here: {error}")
    python = [sys.executable, "-c", ON_A_SMALL_DISK, str(tmp_path)]
    command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", *python]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("No space left on device; the previous checkpoint step-00000100 is whole") == 2


def test_a_read_only_directory_is_refused(store: Store) -> None:
    store.root.chmod(0o500)
    try:
        if os.access(store.root, os.W_OK):
            pytest.skip("this user, such as root, may write everywhere")
        with pytest.raises(CheckpointError, match=r"run: cannot hold a run: Permission denied; choose another --out"):
            store.prepare()
        with pytest.raises(CheckpointError, match=r"run: cannot be locked: Permission denied"), store.lock():
            pass
    finally:
        store.root.chmod(0o700)


def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file/run"):
        for use in (Store(root).prepare, Store(root).lock().__enter__):
            with pytest.raises(CheckpointError, match=r"file.*choose another --out"):
                use()
        with pytest.raises(CheckpointError, match=r"step 1 could not be saved: .*there is no earlier checkpoint"):
            Store(root).save(1, writer(""))


def test_a_read_only_disk_is_refused_by_prepare(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", lambda *args: refuse(errno.EROFS)())
    with pytest.raises(CheckpointError, match=r"run: cannot hold a run: Read-only file system; choose another --out"):
        store.prepare()


# The lock.


@contextmanager
def training(store: Store, before: Callable[[], object] = lambda: None) -> Iterator[int]:
    """Run a child that holds the lock until it is killed; yield its process."""
    ready, tell = os.pipe()

    def hold() -> None:
        with store.lock():
            before()
            os.write(tell, b"!")
            signal.pause()

    child = in_child(hold)
    os.close(tell)
    try:
        assert os.read(ready, 1) == b"!"
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        ended(child)
        os.close(ready)


def test_a_second_run_is_refused_until_the_first_is_dead(store: Store) -> None:
    with training(store) as child:
        with pytest.raises(CheckpointError) as refusal, store.lock():
            pass
        message = f"another run (process {child}) is training in {store.root}; wait for it or choose another --out"
        assert str(refusal.value) == message
    with store.lock():
        assert (store.root / "lock").read_text() == f"{os.getpid()}\n"
    with store.lock():
        pass


def test_a_forked_worker_does_not_keep_the_lock_of_a_dead_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused_after_death(before: Callable[[], object]) -> bool:
        read_end, write_end = os.pipe()

        def fork_worker() -> None:
            before()
            os.write(write_end, f"{in_child(signal.pause)}\n".encode())

        with training(store, fork_worker):
            worker = int(os.read(read_end, 32))
        try:
            with store.lock():
                return False
        except CheckpointError:
            return True
        finally:
            os.kill(worker, signal.SIGKILL)
            os.close(read_end)
            os.close(write_end)

    assert not refused_after_death(lambda: None)
    assert refused_after_death(store_module._held_locks.clear)  # as if the worker did not drop its copy


def test_leaving_the_lock_in_a_forked_child_leaves_it_with_the_parent(store: Store) -> None:
    def child() -> None:
        holding.__exit__(None, None, None)
        with pytest.raises(CheckpointError, match=f"process {os.getppid()}"), Store(store.root).lock():
            pass

    holding = store.lock()
    with holding:
        assert ended(in_child(child)) == 0
        with pytest.raises(CheckpointError), Store(store.root).lock():
            pass


def test_left_overs_are_removed_under_the_lock_alone(store: Store) -> None:
    saved(store, 100)
    (store.root / "checkpoints/.tmp-1/state").mkdir(parents=True)
    (store.root / ".tmp-2").symlink_to("checkpoints/step-00000100")
    store.prepare()
    saved(store, 200)
    assert len(temporaries(store.root)) == 2
    with store.lock():
        store.prepare()
    assert temporaries(store.root) == []
    assert store.steps() == [100, 200]


# Damaged checkpoints.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Store(tmp_path_factory.mktemp("whole")).save(400, writer("whole "))


def test_a_whole_checkpoint_is_verified(whole: Path) -> None:
    manifest = verify_checkpoint(whole)
    assert manifest == json.loads((whole / CHECKPOINT_MANIFEST).read_text())
    assert {name: file["bytes"] for name, file in manifest["files"].items()} == FILES
    assert (manifest["format"], manifest["step"]) == (1, 400)
    elsewhere = shutil.copytree(whole, whole.parent.parent / "copied")
    assert verify_checkpoint(elsewhere) == manifest


@settings(max_examples=75, deadline=None, derandomize=True)
@given(st.sampled_from([*FILES, CHECKPOINT_MANIFEST]), st.integers(0, 2**32), st.integers(0, 7))
def test_each_flipped_bit_is_refused(whole: Path, name: str, where: int, bit: int) -> None:
    path = whole / name
    good = path.read_bytes()
    bad = bytearray(good)
    bad[where % len(bad)] ^= 1 << bit
    path.write_bytes(bad)
    try:
        with pytest.raises(
            CheckpointError, match=str(whole) if name == CHECKPOINT_MANIFEST else f"{path}: its contents"
        ):
            verify_checkpoint(whole)
    finally:
        path.write_bytes(good)
    verify_checkpoint(whole)


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def edit_manifest(folder: Path, **change: object) -> None:
    manifest = json.loads((folder / CHECKPOINT_MANIFEST).read_text())
    (folder / CHECKPOINT_MANIFEST).write_text(json.dumps({**manifest, **change}))


STATE = "state/optimizer.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "truncated": (lambda f: os.truncate(f / STATE, 4000), STATE, "must have 5000 bytes, but has 4000"),
    "emptied": (lambda f: os.truncate(f / STATE, 0), STATE, "must have 5000 bytes, but has 0"),
    "grown": (lambda f: (f / STATE).write_bytes(bytes(5001)), STATE, "must have 5000 bytes, but has 5001"),
    "zeroed": (lambda f: (f / STATE).write_bytes(bytes(5000)), STATE, "its contents have changed"),
    "missing": (lambda f: (f / STATE).unlink(), STATE, "missing"),
    "missing folder": (lambda f: shutil.rmtree(f / "state"), STATE, "missing"),
    "extra": (lambda f: (f / "state/more").write_text(""), "state/more", "not listed in manifest.json"),
    "extra manifest below": (
        lambda f: (f / "state" / CHECKPOINT_MANIFEST).write_text(""),
        f"state/{CHECKPOINT_MANIFEST}",
        "not listed",
    ),
    "a folder instead": (lambda f: replace(f / STATE, Path.mkdir), STATE, "missing"),
    "a pipe instead": (lambda f: replace(f / STATE, os.mkfifo), STATE, "not a plain file"),
    "a link to nothing": (lambda f: replace(f / STATE, lambda p: p.symlink_to("no")), STATE, "cannot be read: No such"),
    "a link to itself": (lambda f: replace(f / STATE, lambda p: p.symlink_to(p)), STATE, "cannot be read: Too many"),
    "no manifest": (lambda f: (f / CHECKPOINT_MANIFEST).unlink(), CHECKPOINT_MANIFEST, "missing"),
    "manifest a folder": (
        lambda f: replace(f / CHECKPOINT_MANIFEST, Path.mkdir),
        CHECKPOINT_MANIFEST,
        "cannot be read: Is a directory",
    ),
    "manifest empty": (lambda f: os.truncate(f / CHECKPOINT_MANIFEST, 0), CHECKPOINT_MANIFEST, "damaged: .*EOF"),
    "manifest cut": (lambda f: os.truncate(f / CHECKPOINT_MANIFEST, 100), CHECKPOINT_MANIFEST, "damaged: .*EOF"),
    "manifest not JSON": (
        lambda f: (f / CHECKPOINT_MANIFEST).write_bytes(b"\xff\xfe{"),
        CHECKPOINT_MANIFEST,
        "damaged: ",
    ),
    "manifest a list": (lambda f: (f / CHECKPOINT_MANIFEST).write_text("[]"), CHECKPOINT_MANIFEST, "damaged: "),
    "manifest too deep": (
        lambda f: (f / CHECKPOINT_MANIFEST).write_text("[" * 10**5),
        CHECKPOINT_MANIFEST,
        "damaged: ",
    ),
    "a later format": (lambda f: edit_manifest(f, format=2), CHECKPOINT_MANIFEST, "damaged: format: Input should be 1"),
    "another step": (lambda f: edit_manifest(f, step=401), CHECKPOINT_MANIFEST, "damaged: it says step 401"),
    "a step in words": (lambda f: edit_manifest(f, step="400"), CHECKPOINT_MANIFEST, "damaged: step: "),
    "a file of elsewhere": (
        lambda f: edit_manifest(f, files={"../x": {"sha256": "0" * 64, "bytes": 1}}),
        "../x",
        "missing",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_name_and_the_previous_checkpoint_offered(store: Store, damage: str) -> None:
    spoil, name, reason = DAMAGE[damage]
    folder = saved(store, 100, 400).last()
    assert folder is not None
    assert verify_or_offer(store) == folder
    spoil(folder)
    with pytest.raises(
        CheckpointError, match=f"^{folder / name}: {reason}.*; copy the checkpoint again or use another"
    ):
        verify_checkpoint(folder)
    remedy = f"delete {folder} and run again with --resume: it continues from step 100, which is whole"
    with pytest.raises(CheckpointError, match=f"^{folder / name}: {reason}.*; {remedy}$"):
        verify_or_offer(store)
    shutil.rmtree(folder)
    assert verify_or_offer(store) == store.root / "checkpoints/step-00000100"


def test_all_that_must_be_deleted_is_named(store: Store) -> None:
    store.keep = 3
    saved(store, 100, 200, 300)
    for step in (200, 300):
        (store.root / f"checkpoints/step-00000{step}/model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"delete .*300 and .*200 and run .* from step 100, which is whole"):
        verify_or_offer(store)
    (store.root / "checkpoints/step-00000100/model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no other checkpoint of this run is whole: train afresh"):
        verify_or_offer(store)


def test_nothing_to_verify_in_a_new_run(store: Store, tmp_path: Path) -> None:
    assert verify_or_offer(store) is None
    assert verify_or_offer(Store(tmp_path / "no")) is None
    with pytest.raises(CheckpointError, match=r"no/manifest\.json: missing"):
        verify_checkpoint(tmp_path / "no")


# Links, steps and pruning.


def test_links_are_relative_and_a_moved_run_works(store: Store, tmp_path: Path) -> None:
    saved(store, 100, 200, best=100)
    assert (store.root / "last").readlink() == Path("checkpoints/step-00000200")
    moved = Store(store.root.rename(tmp_path / "moved"))
    assert moved.last() == moved.root / "checkpoints/step-00000200"
    assert moved.best() == moved.root / "checkpoints/step-00000100"
    assert contents(moved.root / "last") == payload("200 ")


def test_the_newest_and_the_best_are_kept(store: Store) -> None:
    saved(store, 100, 200, 300, 400, 500, best=200)
    assert store.steps() == [200, 400, 500]
    store.mark_best(400)
    assert store.best() == store.root / "checkpoints/step-00000400"
    saved(store, 600)
    assert store.steps() == [400, 500, 600]
    saved(store, 700, 800)
    assert store.steps() == [400, 700, 800]
    assert temporaries(store.root) == []


def test_what_comes_between_pushes_no_regular_one_out(store: Store) -> None:
    store.is_regular = lambda folder: manifest_module.order(folder)[0] % 100 == 0
    saved(store, 0, 100, 150, 200, 250, 260, best=150)
    assert store.steps() == [100, 150, 200, 260], "the last two hundreds, the best and the last"
    saved(store, 300)
    assert store.steps() == [150, 200, 300]


def test_checkpoints_are_listed_by_step_the_later_of_two(store: Store) -> None:
    saved(store, 400, 300)
    assert [folder.name for folder in store.checkpoints()] == ["step-00000300", "step-00000400"]
    saved(store, 300)
    assert [folder.name for folder in store.checkpoints()] == ["step-00000300.2", "step-00000400"]
    assert Store(store.root / "no").checkpoints() == []


# Averages: `best` may point to one, `last` never.


def test_an_average_is_the_best_and_never_what_a_run_goes_on_from(store: Store) -> None:
    saved(store, 100, 200, 300, best=100)
    folder = store.save_average(300, writer("mean "))
    assert (store.best(), store.last()) == (folder, store.root / "checkpoints/step-00000300")
    assert folder == store.root / "checkpoints/average-00000300"
    assert verify_checkpoint(folder)["step"] == 300
    assert resolve_checkpoint(store.root) == folder
    assert store.steps() == [200, 300], "the best before it is not needed any more"
    (store.root / "last").unlink()
    assert verify_or_offer(store) == store.root / "checkpoints/step-00000300"
    saved(store, 400)
    assert store.best() == folder, "it is kept while it is the best"
    saved(store, 500, best=500)
    assert not folder.exists()


class NaiveAverage(Store):
    """What the checks must catch: it writes in place, and swaps the link by removing it first."""

    def save_average(self, step: int, write: Callable[[Path], None]) -> Path:
        folder = self.root / "checkpoints" / f"average-{step:08d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (self.root / "best").unlink(missing_ok=True)
        (self.root / "best").symlink_to(folder.relative_to(self.root))
        write(folder)
        manifest_module.seal(folder, step)
        return folder


def kill_each_average(kind: type[Store], template: Path, place: Path) -> tuple[int, list[str]]:
    """Kill the saving of an average at each operation in turn, and let the next run do it again."""
    wrong: list[str] = []
    for n in count(1):
        root = shutil.copytree(template, place / str(n), symlinks=True)
        faults = Faults(n, kill_self, CHANGES)

        def finish(root: Path = root, faults: Faults = faults) -> None:
            with (store := kind(root)).lock(), faults():
                store.save_average(300, writer("mean ", faults.tick))

        code = ended(in_child(finish))
        wrong += [f"{n}: {line}" for line in average_problems(root)]
        with (store := Store(root)).lock():
            store.prepare()
            store.save_average(301, writer("mean "))
        assert [path.name for path in root.glob("checkpoints/average-*")] == ["average-00000301"]
        assert temporaries(root) == []
        if code != -signal.SIGKILL:
            return n - 1, [*wrong, *([f"exit {code}"] if code else [])]
    raise AssertionError


def average_problems(root: Path) -> list[str]:
    try:
        for link in ("last", "best"):
            verify_checkpoint(root / link)
    except CheckpointError as error:
        return [str(error)]
    known = contents(root / "best") in (payload("100 "), payload("mean "))
    return [] if known and contents(root / "last") == payload("300 ") else ["a link leads elsewhere"]


def test_an_average_survives_a_kill_at_each_operation(store: Store, tmp_path: Path) -> None:
    saved(store, 100, 200, 300, best=100)
    operations, wrong = kill_each_average(Store, store.root, tmp_path)
    assert operations > 10
    assert wrong == []
    _, wrong = kill_each_average(NaiveAverage, store.root, tmp_path / "naive")
    assert any("best/" in line for line in wrong), "the check must catch one that writes in place"


@pytest.mark.parametrize("lasting", [False, True])
def test_an_average_that_cannot_be_saved_leaves_the_best_as_it_was(store: Store, tmp_path: Path, lasting: bool) -> None:
    saved(store, 100, 200, 300, best=100)
    for n in count(1):
        root = shutil.copytree(store.root, tmp_path / str(n), symlinks=True)
        faults = Faults(n, refuse(errno.ENOSPC), WRITING, lasting)
        with (fresh := Store(root)).lock():
            try:
                with faults():
                    fresh.save_average(300, writer("mean ", faults.tick))
            except CheckpointError as error:
                assert "the average at step 300 could not be saved" in str(error)  # noqa: PT017
        assert average_problems(root) == []
        if faults.count < n:
            return


def test_what_a_link_made_by_hand_leads_to_is_kept(store: Store) -> None:
    saved(store, 100)
    (store.root / "best").symlink_to(store.root / "checkpoints/../checkpoints/step-00000100")
    saved(store, 200, 300, 400)
    assert store.steps() == [100, 300, 400]


def test_a_step_from_before_the_newest_is_kept_while_it_is_the_last(store: Store) -> None:
    saved(store, 800, 900, 300)
    assert store.last() == store.root / "checkpoints/step-00000300"
    assert store.steps() == [300, 800, 900]


def test_the_same_step_again_replaces_the_old_one(store: Store) -> None:
    saved(store, 100, 400)
    for attempt in ("second", "third"):
        folder = store.save(400, writer(attempt))
        assert store.last() == folder
        assert verify_checkpoint(folder)["step"] == 400
        assert contents(store.root / "last") == payload(attempt)
        assert store.steps() == [100, 400]
    assert len(list(store.root.glob("checkpoints/step-*"))) == 2


def test_the_same_step_again_leaves_the_best_as_it_was(store: Store) -> None:
    saved(store, 400, best=400)
    store.save(400, writer("worse"))
    assert contents(store.root / "best") == payload("400 ")
    store.mark_best(400)
    assert contents(store.root / "best") == payload("worse")


def test_missing_and_dangling_links_fall_back_to_the_newest(store: Store) -> None:
    assert (store.last(), store.best(), store.steps()) == (None, None, [])
    saved(store, 100, 123456789, best=100)
    (store.root / "checkpoints/step-00000900").write_text("a file is no checkpoint")
    for spoil in (Path.unlink, lambda link: link.symlink_to("checkpoints/gone"), lambda link: replace(link, loop)):
        spoil(store.root / "last")
        assert store.last() == store.root / "checkpoints/step-123456789"
    shutil.rmtree(store.root / "checkpoints/step-00000100")
    assert store.best() is None
    assert resolve_checkpoint(store.root) == store.last()


def loop(link: Path) -> None:
    link.symlink_to(link)


def test_marking_a_step_without_checkpoint_is_refused(store: Store) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of step 7, only of: none"):
        store.mark_best(7)
    saved(store, 100, 200)
    with pytest.raises(CheckpointError, match="no checkpoint of step 7, only of: 100, 200"):
        store.mark_best(7)


def test_a_run_copied_without_links_reads_but_says_how_to_train_on(store: Store, tmp_path: Path) -> None:
    saved(store, 100, best=100)
    copied = Store(shutil.copytree(store.root, tmp_path / "copied", symlinks=False))
    assert copied.last() == copied.root / "last"
    assert verify_or_offer(copied) == copied.root / "last"
    with pytest.raises(CheckpointError, match=r"last: must be a link into checkpoints/.*delete it and run again"):
        copied.prepare()
    for name in ("last", "best"):
        shutil.rmtree(copied.root / name)
    copied.prepare()
    assert copied.last() == copied.root / "checkpoints/step-00000100"


@pytest.mark.parametrize("error", [ValueError("not a number"), KeyboardInterrupt(), MemoryError()])
def test_what_else_goes_wrong_in_writing_comes_through_and_leaves_nothing(store: Store, error: BaseException) -> None:
    saved(store, 100)

    def write(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise error

    with pytest.raises(type(error)):
        store.save(200, write)
    assert temporaries(store.root) == []
    assert store.steps() == [100]


def test_a_checkpoint_of_anything_but_files_is_our_own_mistake(store: Store) -> None:
    with pytest.raises(AssertionError, match="plain files"):
        store.save(1, lambda folder: (folder / "link").symlink_to(folder))
    with pytest.raises(AssertionError, match=CHECKPOINT_MANIFEST):
        store.save(1, lambda folder: (folder / CHECKPOINT_MANIFEST).touch())
    assert temporaries(store.root) == []


def test_too_little_space_is_refused_with_both_numbers(store: Store) -> None:
    store.check_space(1)
    with pytest.raises(CheckpointError, match="no: cannot be measured: No such file"):
        Store(store.root / "no").check_space(1)
    free = shutil.disk_usage(store.root).free
    with pytest.raises(
        CheckpointError, match=r"needs 9,000,000,000,000\.0 MB, .* has [\d,]+\.\d MB free; free some room"
    ):
        store.check_space(9 * 10**18)
    assert free < 9 * 10**18


def test_a_checkpoint_outside_a_run_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "models/mine"
    messages = set()
    for n in count(1):
        faults = Faults(n, refuse(errno.ENOSPC))
        try:
            with faults():
                save_folder(folder, 7, writer("mine ", faults.tick))
        except CheckpointError as error:
            messages.add(str(error).partition(";")[0])
        if folder.exists():
            assert verify_checkpoint(folder)["step"] == 7
            shutil.rmtree(folder)
        assert len(list(tmp_path.glob("models/*"))) <= 1  # a refusal while clearing up leaves what it could not remove
        shutil.rmtree(tmp_path / "models", ignore_errors=True)
        if faults.count < n:
            break
    assert messages == {f"{folder}: cannot be saved: No space left on device"}
    save_folder(folder, 7, writer("mine "))
    with pytest.raises(CheckpointError, match="mine: exists already; choose a new folder"):
        save_folder(folder, 8, writer("other "))
    assert resolve_checkpoint(folder) == folder.resolve()
    assert contents(folder) == payload("mine ")


# resolve_checkpoint.


def test_a_model_is_a_checkpoint_or_a_run(store: Store) -> None:
    saved(store, 100, 200)
    assert resolve_checkpoint(store.root).name == "step-00000200"
    store.mark_best(100)
    assert resolve_checkpoint(store.root).name == "step-00000100"
    for given_path in (store.root / "last", store.root / "checkpoints/step-00000200"):
        assert resolve_checkpoint(given_path) == (store.root / "checkpoints/step-00000200").resolve()


def test_what_is_no_model_is_refused_with_what_was_looked_for(store: Store, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="run: a run that has no checkpoint yet"):
        resolve_checkpoint(store.root)
    (tmp_path / "new").mkdir()
    (tmp_path / "new/run.yaml").touch()
    with pytest.raises(CheckpointError, match="new: a run that has no checkpoint yet"):
        resolve_checkpoint(tmp_path / "new")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for name, kind in {
        "folder": "is a folder",
        "file": "is a file",
        "no": "does not exist",
        "file/x": "does not",
    }.items():
        with pytest.raises(CheckpointError, match=rf"{name}: {kind}.*looked for a checkpoint \(a folder with manifest"):
            resolve_checkpoint(tmp_path / name)
