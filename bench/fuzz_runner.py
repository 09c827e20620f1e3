"""Commands in forked processes with limits: an exception that is no `WeftError`, a hang or much memory is a failure.

The process that forks has imported torch, so that an input costs milliseconds. A forked worker runs one input after the
other; the process that watches it ends a worker that takes too long, and starts another for the inputs that are left.
"""

import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz_doors import Input
from weft.cli import main as cli

GIGABYTE = 1 << 30
ERROR_LENGTH = 5_000  # characters that an error may have at most: what it quotes is to be shortened
RESTART = 75  # the exit code of a worker that was stopped inside a library, whose state may be broken
MOST_FORKS = 40  # of one command
SOFT_SECONDS = 1.0  # after which a training that makes steps is stopped


@dataclass(frozen=True)
class Limits:
    """What one input may take."""

    cpu_seconds: float = 20.0
    wall_seconds: float = 120.0  # on a busy machine, or asleep
    gigabytes: float = 2.0  # beyond what the process has when it is forked


@dataclass(frozen=True)
class Failure:
    """What an input ended in: the kind and the place, by which alike failures are counted as one; the details."""

    kind: str
    place: str
    details: str


LARGEST_FILE = 1 << 26  # bytes: changes that repeat what others have repeated must fit on the disk


def write_input(made: Input, folder: Path) -> None:
    """Write an input's files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in made.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content[:LARGEST_FILE])
        elif content == "directory":
            path.mkdir()
        elif content == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(path.name if content == "loop" else "/dev/zero")


def run_command(made: Input, folder: Path) -> Failure | None:
    """Run an input's command in this process, in its folder; return how it fails."""
    os.chdir(folder)
    (folder / ".stdin").write_bytes(made.stdin)
    log = os.open(folder / ".log", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    with open(folder / ".stdin", "rb") as stdin:
        os.dup2(stdin.fileno(), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    path = list(sys.path)
    try:
        code = call_weft(made.words)
    except StoppedError:
        raise
    except BaseException as error:  # what is no SystemExit ends in a traceback
        return failure_of(error)
    finally:
        sys.path[:] = path
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
    return judge(code, (folder / ".log").read_bytes().decode("utf-8", "replace"), made)


def call_weft(words: Sequence[str]) -> int:
    """Run a command line in this process; return its exit code."""
    sys.argv = ["weft", *words]
    try:
        cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def failure_of(error: BaseException) -> Failure:
    """Return an exception as a failure, at the deepest line of weft."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/src/weft/" in frame.filename] or frames
    place = f"{own[-1].filename.rpartition('/src/')[2]}:{own[-1].lineno}" if own else "?"
    return Failure(type(error).__name__, place, "".join(traceback.format_exception(error))[-3000:])


def judge(code: int, log: str, made: Input) -> Failure | None:
    """Return how an exit code and what was printed are wrong: a code of neither 0 nor 2, a traceback, NaN in JSON."""
    if "Traceback (most recent call last)" in log and StoppedError.__name__ not in log:  # that one is our own
        return Failure("traceback", log.strip().splitlines()[-1][:80], log[-3000:])
    if "error: out of memory" in log:
        return Failure("memory", "an allocation failed", log[-1000:])
    if code not in (0, 2):
        return Failure(f"exit {code}", made.words[0] if made.words else "", log[-1000:])
    _, begins, told = log.rpartition("error: ")
    if code == 2 and begins and len(told) > ERROR_LENGTH:
        return Failure("long error", told[:60], f"{len(told):,} characters: {told[:300]} … {told[-300:]}")
    if code == 0 and "--json" in made.words:
        for line in log.splitlines():
            with suppress(json.JSONDecodeError):
                try:
                    json.loads(line, parse_constant=refuse_constant)
                except NotANumberError:
                    return Failure("NaN in JSON", made.words[0], line[:500])
    return None


class NotANumberError(Exception):
    """NaN or Infinity was written as JSON, which has neither."""


def refuse_constant(name: str) -> float:
    """Raise for NaN, Infinity and -Infinity."""
    raise NotANumberError(name)


class TooManyForksError(Exception):
    """A command started more processes than any should."""


def limit_process(limits: Limits) -> None:
    """Bound this process: its memory, the files that it writes and the processes that it starts."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    room = used + int(limits.gigabytes * GIGABYTE)
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    resource.setrlimit(resource.RLIMIT_FSIZE, (GIGABYTE // 2, GIGABYTE // 2))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.fsync = lambda handle: None  # type: ignore[assignment]  # the disk is not what is tested
    real, count = os.fork, [0]

    def fork() -> int:
        count[0] += 1
        if count[0] > MOST_FORKS:
            raise TooManyForksError(f"{MOST_FORKS} processes were started")
        return real()

    os.fork = fork
    limit_process.reset = lambda: count.__setitem__(0, 0)  # type: ignore[attr-defined]


class StoppedError(BaseException):
    """A training was stopped that makes steps: it is asked for more of them than there is time for."""


def stop_training(_number: int, _frame: Any) -> None:
    """Stop a training if it has a checkpoint, which is written before the first step."""
    if next(Path.cwd().glob("**/checkpoints/step-*"), None):
        raise StoppedError
    signal.setitimer(signal.ITIMER_REAL, SOFT_SECONDS)


Make = Callable[[Any], Input]


def work(keys: Sequence[Any], make: Make, folder: Path, limits: Limits, pipe: int) -> None:
    """Run inputs one after the other, and write to a pipe which begins and how it ends; never return."""
    warnings.simplefilter("ignore")
    limit_process(limits)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  (a test may have put others there)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGALRM, stop_training)
    for index, key in enumerate(keys):
        os.write(pipe, json.dumps({"begins": index}).encode() + b"\n")
        made = make(key)
        write_input(made, folder)
        limit_process.reset()  # type: ignore[attr-defined]
        if made.words[:1] in (["train"], ["compare"]):
            signal.setitimer(signal.ITIMER_REAL, SOFT_SECONDS)
        failure, stopped = None, False
        try:
            failure = run_command(made, folder)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except StoppedError:
            stopped = True
        told = None if failure is None else [failure.kind, failure.place, failure.details]
        os.write(pipe, json.dumps({"ends": index, "failure": told}).encode() + b"\n")
        if stopped:
            os._exit(RESTART)
    os._exit(0)


@dataclass
class Worker:
    """A forked process that runs some inputs."""

    keys: Sequence[Any]
    folder: Path
    pid: int = 0
    pipe: int = -1
    buffer: bytes = b""
    current: int | None = None
    began: float = 0.0
    began_cpu: float = 0.0
    done: int = 0
    ended: bool = False
    results: list[tuple[Any, Failure | None]] = field(default_factory=list)

    def start(self, make: Make, limits: Limits) -> None:
        """Fork a process for the inputs that are left."""
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            os.close(read)
            try:
                work(self.keys[self.done :], make, self.folder, limits, write)
            except BaseException:
                os.write(write, json.dumps({"broken": traceback.format_exc()}).encode() + b"\n")
            finally:
                os._exit(70)
        os.close(write)
        os.set_blocking(read, False)
        self.pipe, self.buffer, self.current = read, b"", None

    def poll(self, make: Make, limits: Limits) -> None:
        """Take what the process has written; end it where it takes too long; start another for what is left."""
        self._read()
        if self.current is not None and (reason := self._overdue(limits)):
            self._end()
            self._fail(Failure("hang", reason, ""), make, limits)
            return
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self._read()
            os.close(self.pipe)
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # what it has started
            if self.done == len(self.keys):
                self.ended = True
            elif os.waitstatus_to_exitcode(status) == RESTART and self.current is None:
                self.start(make, limits)
            else:
                place = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status >> 8}"
                self._fail(Failure("died", place, _log(self.folder)), make, limits)

    def _fail(self, failure: Failure, make: Make, limits: Limits) -> None:
        self.results.append((self.keys[self.done], failure))
        self.done += 1
        self.ended = self.done == len(self.keys)
        if not self.ended:
            self.start(make, limits)

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pipe)

    def _overdue(self, limits: Limits) -> str:
        if time.monotonic() - self.began > limits.wall_seconds:
            return f"more than {limits.wall_seconds:.0f} s"
        if _cpu_seconds(self.pid) - self.began_cpu > limits.cpu_seconds:
            return f"more than {limits.cpu_seconds:.0f} s of CPU"
        return ""

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while part := os.read(self.pipe, 1 << 16):
                self.buffer += part
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "broken" in told:
                raise RuntimeError(told["broken"])
            if "begins" in told:
                self.current, self.began, self.began_cpu = told["begins"], time.monotonic(), _cpu_seconds(self.pid)
            else:
                failure = None if told["failure"] is None else Failure(*told["failure"])
                self.results.append((self.keys[self.done], failure))
                self.done, self.current = self.done + 1, None


def _cpu_seconds(pid: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _log(folder: Path) -> str:
    with suppress(OSError):
        return (folder / ".log").read_bytes().decode("utf-8", "replace")[-2000:]
    return ""


def run_all(
    keys: Sequence[Any], make: Make, root: Path, limits: Limits, workers: int = 1, chunk: int = 200
) -> Iterator[tuple[Any, Failure | None]]:
    """Yield each key with how its input fails, or None; a process runs `chunk` inputs at most."""
    left = [keys[at : at + chunk] for at in range(0, len(keys), chunk)][::-1]
    running: list[Worker] = []
    places = [root / f"worker-{number}" for number in range(workers)]
    try:
        while left or running:
            while left and len(running) < workers:
                folder = next(place for place in places if place not in [worker.folder for worker in running])
                worker = Worker(left.pop(), folder)
                worker.start(make, limits)
                running.append(worker)
            for worker in running:
                worker.poll(make, limits)
                yield from worker.results
                worker.results.clear()
            running = [worker for worker in running if not worker.ended]
            time.sleep(0.01)
    finally:
        for worker in running:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
