"""Per-process state beside the weights: random number generators and the carried recurrent state.

A checkpoint holds it for all processes, under names that end in the rank. With it a run resumes exactly, if the number
of processes is the same.
"""

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

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


def restore_rng_state(states: Mapping[str, Tensor], world: World) -> bool:
    """Restore this rank's generator states; return False, changing nothing, if the number of processes differs."""
    if f"cpu.{world.size - 1}" not in states or f"cpu.{world.size}" in states:
        return False
    torch.set_rng_state(states[f"cpu.{world.rank}"])
    if world.device.type == "cuda" and f"cuda.{world.rank}" in states:
        torch.cuda.set_rng_state(states[f"cuda.{world.rank}"], world.device)
    return True


def gather_hidden_states(parts: Sequence[Tensor], world: World) -> dict[str, Tensor]:
    """Return the carried recurrent state of all ranks, as `<part>.<rank>`."""
    return _gather_all({str(index): part.contiguous() for index, part in enumerate(parts)}, world)


def _gather_all(local: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    gathered = ((name, world.gather(value)) for name, value in local.items())
    return {f"{name}.{rank}": value for name, values in gathered for rank, value in enumerate(values)}
