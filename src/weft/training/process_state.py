"""Per-process state beside the weights: random number generators and the carried recurrent state.

A checkpoint holds it for all processes, under names that end in the rank. With it a run resumes exactly, if the number
of processes is the same.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.checkpoint import contents
from weft.data.batching.lm_stream import BPTTSegments, SpanSampler
from weft.errors import CheckpointError
from weft.tasks.base import Task
from weft.tasks.head import Head
from weft.training.distributed import World


def seed_all(seed: int, world: World, deterministic: bool = False) -> None:
    """Seed the random number generators; each rank draws its own dropout masks."""
    torch.manual_seed(seed * 1_000_003 + world.rank)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def gather_rng_states(world: World) -> dict[str, Tensor]:
    """Return the generator states of all ranks, as `cpu.<rank>` and `cuda.<rank>`."""
    states = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    return _gather_all(states, world)


def restore_rng_state(states: Mapping[str, Tensor], world: World, path: Path) -> bool:
    """Restore this rank's generator states, of the file `path`.

    Return False, changing nothing, if the number of processes differs.
    """
    if f"cpu.{world.size - 1}" not in states or f"cpu.{world.size}" in states:
        return False
    try:
        torch.set_rng_state(states[f"cpu.{world.rank}"])
        if world.device.type == "cuda" and f"cuda.{world.rank}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{world.rank}"], world.device)
    except (RuntimeError, TypeError, KeyError) as error:  # another shape or dtype, or no state of a generator
        raise CheckpointError(
            f"{path}: holds no state of a random generator: {error}; use another checkpoint"
        ) from None
    return True


def gather_hidden_states(parts: Sequence[Tensor], world: World) -> dict[str, Tensor]:
    """Return the carried recurrent state of all ranks, as `<part>.<rank>`."""
    return _gather_all({str(index): part.contiguous() for index, part in enumerate(parts)}, world)


def load_carry(
    folder: Path, head: Head, task: Task, sampler: SpanSampler | None, world: World, bf16: bool = False
) -> Any:
    """Return the carried state of this rank's streams; None without one.

    Its shapes and dtypes are compared with those after one token of each stream: a recurrent kernel trusts them.
    """
    parts = contents.load_hidden_states(folder, world.rank, world.device)
    if not parts or not isinstance(sampler, BPTTSegments):
        return None
    batch = task.collate([sampler.stream.item(0, 1)] * sampler.rows, np.random.default_rng(0)).to(world.device)
    devices = [world.device] if world.device.type == "cuda" else []
    autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=bf16)
    with torch.no_grad(), autocast, torch.random.fork_rng(devices):
        expected = head.carry_tensors(head(batch)[1])
    if [(part.shape, part.dtype) for part in parts] != [(part.shape, part.dtype) for part in expected]:
        raise CheckpointError(
            f"{folder / contents.CARRIED_FILE}: does not fit the model and its batches; use another checkpoint"
        )
    return head.carry_from_tensors(parts)


def _gather_all(local: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    gathered = ((name, world.gather(value)) for name, value in local.items())
    return {f"{name}.{rank}": value for name, values in gathered for rank, value in enumerate(values)}
