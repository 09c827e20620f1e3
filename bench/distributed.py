"""Two processes against one, and weft's training step on two against bare DDP: tokens/s and their ratio.

    python bench/distributed.py

Started by `torchrun` for one and for two processes (gloo, a thread each). The bare loop is what one writes by hand: the
head within DistributedDataParallel, batches that lie ready, forward, backward, clip, step. weft's loop draws and
collates its own, sums counts over the processes, seeds each batch, checks that the loss is finite and adds up what it
costs. The two take turns, so that a change in the machine's speed meets both.
"""

import os
import statistics
import subprocess
import sys
import time
from itertools import islice

import torch
from torch.nn.parallel import DistributedDataParallel

from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.tasks.factory import build, make_task
from weft.tasks.prepare import fit_tokenizer, pack_split
from weft.training.compile import make_loader
from weft.training.distributed import join_world, leave_world
from weft.training.reporting import Reporters
from weft.training.trainer import Trainer

STEPS, ROUNDS = 8, 9
RECIPE = ["train.eval_every=null", "train.schedule=constant", "train.accumulate=2", "model.width=128"]


def bare(head: torch.nn.Module, batches: list, lr: float, size: int, per_rank: int) -> float:
    wrapped = DistributedDataParallel(head) if size > 1 else head
    optimizer = torch.optim.AdamW(head.parameters(), lr=lr, fused=True)
    wrapped.train()
    began = time.perf_counter()
    for first in range(0, len(batches), per_rank):
        for batch in batches[first : first + per_rank]:
            sums, _ = wrapped(batch)
            (sums["tokens"] / batch.counts["tokens"] / per_rank).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - began


def measure() -> None:
    """Time both loops in the processes of `torchrun`; the main one prints."""
    torch.set_num_threads(1)
    world = join_world("cpu")
    run = Run.parse(read_recipe("dates", [f"train.steps={STEPS}", *RECIPE]))
    task = make_task(run)
    tokenizer = fit_tokenizer(run.tokenizer, run.data, task)
    task, head = build(run, tokenizer)
    packed, _ = pack_split(run.data, "train", task, tokenizer)
    loader, per_rank = make_loader(run, task, head.body, packed, world), 2 // world.size
    batches = [drawn.batch for drawn in islice(loader.stream(), STEPS * per_rank)]
    tokens = world.sum({"tokens": sum(batch.size for batch in batches)})["tokens"]
    seconds: dict[str, list[float]] = {"bare": [], "weft": []}
    for _ in range(ROUNDS):
        world.barrier()
        seconds["bare"].append(bare(build(run, tokenizer)[1], batches, run.train.lr, world.size, per_rank))
        trainer = Trainer(run, task, build(run, tokenizer)[1], loader, world, Reporters([]))
        world.barrier()
        began = time.perf_counter()
        trainer.train_until(STEPS)
        seconds["weft"].append(time.perf_counter() - began)
    ratios = [a / b for a, b in zip(seconds["bare"], seconds["weft"], strict=True)]
    if world.main:
        for name, times in seconds.items():
            print(f"{world.size} processes, {name}: {tokens / statistics.median(times):10,.0f} tokens/s")
        print(f"ratio weft / bare {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)
    leave_world(world)


def main() -> None:
    """Start one process, then two."""
    for processes in (1, 2):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), __file__]
        subprocess.run([sys.executable, *launch], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    measure() if "RANK" in os.environ else main()
