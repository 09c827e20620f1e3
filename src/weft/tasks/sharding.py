"""Evaluation shared by the processes of a training: each computes some of the batches, and all get the whole result.

Inside `shared_by(rank, size, device)` a task's loop over its batches takes `share(batches)`, and joins what the
processes have computed by `sum_over_ranks` or `gather`. Outside there is one process, which has it all. A task that
does neither is right as well: each process then computes everything.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True)
class _Ranks:
    """The rank of this process among those that share an evaluation, their number, and the device they talk over."""

    rank: int
    size: int
    device: torch.device


_ALONE = _Ranks(0, 1, torch.device("cpu"))
_ranks: ContextVar[_Ranks] = ContextVar("ranks", default=_ALONE)


@contextmanager
def shared_by(rank: int, size: int, device: torch.device) -> Iterator[None]:
    """Context in which evaluations are shared by the `size` processes of the default process group."""
    token = _ranks.set(_Ranks(rank, size, device))
    try:
        yield
    finally:
        _ranks.reset(token)


def num_ranks() -> int:
    """Return the number of processes that share an evaluation."""
    return _ranks.get().size


def share(parts: S) -> S:
    """Return the parts, of a sequence or an array, that this process computes: one of every `num_ranks()`."""
    ranks = _ranks.get()
    own: S = parts[ranks.rank :: ranks.size]  # type: ignore[index]
    return own


def iterate_share(parts: Iterator[T]) -> Iterator[T]:
    """Yield the parts of a stream that this process computes."""
    return islice(parts, _ranks.get().rank, None, _ranks.get().size)


def gather(value: Any) -> list[Any]:
    """Return the values of all processes in the order of their ranks; a value is plain data, sent as JSON."""
    ranks = _ranks.get()
    if ranks.size == 1:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(ranks.device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=ranks.device) for _ in range(ranks.size)]
    distributed.all_gather(sizes, torch.tensor([len(data)], device=ranks.device))
    longest = max(int(size) for size in sizes)
    padded = [data.new_empty(longest) for _ in range(ranks.size)]
    distributed.all_gather(padded, torch.cat([data, data.new_zeros(longest - len(data))]))
    return [json.loads(part[: int(size)].cpu().numpy().tobytes()) for part, size in zip(padded, sizes, strict=True)]


def interleave(parts: Sequence[Sequence[T]]) -> list[T]:
    """Return the parts of `share` in their order, given those of each rank."""
    whole: list[Any] = [None] * sum(map(len, parts))
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole


def add_up(sums: Mapping[str, float]) -> dict[str, float]:
    """Return sums by name, added up over the processes; one may lack names that others have."""
    total: dict[str, float] = {}
    for part in gather(dict(sums)):
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total


def sum_over_ranks(value: Tensor) -> Tensor:
    """Return a tensor of one shape everywhere, summed over the processes."""
    ranks = _ranks.get()
    if ranks.size == 1:
        return value
    total = value.to(ranks.device, copy=True)
    distributed.all_reduce(total)
    return total.to(value.device)
