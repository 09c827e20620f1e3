"""Several processes as one: what `torchrun` started, or a world of one."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from weft.errors import ConfigError


@dataclass(frozen=True)
class World:
    """This process's place among `size`."""

    rank: int
    size: int
    device: torch.device
    joined: bool = False  # whether it is for this one to take the process group down

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    def wrap(self, head: nn.Module) -> nn.Module:
        """Make gradients the mean over the world."""
        if self.size == 1:
            return head
        return DistributedDataParallel(head, device_ids=[self.device] if self.device.type == "cuda" else None)

    def sum(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Add numbers up over the world, exactly for counts below 2^53."""
        if self.size == 1:
            return dict(numbers)
        names = sorted(numbers)
        total = torch.tensor([numbers[name] for name in names], dtype=torch.float64, device=self.device)
        distributed.all_reduce(total)
        return dict(zip(names, total.tolist(), strict=True))

    def total(self, value: Tensor) -> Tensor:
        """Add a tensor up over the world, on its device: nobody waits for it."""
        if self.size > 1:
            distributed.all_reduce(value)
        return value

    def gather(self, value: Tensor) -> list[Tensor]:
        """Collect one tensor of like shape from every rank."""
        if self.size == 1:
            return [value]
        found = [torch.empty_like(value, device=self.device) for _ in range(self.size)]
        distributed.all_gather(found, value.to(self.device))
        return [one.cpu() for one in found]

    def barrier(self) -> None:
        """Wait for the others."""
        if self.size > 1:
            distributed.barrier()

    def no_sync(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Hold the gradient exchange back until the last of several backward passes."""
        if isinstance(wrapped, DistributedDataParallel) and not last:
            held: AbstractContextManager[None] = wrapped.no_sync()
            return held
        return nullcontext()


def pick_device(name: str, place: str = "train.device") -> torch.device:
    """Read `auto`, `cpu`, `cuda` or `cuda:1`."""
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()  # which a device without memory, such as meta, cannot do
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # kernels, graphs and events go to the device that is current
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{place}: {name!r} cannot be used here: {reason}; try auto or cpu") from None
    return device


def join_world(device: str) -> World:
    """Join the processes that `torchrun` started, if it did; inside a world that is joined already, stay in it."""
    here = pick_device(device)
    size, rank = _number("WORLD_SIZE", 1), _number("RANK", 0)
    joins = size > 1 and not distributed.is_initialized()
    if joins:
        # The others wait while the first evaluates, however long that takes.
        distributed.init_process_group("nccl" if here.type == "cuda" else "gloo", timeout=timedelta(days=1))
    return World(rank, size, here, joins)


def _number(name: str, least: int) -> int:
    """Read a number that `torchrun` sets."""
    text = os.environ.get(name, str(least))
    if not text.isdigit() or int(text) < least or (name != "RANK" and int(text) > 1 and "RANK" not in os.environ):
        raise ConfigError(f"{name}={text!r} in the environment is not torchrun's; unset it, or start with torchrun")
    return int(text)


def leave_world(world: World) -> None:
    """Take the process group down, if joining made it."""
    if world.joined and distributed.is_initialized():
        distributed.destroy_process_group()
