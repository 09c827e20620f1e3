"""Train families in turn as `torchrun` starts it: one start of the interpreter for all of them.

torchrun --nproc-per-node 2 -m tests.training.families JOBS      JOBS: a file, [[recipe, overrides, folder, resume], …]
"""

import json
import sys
from pathlib import Path

import torch

import weft
from weft.training.distributed import join_world, leave_world


def train_all(jobs):
    """Train each job in its folder; the processes stay joined."""
    torch.set_num_threads(1)
    world = join_world("cpu")
    try:
        for recipe, overrides, folder, resume in jobs:
            weft.train(recipe, overrides, folder, resume)
    finally:
        leave_world(world)


if __name__ == "__main__":
    train_all(json.loads(Path(sys.argv[1]).read_text()))
