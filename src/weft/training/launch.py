"""Several processes of one training on this machine, started by `torch.distributed.run`'s agent (torchelastic).

`weft train RECIPE --nproc 2` is `torchrun --standalone --nproc-per-node 2 -m weft train RECIPE`, but an error is
printed once, and the exit code is that of the process that failed first. Processes that are restarted go on from the
last checkpoint.
"""

import json
import logging
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from weft.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

LAUNCHED = "WEFT_LAUNCHED"  # set in the environment of processes that `launch` started
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where the agent reads the error of a process
TOLD = " "  # the message of an error that was printed already
USER_ERROR = 2  # the exit code of an error that a user can mend
LOST_PEER = 1  # the exit code of a process that cannot go on without another
SAVE_SECONDS = 300  # from a signal until processes that have not ended are killed: long enough to save


def check_new(out: Path) -> None:
    """Refuse a directory that holds a run: processes that are restarted go on from what is there."""
    from weft.checkpoint.store import Store

    for folder in (out, *sorted(out.glob("seed-*"))):
        if Store(folder).last():
            raise CheckpointError(f"{folder}: holds a run already; go on with it by --resume, or choose another --out")


def restarted() -> bool:
    """Return whether this process was started again after one of its group had failed."""
    return LAUNCHED in os.environ and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def hand_over(message: str) -> bool:
    """Hand an error to the process that launched this one, which prints it once; return False if there is none."""
    if LAUNCHED not in os.environ or ERROR_FILE not in os.environ:
        return False
    from weft.checkpoint.atomic_io import write_atomic

    text = json.dumps({"message": message, "timestamp": int(time.time())})
    with suppress(OSError):
        write_atomic(Path(os.environ[ERROR_FILE]), text.encode())  # the agent fails on half of it
        return True
    return False


def launch(arguments: Sequence[str], processes: int, max_restarts: int) -> None:
    """Run `weft ARGUMENTS` as several processes until all have ended; exit with the code of the first that failed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what it logs is told below
    if "RANK" in os.environ:
        raise ConfigError("--nproc: this process is one of several already, started by torchrun; leave --nproc out")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ[LAUNCHED] = "1"
    # A store of their own for processes that are started again: in torchelastic's they could find those before them.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=secrets.token_hex(8),
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(),
        local_addr="localhost",
        signals_to_handle="SIGTERM,SIGINT",
        shutdown_timeout=SAVE_SECONDS,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "weft", *arguments)
    except ChildFailedError as error:
        _exit_as_failed(error.failures)
    except SignalException as stop:
        sys.exit(128 + stop.sigval)
    finally:
        del os.environ[LAUNCHED]


def lost_peer(error: BaseException) -> bool:
    """Return whether an error of PyTorch follows from the end of another process."""
    return "RANK" in os.environ and bool(re.search(r"gloo|NCCL|TCPStore|Connection (closed|reset)", str(error)))


def _exit_as_failed(failures: "Mapping[int, ProcessFailure]") -> NoReturn:
    """Print the error of the process that failed first, and exit with its code; those that lost it failed later."""
    rank, failure = min(failures.items(), key=lambda item: (_blame(item[1]), item[1].timestamp))
    code: int = failure.exitcode
    if _handed_over(failure):
        if failure.message != TOLD:
            sys.stderr.write(f"error: {failure.message}\n")
        sys.exit(code if code > 0 else USER_ERROR)
    if code < 0:
        name = signal.Signals(-code).name
        sys.stderr.write(f"error: process {rank} was ended by {name}; go on from the last checkpoint with --resume\n")
    sys.exit(code if code > 0 else 128 - code)


def _handed_over(failure: "ProcessFailure") -> bool:
    """Return whether a process has handed its error over before it ended."""
    return Path(failure.error_file).is_file()


def _blame(failure: "ProcessFailure") -> int:
    """Return the rank of a failure among causes: errors, signals, tracebacks, and last what follows from others."""
    code = failure.exitcode
    if _handed_over(failure):
        return 3 if code == LOST_PEER else 0  # the agent may end a process that has an error to tell
    return 4 if code == -signal.SIGTERM else 1 if code < 0 else 2
