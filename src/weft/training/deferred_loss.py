"""Loss and gradient norm of an update, copied to the CPU asynchronously and read one step later.

Reading a number from a GPU waits until all queued kernels are done, and meanwhile no new ones are launched. So the GPU
decides on the update (if loss or gradient are not finite, the optimiser's kernel changes nothing), their copy to
the CPU starts at once, and the CPU reads them after it has launched the next update.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.data.batching.loader import BatchIndex, LoadedBatch
from weft.tasks.batch import Batch


@dataclass(frozen=True)
class DeferredLoss:
    """The loss and the gradient norm of a step, and the batches it was made of."""

    step: int
    loaded: list[LoadedBatch[Batch]]
    lr: float
    loss_and_norm: Tensor  # (2,): loss and gradient norm, on the CPU, valid once `ready` has happened
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, step: int, loaded: list[LoadedBatch[Batch]], lr: float, loss_and_norm: Tensor) -> "DeferredLoss":
        """Start copying loss and norm (2,) to the CPU."""
        on_cpu, ready = loss_and_norm.to("cpu", non_blocking=True), None
        if loss_and_norm.is_cuda:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(loss_and_norm.device))
        return cls(step, loaded, lr, on_cpu, ready)

    def read(self) -> tuple[float, float]:
        """Wait for the copy; return the loss and the norm."""
        if self.ready is not None:
            self.ready.synchronize()
        loss, norm = self.loss_and_norm.tolist()
        return loss, norm

    @property
    def location(self) -> str:
        """The batches and the first items in them, for messages."""
        return "; ".join(_describe(loaded.batch_index) for loaded in self.loaded)


def _describe(index: BatchIndex) -> str:
    """Return the position of a batch and its first items."""
    items = ", ".join(map(str, index.items[:5].tolist())) + (", …" if len(index.items) > 5 else "")
    return f"epoch {index.position.epoch}, batch {index.position.batch} (items {items})"
