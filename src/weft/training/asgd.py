"""Averaged stochastic gradient descent (ASGD): the model is the mean of the iterates, not the last one.

    w_{k+1} = w_k - γ g_k                          w̄ = 1 / (k - T + 1) Σ_{i=T}^{k} w_i       (Polyak & Juditsky 1992)

T is the first evaluation that is the n-th in a row without a better one, n = train.asgd_after: averaging begins when
plain SGD no longer improves (NT-ASGD: Merity et al. 2018, algorithm 1; there an evaluation is compared with all but the
last n before it).

Training continues from w. Evaluation uses w̄, and so does a checkpoint; the checkpoint's optimiser state then holds w.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.errors import ConfigError


class ASGD(torch.optim.SGD):
    """SGD that from `begin` on keeps the mean of its iterates.

    The state of a parameter is `aside`, the one of w and w̄ that the parameter does not hold, and `averaged`, the number
    of iterates in w̄.
    """

    @property
    def averages(self) -> bool:
        """Return whether averaging has begun."""
        return any("aside" in state for state in self.state.values())

    def begin(self) -> None:
        """Begin to average: the current weights are the first iterate."""
        for parameter in self._parameters():
            first = parameter.detach().clone()
            self.state[parameter] |= {"aside": first, "averaged": torch.ones((), device=first.device)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make an update and include it in the mean; one that `found_inf` skips is not included."""
        super().step(closure)
        if not self.averages:
            return
        iterates, means = self._parameters(), self._state("aside")
        counts, skipped = self._state("averaged"), getattr(self, "found_inf", None)
        updated = torch.ones_like(counts[0]) if skipped is None else 1 - skipped.to(counts[0])  # 1 or 0
        torch._foreach_add_(counts, updated)
        differences = torch._foreach_sub(iterates, means)
        torch._foreach_mul_(differences, updated / counts[0])
        torch._foreach_add_(means, differences)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the mean and the last iterate between parameters and state."""
        parameters, aside = self._parameters(), self._state("aside")
        copies = [parameter.clone() for parameter in parameters]
        torch._foreach_copy_(parameters, aside)
        torch._foreach_copy_(aside, copies)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _state(self, key: str) -> list[Tensor]:
        return [self.state[parameter][key] for parameter in self._parameters()]


def check(optimizer: torch.optim.Optimizer, evaluates: bool) -> None:
    """Refuse a run without evaluations, in which averaging could never begin."""
    if isinstance(optimizer, ASGD) and not evaluates:
        raise ConfigError(
            "train.optimizer: asgd begins to average by what evaluations find, but there is no validation data; give "
            "data.valid, or take sgd"
        )


@contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Set the parameters to their mean inside the context, for evaluation and checkpoints, if averaging has begun."""
    swaps = isinstance(optimizer, ASGD) and optimizer.averages
    if not swaps:
        yield
        return
    optimizer.swap()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimizer.swap()  # type: ignore[attr-defined]


def due(optimizer: torch.optim.Optimizer, stale: int, after: int) -> bool:
    """Return whether averaging begins now, `stale` evaluations after the best."""
    return isinstance(optimizer, ASGD) and not optimizer.averages and stale >= after


def resumed(optimizer: torch.optim.Optimizer) -> None:
    """Set the parameters to the last iterate after loading a checkpoint, whose weights are the mean."""
    if isinstance(optimizer, ASGD) and optimizer.averages:
        optimizer.swap()
