"""weft's training step against a bare PyTorch loop over the same modules and batches: tokens/s, and their ratio.

    python bench/trainer.py

The bare loop is what one writes by hand: take a batch, forward, backward, clip, step; its batches lie ready in a list.
weft's loop draws and collates its own, sums counts, checks that the loss is finite, schedules, reports to a file.
The two take turns, so that a change in the machine's speed meets both.
"""

import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch

from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.data.batching.loader import Loader
from weft.tasks.factory import build, make_task
from weft.tasks.prepare import fit_tokenizer, pack_split
from weft.training.distributed import World
from weft.training.reporting import MetricsFile
from weft.training.trainer import Trainer

STEPS, ROUNDS = 25, 21


def bare(head: torch.nn.Module, batches: list, lr: float) -> float:
    optimizer = torch.optim.AdamW(head.parameters(), lr=lr, fused=True)
    head.train()
    began = time.perf_counter()
    for batch in batches:
        sums, _ = head(batch)
        (sums["tokens"] / batch.counts["tokens"]).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - began


def main() -> None:
    run = Run.parse(read_recipe("dates", [f"train.steps={STEPS}", "train.eval_every=null", "train.schedule=constant"]))
    tokenizer = fit_tokenizer(run.tokenizer, run.data, make_task(run))
    task, _ = build(run, tokenizer)
    packed, _ = pack_split(run.data, "train", task, tokenizer)
    loader = Loader(packed, task.collate, run.train.batch_tokens, run.train.seed)
    batches = [drawn.batch for drawn in islice(loader.stream(), STEPS)]
    tokens = sum(batch.size for batch in batches)
    times = {"bare": [], "weft": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            torch.manual_seed(0)
            times["bare"].append(bare(build(run, tokenizer)[1], batches, run.train.lr))
            torch.manual_seed(0)
            report = MetricsFile(Path(folder) / f"{number}.jsonl", -1)
            trainer = Trainer(run, task, build(run, tokenizer)[1], loader, World(0, 1, torch.device("cpu")), report)
            began = time.perf_counter()
            trainer.fit()
            times["weft"].append(time.perf_counter() - began)
    speeds = {name: tokens / statistics.median(seconds) for name, seconds in times.items()}
    for name, speed in speeds.items():
        print(f"{name:5} {speed:10,.0f} tokens/s")
    ratios = [a / b for a, b in zip(times["bare"], times["weft"], strict=True)]
    print(f"ratio {statistics.median(ratios):.3f} (median of {ROUNDS} rounds; {min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
