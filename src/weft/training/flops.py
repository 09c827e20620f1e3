"""FLOPs of training, and model FLOPs utilisation (MFU).

    MFU = model FLOPs / seconds / FLOP/s of a large matrix product on this machine

The definition is that of Chowdhery et al. 2022, section 4.1, with a peak that is measured, not read from a data sheet.
Model FLOPs follow from the lengths of the sequences (`Model.flops`): padding, recomputation to save memory, and
element-wise functions do not count.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from weft.models.base import num_matrix_parameters
from weft.tasks.batch import Batch
from weft.tasks.head import Head

# Forward and backward; backward has two products for each of the forward pass: for input and weight gradients.
PASSES = 3
LONG_ENOUGH = 0.2  # seconds of products, so that the fastest of them was not disturbed by other work


@dataclass
class TrainingCost:
    """Tokens without padding, FLOPs of forward and backward pass, and seconds, over some steps of training."""

    tokens: int = 0
    flops: int = 0
    seconds: float = 0.0

    def __iadd__(self, other: "TrainingCost") -> "TrainingCost":
        self.tokens += other.tokens
        self.flops += other.flops
        self.seconds += other.seconds
        return self

    def add(self, head: Head, batches: Iterable[Batch]) -> None:
        """Add the cost of an update on these batches; their lengths are on the CPU, so there is no synchronisation."""
        for batch in batches:
            self.tokens += batch.size
            self.flops += round(_passes(head) * head.flops(batch.unpadded or batch))


def _passes(head: Head) -> float:
    """Return the cost of an update in forward passes; frozen parts have no backward pass."""
    if not head.frozen:
        return PASSES
    frozen = sum(map(num_matrix_parameters, head.frozen)) / max(1, num_matrix_parameters(head))
    return 1 + (PASSES - 1) * (1 - min(1.0, frozen))


@cache
def peak_flops(device: torch.device, precision: str) -> float:
    """Measure the FLOP/s of a large matrix product in this precision, the best of several; once per process."""
    side, repeats = (1024, 1) if device.type == "cpu" else (4096, 16)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    # A generator of its own, so that dropout masks do not change. Random values, since a GPU draws less power on
    # constants and so is faster than on any weights.
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, dtype=dtype, generator=generator) for _ in range(2))
    _time_products(a, b, repeats)
    seconds: list[float] = []
    while sum(seconds) < LONG_ENOUGH:
        seconds.append(_time_products(a, b, repeats))
    del a, b
    torch.cuda.empty_cache()
    return 2 * side**3 * repeats / min(seconds)


def _time_products(a: Tensor, b: Tensor, repeats: int) -> float:
    """Return the seconds of `repeats` matrix products."""
    _synchronize(a.device)
    began = time.perf_counter()
    for _ in range(repeats):
        torch.mm(a, b)
    _synchronize(a.device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
