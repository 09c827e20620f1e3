"""The optimizer's state in a checkpoint: state/optimizer.safetensors, each tensor by its key and its parameter."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from weft.checkpoint.tensor_files import check_finite, read_tensors, shard_like
from weft.errors import CheckpointError

OPTIMIZER_FILE = "state/optimizer.safetensors"
SCALARS = {"step", "averaged"}  # counts of updates; all other state has the parameter's shape
SQUARES = {"exp_avg_sq", "sum"}  # means and sums of squares: never negative


def _state_keys(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Return the keys of the state that a parameter has once it was updated."""
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return frozenset({"step", "exp_avg", "exp_avg_sq"})
    if isinstance(optimizer, torch.optim.Adagrad):
        return frozenset({"step", "sum"})
    return frozenset({"aside", "averaged"})  # of averaged SGD, once averaging has begun


def optimizer_tensors(optimizer: torch.optim.Optimizer, head: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's state by key and parameter: `exp_avg.body.encoder.embed.weight`."""
    tensors = {}
    for name, parameter in head.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{name}"] = torch.as_tensor(value).detach().contiguous()
    return tensors


def load_optimizer(folder: Path, optimizer: torch.optim.Optimizer, head: nn.Module, step: int) -> None:
    """Load the state that was saved at `step` into an optimizer; state that does not fit is an error that names it."""
    path, parameters = folder / OPTIMIZER_FILE, dict(head.named_parameters())
    tensors, keys = read_tensors(path), _state_keys(optimizer)
    stateless = isinstance(optimizer, torch.optim.SGD)  # until averaging starts
    if not tensors and not stateless and step:
        raise CheckpointError(f"{path}: is empty; use another checkpoint")
    states: dict[str, dict[str, Tensor]] = {}
    for full, value in tensors.items():
        key, _, name = full.partition(".")
        if name not in parameters or key not in keys:
            raise CheckpointError(f"{path}: {full}: the optimizer has no such state; use another checkpoint")
        _check_state(f"{path}: {full}", key, value, parameters[name])
        states.setdefault(name, {})[key] = value
    _check_complete(path, states, keys)
    for name, state in states.items():
        # Adam's fused kernel needs its step on the parameter's device.
        parameter = parameters[name]
        optimizer.state[parameter] |= {key: shard_like(value, parameter) for key, value in state.items()}


def _check_state(place: str, key: str, value: Tensor, parameter: nn.Parameter) -> None:
    """Raise CheckpointError unless shape, dtype and values are such as an optimizer writes."""
    expected = (torch.Size(), torch.float32) if key in SCALARS else (parameter.shape, parameter.dtype)
    if (value.shape, value.dtype) != expected:
        shape, dtype = expected
        raise CheckpointError(
            f"{place} must be {tuple(shape)} of {dtype}, but is {tuple(value.shape)} of {value.dtype} instead; "
            "use another checkpoint"
        )
    check_finite(place, value)
    if key in SCALARS | SQUARES and value.numel() and value.min() < 0:
        raise CheckpointError(f"{place}: must not be negative, but is {float(value.min()):g}; use another checkpoint")


def _check_complete(path: Path, states: Mapping[str, Mapping[str, Tensor]], keys: frozenset[str]) -> None:
    """Raise CheckpointError if a parameter has a part of its state only."""
    for name, state in states.items():
        if missing := sorted(keys - state.keys()):
            raise CheckpointError(f"{path}: lacks {missing[0]}.{name}; use another checkpoint")
