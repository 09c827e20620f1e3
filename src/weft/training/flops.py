"""What training costs in operations, and which share of what the machine can do they are.

    utilisation = useful operations / seconds / operations a second of a large product on this machine

This is the model FLOPs utilisation (MFU) of Chowdhery et al. 2022, section 4.1, with a ceiling that is measured, not
read from a data sheet. Useful operations follow from the lengths of the sequences (`Model.flops`): padding,
what is computed twice to save memory, and functions place by place are none.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from weft.models.base import matrix_numbers
from weft.tasks.base import Batch, Head

PASSES = 3  # backward has two products for each one of the forward pass: for its input, and for its matrix
LONG_ENOUGH = 0.2  # seconds of products: the best of them is not the one that something else got in the way of


@dataclass
class Work:
    """What a training did in some time: real tokens read, and the operations of reading and learning from them."""

    tokens: int = 0
    flops: int = 0
    seconds: float = 0.0

    def add(self, head: Head, batches: Iterable[Batch]) -> None:
        """Count what an update on these batches takes; their lengths are on the CPU, so no device is waited for."""
        for batch in batches:
            self.tokens += batch.size
            self.flops += round(_passes(head) * head.flops(batch.unpadded or batch))


def _passes(head: Head) -> float:
    """Say how many times what a forward pass takes an update does: what is frozen is read forward alone."""
    if not head.frozen:
        return PASSES
    still = sum(map(matrix_numbers, head.frozen)) / max(1, matrix_numbers(head))
    return 1 + (PASSES - 1) * (1 - min(1.0, still))


@cache
def peak_flops(device: torch.device, precision: str) -> float:
    """Measure the operations a second of a large product in this precision, the best of several; once a process."""
    side, at_once = (1024, 1) if device.type == "cpu" else (4096, 16)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    # A generator of its own, for dropout must not feel it; and no constants, on which a GPU draws less power and so is
    # faster than on any weights.
    own = torch.Generator(device).manual_seed(0)
    one, other = (torch.randn(side, side, device=device, dtype=kind, generator=own) for _ in range(2))
    _seconds(one, other, at_once)
    found: list[float] = []
    while sum(found) < LONG_ENOUGH:
        found.append(_seconds(one, other, at_once))
    del one, other
    torch.cuda.empty_cache()
    return 2 * side**3 * at_once / min(found)


def _seconds(one: Tensor, other: Tensor, times: int) -> float:
    _wait(one.device)
    began = time.perf_counter()
    for _ in range(times):
        torch.mm(one, other)
    _wait(one.device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
