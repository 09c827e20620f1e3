"""Distributed data-parallel training: the processes that `torchrun` started, or a single one."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed

from weft.errors import ConfigError, nearest
from weft.tasks.sharding import shared_by

_DEVICE_WORDS = {"gpu": "cuda", "nvidia": "cuda", "processor": "cpu"}  # what a device is also called


_exchanges = 0  # what this process has done together with the others, or has begun to


def beat() -> None:
    """Count an exchange that this process comes to."""
    global _exchanges
    _exchanges += 1


def count_exchanges() -> int:
    """Return how many exchanges with the others this process has come to."""
    return _exchanges


@dataclass(frozen=True)
class World:
    """The rank of this process, the number of processes, and the device."""

    rank: int
    size: int
    device: torch.device
    joined: bool = False  # whether `leave_world` destroys the process group

    @property
    def joined_group(self) -> bool:
        """Return whether this process is one of several that talk to each other."""
        return self.size > 1 and distributed.is_initialized()

    @property
    def main(self) -> bool:
        """Return whether this is the process that writes and reports."""
        return self.rank == 0

    def sum(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return each number summed over the ranks (all-reduce in float64: exact for counts below 2^53)."""
        if self.size == 1:
            return dict(numbers)
        beat()
        names = sorted(numbers)
        total = torch.tensor([numbers[name] for name in names], dtype=torch.float64, device=self.device)
        distributed.all_reduce(total)
        return dict(zip(names, total.tolist(), strict=True))

    def total(self, value: Tensor) -> Tensor:
        """Sum a tensor over the ranks in place, on its device and without synchronisation; return it."""
        if self.size > 1:
            beat()
            distributed.all_reduce(value)
        return value

    def broadcast(self, value: Tensor) -> None:
        """Overwrite a tensor, on any device and of any dtype, by that of the main rank."""
        if self.size > 1 and value.numel():
            sent = value.to(self.device).reshape(-1).contiguous()
            distributed.broadcast(sent.view(torch.uint8), 0)  # gloo has not all dtypes
            value.copy_(sent.view(value.shape))

    def gather(self, value: Tensor) -> list[Tensor]:
        """Return copies of the tensors of all ranks, in order, on the CPU; all have one shape."""
        if self.size == 1:
            return [value.to("cpu", copy=True)]
        beat()
        gathered = [torch.empty_like(value, device=self.device) for _ in range(self.size)]
        distributed.all_gather(gathered, value.to(self.device))
        return [tensor.cpu() for tensor in gathered]

    def sharing(self) -> AbstractContextManager[None]:
        """Return a context in which the ranks share each evaluation."""
        return shared_by(self.rank, self.size, self.device)

    def barrier(self) -> None:
        """Wait for the other ranks."""
        if self.size > 1:
            beat()
            distributed.barrier()


def pick_device(name: str, place: str = "train.device") -> torch.device:
    """Return the device of a name (`auto`, `cpu`, `cuda`, `cuda:1`), checked; `place` is its key in errors.

    Of several processes on a machine, each has the GPU of its number.
    """
    local_rank, gpus = os.environ.get("LOCAL_RANK", ""), torch.cuda.device_count()
    if name == "auto" and not gpus:
        name = "cpu"
    elif name == "auto" or (name == "cuda" and local_rank and gpus):
        name = f"cuda:{local_rank or 0}"
        if local_rank.isdigit() and int(local_rank) >= gpus:
            raise ConfigError(
                f"{place}: there is no GPU for process {local_rank} of this machine, which has {gpus}; start as many "
                "processes as GPUs"
            )
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()  # fails on a device without memory, such as meta
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # kernels, graphs and events use the current device
    except (RuntimeError, AssertionError) as error:
        near = _nearest_device(name)
        reason = f"there is no such device (did you mean {near!r}?)" if near else str(error).splitlines()[0]
        raise ConfigError(f"{place}: {name!r} cannot be used here: {reason}; try auto or cpu") from None
    return device


def _nearest_device(name: str) -> str | None:
    """Return the device that an unknown name stands for or resembles; None for PyTorch's own names."""
    kind = name.partition(":")[0].lower()
    try:
        torch.device(kind)
    except RuntimeError:
        return _DEVICE_WORDS.get(kind) or nearest(kind, ("auto", "cpu", "cuda"))
    return kind if kind != name.partition(":")[0] else None


def join_world(device: str, timeout: float = 1800.0) -> World:
    """Join the process group of `torchrun`, if there is one and this process has not joined it already.

    `timeout` is that of `train.rank_timeout`: an exchange may take longer by as much as its watch needs to see it.
    """
    size, rank = _read_env("WORLD_SIZE", 1), _read_env("RANK", 0)
    if _read_env("LOCAL_WORLD_SIZE", 1) > 1 and device.startswith("cuda:"):
        raise ConfigError(
            f"train.device: {device!r} is one GPU, but several processes train on this machine; set it to auto, so "
            "that each has its own"
        )
    picked = pick_device(device)
    joins = size > 1 and not distributed.is_initialized()
    if joins:
        limit = timedelta(seconds=2 * timeout + 60)  # `weft.training.heartbeat` names who hangs before
        backend, gpu = ("nccl", picked) if picked.type == "cuda" else ("gloo", None)
        distributed.init_process_group(backend, timeout=limit, device_id=gpu)
    return World(rank, size, picked, joins)


def _read_env(name: str, minimum: int) -> int:
    """Return the integer of an environment variable that `torchrun` sets; `minimum` if it is not set."""
    text = os.environ.get(name, str(minimum))
    if not text.isdigit() or int(text) < minimum or (name != "RANK" and int(text) > 1 and "RANK" not in os.environ):
        raise ConfigError(f"{name}={text!r} in the environment is not torchrun's; unset it, or start with torchrun")
    return int(text)


def leave_world(world: World) -> None:
    """Destroy the process group, if `join_world` created it."""
    if world.joined and distributed.is_initialized():
        distributed.destroy_process_group()
