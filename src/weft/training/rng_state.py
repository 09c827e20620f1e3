"""What each process has of its own beside the weights: where its random numbers stand, and what it carries on.

A checkpoint holds it for all of them, by names that end in the process's rank. With it a run goes on exactly, if there
are as many processes as there were.
"""

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.training.distributed import World


def seed_all(seed: int, world: World, deterministic: bool = False) -> None:
    """Seed what draws at random; each rank draws its own dropout."""
    torch.manual_seed(seed * 1_000_003 + world.rank)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def random_states(world: World) -> dict[str, Tensor]:
    """Say where the random numbers of every rank stand."""
    states = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    return _of_all(states, world)


def go_on_drawing(random: Mapping[str, Tensor], world: World) -> bool:
    """Draw on from where this rank stood; say whether it could: not where there were more processes, or fewer."""
    if f"cpu.{world.size - 1}" not in random or f"cpu.{world.size}" in random:
        return False
    torch.set_rng_state(random[f"cpu.{world.rank}"])
    if world.device.type == "cuda" and f"cuda.{world.rank}" in random:
        torch.cuda.set_rng_state(random[f"cuda.{world.rank}"], world.device)
    return True


def carried_parts(parts: Sequence[Tensor], world: World) -> dict[str, Tensor]:
    """Name what every rank carries on to its next batch, part by part."""
    return _of_all({str(number): part.contiguous() for number, part in enumerate(parts)}, world)


def _of_all(own: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    gathered = ((name, world.gather(value)) for name, value in own.items())
    return {f"{name}.{rank}": value for name, values in gathered for rank, value in enumerate(values)}
