"""Work in parts on a Ray cluster: one task reads the parts, and actors turn each into bytes, through Ray Data.

The cluster is the one that RAY_ADDRESS names; without it, this machine's processors and GPUs, on loopback alone, until
the work is done. Parts wait in Ray's object store, whose size bounds what is read ahead. An actor that dies is started
again, and its part is worked on again. A `WeftError` of the reader or of an actor is raised where the results are read.
"""

import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from weft.errors import ConfigError, DataError, WeftError, did_you_mean

ENGINES = ("local", "ray")
ATTEMPTS = 4  # at a part whose actor dies
_KILLED = (
    f"a Ray worker was killed {ATTEMPTS} times at the same part, perhaps for want of memory; let fewer run on a "
    "machine, and run it again: what is done is kept"
)

_P = TypeVar("_P")
_R = TypeVar("_R")
Contents = dict[str, bytes]  # what an actor makes of a part: the same names for each
ReadParts = Callable[[], Iterable[tuple[int, _P]]]  # yields parts and their numbers, on some machine of the cluster
MakeWorker = Callable[[], Callable[[_P], Contents]]  # called in each actor


def is_ray(engine: str) -> bool:
    """Return whether the engine is Ray, and raise if that is not installed, or if there is no such engine."""
    if engine not in ENGINES:
        raise ConfigError(f"--engine: must be local or ray, but is {engine!r} instead; {did_you_mean(engine, ENGINES)}")
    if engine == "ray":
        _import_ray()
    return engine == "ray"


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    if "RAY_ADDRESS" not in os.environ and "ray" not in sys.modules:  # else Ray would listen on the network, too
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    warnings.filterwarnings("ignore", module=r"ray\b")  # of what it deprecates itself; it warns in its threads, too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module("ray.data").DataContext.get_current()
            return import_module("ray")
    except ImportError:
        raise ConfigError("--engine ray: needs Ray, which is not installed; pip install 'weft[ray]'") from None


@contextmanager
def cluster() -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster; one that was not yet connected is left at the end."""
    ray = _import_ray()
    if ray.is_initialized():
        yield ray
        return
    address = os.environ.get("RAY_ADDRESS", "local")
    loopback = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level="error", **loopback)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"--engine ray: RAY_ADDRESS={address}: {reason}; is a cluster running there?") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def work_in_parts(
    read_parts: ReadParts[_P], make_worker: MakeWorker[_P], use_gpus: bool, workers: int | None = None
) -> Iterator[tuple[int, Contents]]:
    """Yield each part's number and its contents, as they are ready; the actors have a GPU each, or a processor."""
    with cluster() as ray:
        resources, number = _resources(ray, use_gpus)
        made = _dataset(ray, read_parts).map(
            _Actor,
            fn_constructor_args=(make_worker, ray.remote(num_cpus=0)(_Attempts).remote(), str(Path.cwd())),
            compute=ray.data.ActorPoolStrategy(size=min(workers or number, number)),
            **resources,
        )
        for row in made.iter_rows():
            if error := row.pop("error", None):
                raise error.value
            yield int(row.pop("number")), row


def call_in_tasks(work: Callable[[_P], _R], arguments: Iterable[_P], use_gpus: bool) -> Iterator[tuple[_P, _R]]:
    """Yield arguments and what a function returns for each, as they are ready; a task has a GPU, or a processor."""
    with cluster() as ray:
        task = ray.remote(**_resources(ray, use_gpus)[0], max_calls=1)(_in_folder)
        waiting = {task.remote(str(Path.cwd()), work, argument): argument for argument in arguments}
        while waiting:
            for done in ray.wait(list(waiting))[0]:
                yield waiting.pop(done), ray.get(done)


def _resources(ray: Any, use_gpus: bool) -> tuple[dict[str, int], int]:
    """Return what an actor or a task takes of the cluster, and how many of them it has room for."""
    there = ray.cluster_resources()
    if use_gpus and there.get("GPU", 0) >= 1:
        return {"num_gpus": 1}, int(there["GPU"])
    return {"num_cpus": 1}, max(1, int(there.get("CPU", 1)))


@dataclass(frozen=True)
class _Opaque:
    """A value that Arrow, in which Ray Data holds rows, leaves as it is."""

    value: Any


def _dataset(ray: Any, read_parts: ReadParts[Any]) -> Any:
    """Return the parts as a Ray dataset, a block each, so that each goes on alone; read by a task of its own."""
    context = ray.data.DataContext.get_current().copy()
    context.target_max_block_size = 1  # bytes
    context.enable_progress_bars = context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    with ray.data.DataContext.current(context):
        begin = ray.data.from_items([0])  # not `range`, whose reading would wait for a processor of the actors
        return begin.map_batches(_Reader(read_parts, str(Path.cwd())).read, num_cpus=0)


@dataclass(frozen=True)
class _Reader:
    read_parts: ReadParts[Any]
    folder: str

    def read(self, begin: Any) -> Iterator[dict[str, list[Any]]]:
        """Yield the parts, or in place of the next one the error."""
        _enter(self.folder)
        try:
            for number, part in self.read_parts():
                yield {"number": [number], "part": [_Opaque(part)]}
        except WeftError as error:
            yield {"number": [-1], "part": [_Opaque(error)]}


class _Attempts:
    """How often each part was begun; an actor of its own, since Ray Data starts one that dies again without end."""

    def __init__(self) -> None:
        self._begun: Counter[int] = Counter()

    def begin(self, number: int) -> int:
        self._begun[number] += 1
        return self._begun[number]


class _Actor:
    """A worker in a process of Ray's; what it needs is loaded with its first part."""

    def __init__(self, make_worker: MakeWorker[Any], attempts: Any, folder: str) -> None:
        _enter(folder)
        self._make, self._attempts = make_worker, attempts
        self._work: Callable[[Any], Contents] | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        part = row["part"].value
        try:
            if isinstance(part, WeftError):
                raise part
            if import_module("ray").get(self._attempts.begin.remote(row["number"])) > ATTEMPTS:
                raise DataError(_KILLED)
            self._work = self._work or self._make()
            return {"number": row["number"], **self._work(part)}
        except WeftError as error:
            return {"number": row["number"], "error": _Opaque(error)}


def _in_folder(folder: str, work: Callable[[_P], _R], argument: _P) -> _R:
    _enter(folder)
    return work(argument)


def _enter(folder: str) -> None:
    """Go to the folder of the command, so that relative paths and classes of the user's are found; if it is there."""
    if Path(folder).is_dir():
        os.chdir(folder)
    if "" not in sys.path:
        sys.path.insert(0, "")
