"""Trainings on several GPUs at once: a process for each GPU, which sees no other, works through what is left to do."""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from weft.comparison.evaluate import read_evaluation
from weft.comparison.plan import Plan, PlannedEntry

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
        words = [sys.executable, "-m", "weft.comparison.worker", str(out), entry.name, str(seed)]
        seen = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
        done = subprocess.run(words, env=seen, stderr=subprocess.PIPE, text=True)
        if read_evaluation(out / plan.folder(entry, seed)) is None:
            lines = done.stderr.strip().splitlines()
            killed = f"its process ended by signal {-done.returncode}: out of memory?" if done.returncode < 0 else ""
            failures[entry.name] = killed or (lines[-1] if lines else f"its process ended with {done.returncode}")
