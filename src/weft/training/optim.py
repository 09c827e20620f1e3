"""Optimisers and schedules.

A schedule is a function of the step and of the share of the budget that is spent, so it has no state to save:

    constant        1
    warmup-linear   (1 - p) / (1 - p_w)                  falls to nothing at the end (Devlin et al. 2019)
    cosine          (1 + cos π (p - p_w) / (1 - p_w)) / 2        (Loshchilov & Hutter 2017)
    inverse-sqrt    sqrt(warmup / step)                  (Vaswani et al. 2017, section 5.3, scaled to a peak of 1)
    exponential     decay ^ p

each times min(1, step / warmup): the warm-up is part of all of them.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from weft.config.schema import Train
from weft.training.asgd import ASGD


def make_optimizer(
    module: nn.Module, train: Train, rates: Mapping[nn.Parameter, float] | None = None
) -> torch.optim.Optimizer:
    """Build the recipe's optimiser for what learns; `rates` are factors of the learning rate, 1 where there is none."""
    groups = _groups(module, train, rates or {})
    if train.optimizer == "adagrad":
        return torch.optim.Adagrad(groups, lr=train.lr, foreach=True)
    if train.optimizer in ("sgd", "asgd"):
        plain = torch.optim.SGD if train.optimizer == "sgd" else ASGD
        return plain(groups, lr=train.lr, fused=True)
    kind = torch.optim.AdamW if train.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=train.lr, betas=train.betas, fused=True)


def _groups(module: nn.Module, train: Train, rates: Mapping[nn.Parameter, float]) -> list[dict[str, Any]]:
    """Put together what learns at one rate; vectors (biases, norms) are spared weight decay."""
    found: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for one in module.parameters():
        if one.requires_grad:
            found.setdefault((rates.get(one, 1.0), one.ndim > 1), []).append(one)
    return [
        {"params": some, "weight_decay": train.weight_decay if decays else 0.0, "factor": factor}
        for (factor, decays), some in found.items()
    ]


def warmup_steps(train: Train) -> float:
    """The warm-up in steps, where it is not a share of a time budget."""
    if train.warmup < 1:
        return train.warmup * (train.steps or 0)
    return train.warmup


def lr_factor(train: Train, step: int, spent: float) -> float:
    """Return the factor of the learning rate at `step` (from 1), `spent` (0 to 1) of the budget being gone."""
    if train.warmup >= 1 or train.steps:
        rise = min(1.0, step / warmup_steps(train)) if train.warmup else 1.0
        share = warmup_steps(train) / train.steps if train.steps else 0.0
    else:
        rise = min(1.0, spent / train.warmup) if train.warmup else 1.0
        share = train.warmup
    return rise * _fall(train, step, spent, share)


def _fall(train: Train, step: int, spent: float, share: float) -> float:
    beyond = min(1.0, max(0.0, (spent - share) / (1 - share))) if share < 1 else 0.0
    match train.schedule:
        case "warmup-linear":
            return 1 - beyond
        case "cosine":
            return (1 + math.cos(math.pi * beyond)) / 2
        case "inverse-sqrt":
            start = max(1.0, warmup_steps(train))
            return math.sqrt(start / max(step, start))
        case "exponential":
            return float(train.decay**spent)
        case _:
            return 1.0


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate, for every group times its factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["factor"]


def schedule_uses_budget(train: Train) -> bool:
    """Say whether another budget would give the steps before it another learning rate."""
    return train.schedule in ("warmup-linear", "cosine", "exponential") or 0 < train.warmup < 1


def clip(parameters: Iterable[nn.Parameter], most: float | None) -> torch.Tensor:
    """Scale the gradient down to norm `most`; return the norm it had (Pascanu et al. 2013)."""
    return nn.utils.clip_grad_norm_(parameters, math.inf if most is None else most, foreach=True)
