"""Processes of one run, as `torchrun` starts them, but forked from one that has imported all: in half the time.

python -m tests.training.ranks train recipe.yaml --out run
"""

import os
import sys
import traceback
from functools import partial

import torch._dynamo  # noqa: F401  (DDP imports it)
import torch.distributed as dist

import weft.pipeline  # noqa: F401
from weft.cli import main as cli
from weft.training.reporting import TensorBoard


def command(arguments):
    """Run a command of weft's."""
    sys.argv = ["weft", *arguments]
    cli.main()


def start(rank, work):
    """Fork a process that does its part of some work; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    code = 70
    try:
        work()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def share(work, processes=2):
    """Have so many processes do some work together, as in `tests/conftest.py`; exit if one of them fails."""
    os.fsync, TensorBoard.installed = (lambda handle: None), staticmethod(lambda: False)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    pids = [start(rank, work) for rank in range(processes)]
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(statuses):
        sys.exit(1)


if __name__ == "__main__":
    share(partial(command, sys.argv[1:]))
