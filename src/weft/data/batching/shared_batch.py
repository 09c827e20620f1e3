"""The tensors of a batch in one block of memory, as a loader's process hands it over to the trainer.

A tensor that goes from one process to another costs the receiver a file descriptor, a connection to the sender and a
mapping; a batch has up to 16 of them. In one block they cost it once, and one copy makes all of them page-locked.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

B = TypeVar("B")
ALIGNMENT = 64  # bytes: a cache line


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor in the block."""

    start: int  # in bytes
    shape: torch.Size
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape) * self.dtype.itemsize

    def view(self, block: Tensor) -> Tensor:
        """Return the tensor, a view of the block."""
        return block[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class SharedBatch(Generic[B]):
    """A batch, a dataclass of tensors and of such dataclasses, whose tensors lie in one block."""

    block: Tensor  # uint8
    skeleton: B  # with a slot in the place of each tensor

    @classmethod
    def of(cls, batch: B) -> "SharedBatch[B]":
        """Copy the tensors of a batch into a block."""
        slots: list[_Slot] = []
        tensors: list[Tensor] = []

        def allocate(tensor: Tensor) -> _Slot:
            start = -(-slots[-1].stop // ALIGNMENT) * ALIGNMENT if slots else 0
            tensors.append(tensor)
            slots.append(_Slot(start, tensor.shape, tensor.dtype))
            return slots[-1]

        skeleton = _replace_leaves(batch, Tensor, allocate)
        block = torch.empty(slots[-1].stop if slots else 0, dtype=torch.uint8)
        for slot, tensor in zip(slots, tensors, strict=True):
            slot.view(block).copy_(tensor)
        return cls(block, skeleton)

    def unpack(self) -> B:
        """Return the batch; its tensors are views of the block."""
        return cast(B, _replace_leaves(self.skeleton, _Slot, lambda slot: slot.view(self.block)))

    def pin_memory(self) -> "SharedBatch[B]":
        """Return a copy in page-locked memory, from which copies to a GPU overlap with its work."""
        return replace(self, block=self.block.pin_memory())


def _replace_leaves(value: Any, kind: type[Any], new: Callable[[Any], Any]) -> Any:
    """Return a dataclass with new values in place of those of a kind, those of its own dataclasses included."""
    if isinstance(value, kind):
        return new(value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(
        value, **{field.name: _replace_leaves(getattr(value, field.name), kind, new) for field in fields(value)}
    )
