"""State beside the weights: random number generators, and the recurrent state that is carried from batch to batch.

What is random in a batch, masks and dropout alike, is a function of the seed and of the batch's position: it does not
depend on the process that computes it, nor on what it computed before. The batches of an update are parallel streams,
each with a carried state of its own, named by the stream. So a run resumes exactly with any number of processes.
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
from weft.data.batching.loader import Position
from weft.errors import CheckpointError
from weft.tasks.base import Task
from weft.tasks.head import Head
from weft.training.distributed import World


def seed_all(seed: int, world: World, deterministic: bool = False) -> None:
    """Seed the random number generators; each rank has its own numbers."""
    torch.manual_seed(seed * 1_000_003 + world.rank)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def seed_batch(seed: int, position: Position, device: torch.device) -> None:
    """Seed the generators that draw the dropout of the batch at a position."""
    number = int(np.random.SeedSequence((seed, *position)).generate_state(1, np.uint64)[0])
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


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


def gather_hidden_states(streams: Sequence[Sequence[Tensor]], world: World) -> dict[str, Tensor]:
    """Return the carried recurrent states of all streams, as `<part>.<stream>`: rank r has streams r, r + ranks, …."""
    gathered: dict[str, Tensor] = {}
    for number, parts in enumerate(streams):
        for index, part in enumerate(parts):
            for rank, value in enumerate(world.gather(part.contiguous())):
                gathered[f"{index}.{rank + number * world.size}"] = value
    return gathered


def load_carry(
    folder: Path, head: Head, task: Task, sampler: SpanSampler | None, world: World, stream: int, bf16: bool = False
) -> Any:
    """Return the carried state of a stream of batches; None without one.

    Its shapes and dtypes are compared with those after one token of each stream: a recurrent kernel trusts them.
    """
    parts = contents.load_hidden_states(folder, stream, world.device)
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
