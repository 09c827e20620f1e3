"""Trainings on several GPUs at once: a process for each GPU, which sees no other, works through what is left to do.

On a Ray cluster each training is a task of Ray's, which waits for a GPU, or where there is none for a processor.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from weft.comparison.evaluate import read_evaluation
from weft.comparison.plan import Plan, PlannedEntry
from weft.ray_engine import call_in_tasks

Job = tuple[PlannedEntry, int]


def visible_devices() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] if named else [str(number) for number in range(count)]


def work_on_devices(plan: Plan, out: Path, jobs: Sequence[Job], devices: Sequence[str]) -> dict[str, str]:
    """Train and evaluate each entry in a process on the next free device; return why entries failed, by name."""
    waiting: SimpleQueue[Job] = SimpleQueue()
    for job in jobs:
        waiting.put(job)
    with ThreadPoolExecutor(len(devices)) as pool:
        parts = list(pool.map(lambda device: _work_through(plan, out, waiting, device), devices))
    return {name: reason for failures in parts for name, reason in failures.items()}


def _work_through(plan: Plan, out: Path, waiting: "SimpleQueue[Job]", device: str) -> dict[str, str]:
    failures: dict[str, str] = {}
    while True:
        try:
            entry, seed = waiting.get_nowait()
        except Empty:
            return failures
        if reason := train_in_process(
            out, plan.folder(entry, seed), entry.name, seed, {"CUDA_VISIBLE_DEVICES": device}
        ):
            failures[entry.name] = reason


def train_in_process(out: Path, folder: Path, name: str, seed: int, environment: Mapping[str, str]) -> str | None:
    """Train and evaluate an entry in a process of its own; return why it has no evaluation."""
    words = [sys.executable, "-m", "weft.comparison.worker", str(out), name, str(seed)]
    done = subprocess.run(words, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)
    if read_evaluation(out / folder) is not None:
        return None
    lines = done.stderr.strip().splitlines()
    killed = f"its process ended by signal {-done.returncode}: out of memory?" if done.returncode < 0 else ""
    return killed or (lines[-1] if lines else f"its process ended with {done.returncode}")


def work_on_ray(plan: Plan, out: Path, jobs: Sequence[Job]) -> dict[str, str]:
    """Train and evaluate each entry as a Ray task, with a GPU or a processor each; return why entries failed, by name.

    The folder must be one that all machines of the cluster share.
    """
    trainings = [(out.absolute(), plan.folder(entry, seed), entry.name, seed) for entry, seed in jobs]
    return {name: reason for (_, _, name, _), reason in call_in_tasks(_train, trainings, use_gpus=True) if reason}


def _train(training: tuple[Path, Path, str, int]) -> str | None:
    return train_in_process(*training, {})
