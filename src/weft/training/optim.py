"""Optimisers, learning rate schedules and gradient clipping.

A schedule is a function of the step and of the used share p of the budget, so it has no state to save:

    constant        1
    warmup-linear   (1 - p) / (1 - p_w)                  falls to zero at the end (Devlin et al. 2019)
    cosine          (1 + cos π (p - p_w) / (1 - p_w)) / 2        (Loshchilov & Hutter 2017)
    inverse-sqrt    sqrt(warmup / step)                  (Vaswani et al. 2017, section 5.3, scaled to a peak of 1)
    exponential     decay ^ p

each times min(1, step / warmup): all have the warm-up. p_w is the share of the warm-up.

    slanted-triangular   (1 + t (ratio - 1)) / ratio,    t = min(1, step / warmup) · (1 - p) / (1 - p_w)

rises from 1 / ratio of the peak and falls back to it (Howard & Ruder 2018, equation 3; their cut_frac is `warmup`).
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from weft.checkpoint.tensor_files import full_tensor, is_sharded
from weft.config.sections import Train
from weft.training.asgd import ASGD


def make_optimizer(
    module: nn.Module, train: Train, rates: Mapping[nn.Parameter, float] | None = None
) -> torch.optim.Optimizer:
    """Return the optimiser of the trainable parameters; `rates` are factors of the learning rate, 1 by default."""
    groups = _param_groups(module, train, rates or {})
    if train.optimizer == "adagrad":
        return _eager(torch.optim.Adagrad)(groups, lr=train.lr, foreach=True)
    if train.optimizer in ("sgd", "asgd"):
        sgd = _eager(torch.optim.SGD) if train.optimizer == "sgd" else ASGD
        return sgd(groups, lr=train.lr, fused=True)
    adam = torch.optim.AdamW if train.optimizer == "adamw" else torch.optim.Adam
    return _eager(adam)(groups, lr=train.lr, betas=train.betas, fused=True)


@cache
def _eager(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return a kind of optimizer that does not import `torch._dynamo`, which takes as long as to import all of torch.

    PyTorch wraps these methods for `torch.compile`; here that compiles models, never an optimizer.
    """
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad")}
    return type(kind.__name__, (kind,), {**methods, "step": torch.no_grad()(inspect.unwrap(kind.step))})


def _param_groups(module: nn.Module, train: Train, rates: Mapping[nn.Parameter, float]) -> list[dict[str, Any]]:
    """Group parameters by learning rate factor and weight decay; vectors (biases, norms) have no weight decay."""
    groups: dict[tuple[float, bool, bool], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            key = rates.get(parameter, 1.0), parameter.ndim > 1, is_sharded(parameter)  # one kernel updates one kind
            groups.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": train.weight_decay if decays else 0.0, "factor": factor}
        for (factor, decays, _), parameters in groups.items()
    ]


def warmup_steps(train: Train) -> float:
    """Return the warm-up in steps, unless it is a share of a time budget."""
    if train.warmup < 1:
        return train.warmup * (train.steps or 0)
    return train.warmup


def lr_factor(train: Train, step: int, spent: float) -> float:
    """Return the factor of the learning rate at `step` (from 1), with the share `spent` (0 to 1) of the budget used."""
    if train.warmup >= 1 or train.steps:
        rise = min(1.0, step / warmup_steps(train)) if train.warmup else 1.0
        share = warmup_steps(train) / train.steps if train.steps else 0.0
    else:
        rise = min(1.0, spent / train.warmup) if train.warmup else 1.0
        share = train.warmup
    factor = rise * _decay(train, step, spent, share)
    return (1 + factor * (train.ratio - 1)) / train.ratio if train.schedule == "slanted-triangular" else factor


def _decay(train: Train, step: int, spent: float, warmup_share: float) -> float:
    """Return the factor of the schedule without its warm-up."""
    after_warmup = (spent - warmup_share) / (1 - warmup_share) if warmup_share < 1 else 0.0
    p = min(1.0, max(0.0, after_warmup))
    match train.schedule:
        case "warmup-linear" | "slanted-triangular":
            return 1 - p
        case "cosine":
            return (1 + math.cos(math.pi * p)) / 2
        case "inverse-sqrt":
            start = max(1.0, warmup_steps(train))
            return math.sqrt(start / max(step, start))
        case "exponential":
            return float(train.decay**spent)
        case _:
            return 1.0


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of each group, times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["factor"]


def schedule_uses_budget(train: Train) -> bool:
    """Return whether another budget would change the learning rate of the steps before its end."""
    return schedule_decays(train) or 0 < train.warmup < 1


def schedule_decays(train: Train) -> bool:
    """Return whether the schedule itself falls with the share of the budget that is spent."""
    return train.schedule in ("warmup-linear", "cosine", "exponential", "slanted-triangular")


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Clip the gradient to the norm `max_norm`; return its norm before (Pascanu et al. 2013)."""
    limit, groups = math.inf if max_norm is None else max_norm, dict[bool, list[nn.Parameter]]()
    for parameter in parameters:
        groups.setdefault(is_sharded(parameter), []).append(parameter)
    if not groups.get(True):
        return nn.utils.clip_grad_norm_(groups.get(False, []), limit, foreach=True)
    norms = [
        full_tensor(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None], foreach=True))
        for group in groups.values()
    ]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups.values():
        nn.utils.clip_grads_with_norm_(group, limit, norm, foreach=True)
    return norm
