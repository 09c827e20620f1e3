"""Two processes of one run, as `torchrun` starts them, but forked from one that has imported all: in half the time.

python -m tests.training.ranks train recipe.yaml --out run
"""

import os
import sys

import torch._dynamo  # noqa: F401  (optimizers import it at their first step)
import torch.distributed as dist

import weft.pipeline  # noqa: F401
from weft.cli import main as cli


def start(rank, arguments):
    """Fork a process that runs a command of weft's as one of two; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    sys.argv = ["weft", *arguments]
    code = 70
    try:
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    pids = [start(rank, sys.argv[1:]) for rank in (0, 1)]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids))


if __name__ == "__main__":
    main()
