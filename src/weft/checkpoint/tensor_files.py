"""Files of tensors (safetensors): what is read from them, and the check that it is finite."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from weft.errors import CheckpointError


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, by name. They are memory-mapped: only what is used of them is read."""
    try:
        return load_file(path)
    except (OSError, SafetensorError, MemoryError) as error:  # a file that is larger than the address space
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of a file, whose memory is not aligned: products of such memory are rounded otherwise."""
    return tensor.to(device, copy=True)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether processes hold shards of a tensor (`torch.distributed.tensor.DTensor`)."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Any) -> Tensor:
    """Return a tensor of which processes hold shards as a whole one, gathered by all of them; any other as it is."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def shard_like(tensor: Tensor, like: Any) -> Tensor:
    """Return this process's shard of a whole tensor if `like` is sharded; else a copy on its device."""
    tensor = copy_to(tensor, like.device)
    if not is_sharded(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def on_meta_device(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without data, of the same shapes and dtypes."""
    return {name: value.to("meta") for name, value in tensors.items()}


def check_finite(place: str, value: Tensor) -> None:
    """Raise CheckpointError if a tensor has NaN or infinite values; `place` names the file and the tensor.

    The sum is finite unless a value is not, or it overflows: only then are the values looked at one by one.
    """
    if not value.is_floating_point() or value.is_meta or value.sum().isfinite():
        return
    if wrong := int((~value.isfinite()).sum()):
        raise CheckpointError(
            f"{place}: {wrong:,} of its {value.numel():,} values are NaN or infinite; use another checkpoint"
        )
