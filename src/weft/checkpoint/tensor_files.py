"""Files of tensors (safetensors): what is read from them, and the check that it is finite."""

from collections.abc import Mapping
from pathlib import Path

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
