"""Averaged stochastic gradient descent: the model is the mean of what training went through, not where it stopped.

    w_{k+1} = w_k - γ g_k                          w̄ = 1 / (k - T + 1) Σ_{i=T}^{k} w_i       (Polyak & Juditsky 1992)

T is the first evaluation that is the n-th in a row without a better one, n = train.asgd_after: averaging begins where
plain SGD goes no further (NT-ASGD: Merity et al. 2018, algorithm 1; there an evaluation is held against all but the
last n before it).

Training goes on from w. What is judged, and what a checkpoint holds, is w̄; the checkpoint's optimiser then has w.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.errors import ConfigError


class ASGD(torch.optim.SGD):
    """SGD, and from `begin` on the mean of its iterates.

    The state of a parameter is `aside`, the one of w and w̄ that is not in its place, and `averaged`, how many w̄ is of.
    """

    @property
    def averages(self) -> bool:
        """Whether averaging has begun."""
        return any("aside" in own for own in self.state.values())

    def begin(self) -> None:
        """Average from here on: these weights are the first."""
        for parameter in self._parameters():
            first = parameter.detach().clone()
            self.state[parameter] |= {"aside": first, "averaged": torch.ones((), device=first.device)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make an update, and count it in; one that `found_inf` holds back is not counted."""
        super().step(closure)
        if not self.averages:
            return
        iterates, means = self._parameters(), self._state("aside")
        counts, stuck = self._state("averaged"), getattr(self, "found_inf", None)
        made = torch.ones_like(counts[0]) if stuck is None else 1 - stuck.to(counts[0])
        torch._foreach_add_(counts, made)
        apart = torch._foreach_sub(iterates, means)
        torch._foreach_mul_(apart, made / counts[0])
        torch._foreach_add_(means, apart)

    @torch.no_grad()
    def swap(self) -> None:
        """Put the mean in the place of the last iterate, or back."""
        inside, aside = self._parameters(), self._state("aside")
        held = [one.clone() for one in inside]
        torch._foreach_copy_(inside, aside)
        torch._foreach_copy_(aside, held)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _state(self, key: str) -> list[Tensor]:
        return [self.state[parameter][key] for parameter in self._parameters()]


def check(optimizer: torch.optim.Optimizer, judged: bool) -> None:
    """Refuse a run in which averaging could never begin."""
    if isinstance(optimizer, ASGD) and not judged:
        raise ConfigError(
            "train.optimizer: asgd begins to average by what evaluations find, but there is no validation data; give "
            "data.valid, or take sgd"
        )


@contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let the weights be their mean while they are judged or saved, if they are averaged."""
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
    """Say whether averaging begins now, `stale` evaluations after the best."""
    return isinstance(optimizer, ASGD) and not optimizer.averages and stale >= after


def resumed(optimizer: torch.optim.Optimizer) -> None:
    """Go on from the last iterate: a checkpoint's weights are the mean."""
    if isinstance(optimizer, ASGD) and optimizer.averages:
        optimizer.swap()
