"""How an update went, read when the device has come that far.

To read a number from a GPU is to wait until all that was asked of it is done, and while it waits it has nothing to do.
So the update is decided there (where loss or gradient are not finite, the optimiser's kernel leaves everything as it
is), and the numbers set out for the CPU at once, to be looked at when the next update is on its way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.data.batching.loader import LoadedBatch
from weft.tasks.base import Batch


@dataclass(frozen=True)
class Outcome:
    """The loss and its gradient's norm at a step, and what the step was made of."""

    step: int
    drawn: list[LoadedBatch[Batch]]
    lr: float
    numbers: Tensor  # (2,) on the CPU, there once `ready` has come
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, step: int, drawn: list[LoadedBatch[Batch]], lr: float, numbers: Tensor) -> "Outcome":
        """Send the numbers (2,) to the CPU."""
        sent, ready = numbers.to("cpu", non_blocking=True), None
        if numbers.is_cuda:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(numbers.device))
        return cls(step, drawn, lr, sent, ready)

    def read(self) -> tuple[float, float]:
        """Wait for the loss and the norm."""
        if self.ready is not None:
            self.ready.synchronize()
        loss, norm = self.numbers.tolist()
        return loss, norm

    @property
    def place(self) -> str:
        """Name the batches, and the first items in them."""
        return "; ".join(
            f"epoch {one.draw.position.epoch}, batch {one.draw.position.batch} "
            f"(items {', '.join(map(str, one.draw.items[:5].tolist()))}{', …' if len(one.draw.items) > 5 else ''})"
            for one in self.drawn
        )
