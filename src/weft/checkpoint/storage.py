"""Compact storage of weights: int8 rows with a scale for each, or bfloat16; a model that loads them has float32 again.

A matrix W of float32 is stored as Q = round(W / s), int8, with s = max|W| / 127 for each row: the tensor `name` and its
scales, float32, as `name::scale`. Vectors and scalars are stored in bfloat16. What is no float is stored as it is.
A weight that is read back differs by at most half a scale.

Weights that equal those of a model that ships with weft need not be stored at all: the file's metadata name that model
(`base`) and the weights that are read from it (`inherited`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.errors import CheckpointError, ConfigError, did_you_mean
from weft.zoo import bundled_models, find_bundled

Storage = Literal["fp32", "bf16", "int8"]
SCALE = "::scale"
LARGEST = 127


def check_storage(storage: str) -> None:
    """Raise an error for a storage that is not known."""
    if storage not in get_args(Storage):
        raise ConfigError(f"storage: must be {', '.join(get_args(Storage))}, but is {storage!r} instead")


def compress(tensors: Mapping[str, Tensor], storage: Storage) -> dict[str, Tensor]:
    """Return weights as they are stored, by name, with the scales of int8 rows beside them."""
    if storage == "fp32":
        return dict(tensors)
    compressed: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value.dtype != torch.float32:
            compressed[name] = value
        elif storage == "int8" and value.ndim >= 2:
            compressed[name], compressed[name + SCALE] = _quantize_rows(value)
        else:
            compressed[name] = value.to(torch.bfloat16)
    return compressed


def expand(tensors: Mapping[str, Tensor], place: str) -> dict[str, Tensor]:
    """Return stored weights by name, int8 rows in float32; `place` is the file, for errors."""
    expanded: dict[str, Tensor] = {}
    for name, value in tensors.items():
        scale = tensors.get(name + SCALE)
        if scale is not None:
            expanded[name] = _dequantize_rows(value, scale, f"{place}: {name}")
        elif name.endswith(SCALE):
            if name.removesuffix(SCALE) not in tensors:
                raise CheckpointError(f"{place}: {name}: the weights that it scales are missing; copy the file again")
        else:
            expanded[name] = value
    return expanded


def _quantize_rows(value: Tensor) -> tuple[Tensor, Tensor]:
    rows = value.reshape(len(value), -1)
    scale = rows.abs().amax(1) / LARGEST if rows.numel() else rows.new_zeros(len(rows))
    divisor = torch.where(scale > 0, scale, 1.0)
    return (rows / divisor[:, None]).round().to(torch.int8).reshape(value.shape), scale


def _dequantize_rows(value: Tensor, scale: Tensor, place: str) -> Tensor:
    if value.dtype != torch.int8 or scale.dtype != torch.float32 or value.ndim < 2 or scale.shape != value.shape[:1]:
        raise CheckpointError(
            f"{place}: must be int8 with a float32 scale for each row, but is {value.dtype} {tuple(value.shape)} with "
            f"{scale.dtype} {tuple(scale.shape)} instead; copy the file again"
        )
    return value.float() * scale.reshape(-1, *[1] * (value.ndim - 1))


def leave_out(
    tensors: Mapping[str, Tensor], inherited: Mapping[str, Tensor], base: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the weights that differ from those of the model `base`, and the metadata that name it and the others."""
    equal = [
        name
        for name, value in tensors.items()
        if name in inherited and torch.equal(value.cpu(), inherited[name].float())
    ]
    if not equal:
        raise ConfigError(f"base: not one weight equals one of {base}; leave it out")
    own = {name: value for name, value in tensors.items() if name not in equal}
    return own, {"base": base, "inherited": " ".join(equal)}


def left_out(path: Path) -> tuple[str | None, list[str]]:
    """Return the model that the rest of a file's weights come from, None if the file has all, and their names."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError, MemoryError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    return metadata.get("base"), metadata.get("inherited", "").split()


def bundled_model(name: str, place: str) -> Path:
    """Return the folder of a model that ships with weft; raise an error for any other name."""
    folder = find_bundled(name)
    if folder is None:
        raise CheckpointError(f"{place}: {name!r} does not ship with weft; {did_you_mean(name, bundled_models())}")
    return folder
