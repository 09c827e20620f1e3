"""Train families in turn, by groups of processes, which are forked from one that has imported all: see `ranks`.

python -m tests.training.families JOBS      JOBS: a file, [[processes, [[recipe, overrides, folder, resume], …]], …]
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from tests.training.ranks import share

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
    for processes, group in json.loads(Path(sys.argv[1]).read_text()):
        share(partial(train_all, group), processes)
