"""Losses as sums: the trainer divides by counts summed over ranks and accumulation steps."""

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy_sum(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Sum -log p(target) over (N, V) logits, in float32 at least; `smoothing` as in Szegedy et al. 2016, section 7."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(exact, targets, reduction="sum", label_smoothing=smoothing)
