"""The losses and the gradient norm of an update, copied to the CPU asynchronously and read one step later.

Reading a number from a GPU waits until all queued kernels are done, and meanwhile no new ones are launched. So the GPU
decides on the update (if loss or gradient are not finite, the optimiser's kernel changes nothing), their copy to
the CPU starts at once, and the CPU reads them after it has launched the next update.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.data.batching.loader import BatchIndex, LoadedBatch
from weft.tasks.batch import Batch


@dataclass(frozen=True)
class DeferredLoss:
    """The losses and the gradient norm of a step, and the batches that it was made of on this process."""

    step: int
    loaded: list[LoadedBatch[Batch]]
    lr: float
    numbers: Tensor  # loss and gradient norm of all, and the loss of each batch; on the CPU, once `ready` has happened
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, step: int, loaded: list[LoadedBatch[Batch]], lr: float, numbers: Tensor) -> "DeferredLoss":
        """Start copying the numbers (2 + batches,) to the CPU."""
        on_cpu, ready = numbers.to("cpu", non_blocking=True), None
        if numbers.is_cuda:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(numbers.device))
        return cls(step, loaded, lr, on_cpu, ready)

    def read(self) -> tuple[float, float]:
        """Wait for the copy; return the loss and the norm."""
        if self.ready is not None:
            self.ready.synchronize()
        loss, norm = self.numbers[:2].tolist()
        return loss, norm

    @property
    def places(self) -> tuple[str, str]:
        """The batches whose own loss is not finite, and all of this process, for messages."""
        losses = self.numbers[2:].tolist()
        bad = [loaded for loaded, loss in zip(self.loaded, losses, strict=True) if not math.isfinite(loss)]
        return _describe_all(bad), _describe_all(self.loaded)


def _describe_all(batches: Sequence[LoadedBatch[Batch]]) -> str:
    return "; ".join(_describe(loaded.batch_index) for loaded in batches)


def _describe(index: BatchIndex) -> str:
    """Return the position of a batch and its first items."""
    items = ", ".join(map(str, index.items[:5].tolist())) + (", …" if len(index.items) > 5 else "")
    return f"epoch {index.position.epoch}, batch {index.position.batch} (items {items})"
