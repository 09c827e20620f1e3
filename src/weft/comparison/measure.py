"""Costs of an entry on this machine: peak memory, latency, throughput; and a description of the machine."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.checkpoint.store import resolve_checkpoint

LATENCY_EXAMPLES, LATENCY_SECONDS = 100, 3.0  # as many examples, or as many as take so long
MIN_EXAMPLES = 5
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak_memory() -> None:
    """Let the peak of memory begin at what is used now."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        _CLEAR.write_text("5", encoding="ascii")


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes since the reset: of the GPU, or of the process; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError, ValueError):
        lines = _STATUS.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
    return None


def disk_bytes(folder: Path) -> int:
    """Return the size of the model that `weft.load` reads from a run, without what is for resuming alone."""
    checkpoint = resolve_checkpoint(folder)
    files = (path for path in checkpoint.rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files if path.relative_to(checkpoint).parts[0] != "state")


def latencies(answer: Callable[[Any], object], examples: Sequence[Any]) -> tuple[float, float] | None:
    """Return the seconds of one example, the median and the 99th percentile; None without examples."""
    seconds: list[float] = []
    for example in examples[:MIN_EXAMPLES]:  # not timed: first calls compile and allocate
        answer(example)
    for example in examples[:LATENCY_EXAMPLES]:
        began = time.perf_counter()
        answer(example)
        seconds.append(time.perf_counter() - began)
        if len(seconds) >= MIN_EXAMPLES and sum(seconds) > LATENCY_SECONDS:
            break
    if not seconds:
        return None
    p50, p99 = np.percentile(seconds, [50, 99])
    return float(p50), float(p99)


def machine() -> dict[str, str]:
    """Return what the figures were measured on: processor, cores, GPUs and versions."""
    from weft import __version__

    about = {"processor": _processor(), "cores": str(len(os.sched_getaffinity(0))), "system": platform.system()}
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        name = torch.cuda.get_device_name(0)
        about["GPU"] = name if count == 1 else f"{count} × {name}"
    return {**about, "weft": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
