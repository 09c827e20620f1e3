"""Muon: momentum whose direction is orthogonalised, for the matrices of hidden layers (Jordan et al. 2024).

    M_t = μ M_{t-1} + (1 - μ) G_t                     U_t = (1 - μ) G_t + μ M_t                     (Nesterov)
    O_t = NS(U_t) ≈ (U_t U_tᵀ)^{-1/2} U_t             five steps of a quintic Newton-Schulz iteration
    W_t = W_{t-1} - γ (0.2 sqrt(max(a, b)) O_t + λ W_{t-1})                 W is a x b

The factor 0.2 sqrt(max(a, b)) gives an update the size that AdamW's has, so that a learning rate and a weight decay for
AdamW fit (Liu et al. 2025, *Muon is scalable for LLM training*, section 2.2). All other parameters (embeddings, output
projections, what the task adds, biases and norms) are AdamW's, as in both papers.

Matrices of one shape are orthogonalised together, where `torch.optim.Muon` goes one by one.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the iteration: a steep slope at zero, singular values end in (0.7, 1.2)
ITERATIONS = 5
EPS = 1e-7


class Muon(torch.optim.AdamW):
    """Muon for the parameter groups with `orthogonal` set, AdamW for the others.

    The state of a parameter of the former is its `momentum_buffer`.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make an update; one whose `found_inf` is 1 changes neither weights nor state."""
        groups = self.param_groups
        for group in groups:
            if group["orthogonal"]:
                self._update(group)
        self.param_groups = [group for group in groups if not group["orthogonal"]]
        super().step(closure)
        self.param_groups = groups

    def _update(self, group: dict[str, Any]) -> None:
        """Update the matrices of a group, those of one shape together."""
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_shape.setdefault(parameter.shape, []).append(parameter)
        for shape, parameters in by_shape.items():
            scale = self._scale(parameters[0].device)
            updates = orthogonalize(self._momentum(parameters, scale))
            size = 0.2 * math.sqrt(max(shape))
            torch._foreach_mul_(parameters, 1 - scale * group["lr"] * group["weight_decay"])
            torch._foreach_sub_(parameters, (updates * (scale * group["lr"] * size)).to(parameters[0]).unbind())

    def _scale(self, device: torch.device) -> Tensor:
        """Return 1, or 0 for an update that is skipped."""
        skipped = getattr(self, "found_inf", None)
        return torch.ones((), device=device) if skipped is None else 1 - skipped.to(device)

    def _momentum(self, parameters: Sequence[Tensor], scale: Tensor) -> Tensor:
        """Update the momentum of matrices of one shape; return the directions (n, a, b) of their updates."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradients = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None])
        gradients = gradients.where(scale > 0, 0)
        momentum = torch.stack(buffers)
        momentum = momentum.lerp(gradients, (1 - MOMENTUM) * scale)
        torch._foreach_copy_(buffers, momentum.unbind())
        return gradients.lerp(momentum, MOMENTUM)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices (n, a, b) with their singular vectors, and singular values near 1.

    It is computed in bf16 on a GPU, whose rounding the iteration bears, and in the matrices' own type on a CPU.
    """
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    x = wide.bfloat16() if wide.is_cuda else wide
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)  # the largest singular value is 1 at most
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrices else x.mT
