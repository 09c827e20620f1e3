"""Fine-tuning: frozen layers, layer-wise learning rates, and re-initialised top layers.

A body has layer groups (`Model.layer_groups`), bottom to top: its embeddings, then each layer. Parameters in no group
are on top: what the task adds, and the body's parts after its last layer, such as a pooler or an output projection.

    freeze        the lowest groups are not trained: no gradient, no dropout, no optimiser state
    layer_decay   η_l = ξ η_{l+1}, from the top down: each group has a smaller learning rate than the one above it
                  (Howard & Ruder 2018, section 3.2, with ξ = 1 / 2.6; Clark et al. 2020, appendix B)
    reinit        the top layers of pre-trained weights, and the body's parts above them, are re-initialised
                  (Zhang et al. 2021, section 5)

No trained group is below a frozen one, so autograd records no graph for frozen groups and saves no activations. The
number of frozen groups is read once, when training begins.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from weft.config.schema import Run, Train
from weft.data.readers.lines import plural
from weft.errors import ConfigError
from weft.models.base import Model
from weft.tasks.head import Head

LayerGroup = list[nn.Module]


def check_tuning(run: Run) -> None:
    """Refuse `train.reinit` without pre-trained weights, before any data is read."""
    train = run.train
    if train.reinit and getattr(run.model, "weights", None) is None:
        raise ConfigError(
            f"train.reinit: {plural(train.reinit, 'layer')} of pre-trained weights would start afresh, but there is no "
            "model.weights and all of it does; leave it out"
        )


def frozen_groups(body: Model, train: Train) -> list[LayerGroup]:
    """Return the layer groups that `train.freeze` freezes, the lowest first."""
    groups, freeze = body.layer_groups(), train.freeze
    if freeze is None:
        return []
    if freeze != "body" and abs(freeze) > len(groups):
        raise ConfigError(
            f"train.freeze: must be body, or from {-len(groups)} to {len(groups)}, as the body has "
            f"{plural(len(groups), 'layer group')}, of which the embeddings are the first, but is {freeze} instead"
        )
    chosen = groups if freeze == "body" else groups[:freeze]
    limit = max(0, len(groups) - train.reinit)
    if len(chosen) > limit:
        raise ConfigError(
            f"train.freeze: {len(chosen)} of {plural(len(groups), 'layer group')} are frozen, but some of "
            f"these are initialized by train.reinit={train.reinit} and would never be trained; freeze {limit} at most"
        )
    return chosen


@contextmanager
def frozen(head: Head, train: Train) -> Iterator[str]:
    """Freeze the lowest layer groups inside the context; yield a notice of how many parameters are trained, or ""."""
    modules = [module for group in frozen_groups(head.body, train) for module in group]
    fixed = [parameter for parameter in _parameters(modules) if parameter.requires_grad]
    for parameter in fixed:
        parameter.requires_grad_(False)
    trained = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
    head.frozen = tuple(modules)
    try:
        if modules and not trained:
            raise ConfigError(f"train.freeze: {train.freeze} leaves no parameter to train; freeze fewer layer groups")
        total = sum(parameter.numel() for parameter in head.parameters())
        yield f"train.freeze: {trained:,} of {total:,} parameters learn" if modules else ""
    finally:
        head.frozen = ()
        for parameter in fixed:
            parameter.requires_grad_(True)


def layer_lr_factors(head: Head, decay: float) -> dict[nn.Parameter, float]:
    """Return the factor of the learning rate for the parameters of each layer group; those on top have none (1)."""
    if decay == 1:
        return {}
    factors: dict[nn.Parameter, float] = {}
    for depth, group in enumerate(reversed(head.body.layer_groups()), 1):
        factors |= dict.fromkeys(_parameters(group), decay**depth)  # a parameter in several groups: the lowest counts
    return factors


@contextmanager
def reinitialized(body: Model, layers: int) -> Iterator[None]:
    """Keep the initial weights of the top layers and of the parts above them, whatever is loaded inside the context."""
    groups = body.layer_groups()
    if layers > len(groups) - 1:
        raise ConfigError(
            f"train.reinit: the body has {plural(len(groups) - 1, 'layer')} above its embeddings, but {layers} are to "
            "start afresh; ask for fewer"
        )
    loaded = set(_parameters(module for group in groups[: len(groups) - layers] for module in group))
    initial = {p: p.detach().clone() for p in body.parameters() if layers and p not in loaded}
    yield
    with torch.no_grad():
        for parameter, value in initial.items():
            parameter.copy_(value)


def _parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """List the parameters of some modules, each once."""
    return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))
