"""Fine-tuning: frozen layers, gradual unfreezing, layer-wise learning rates, and re-initialised top layers.

A body has layer groups (`Model.layer_groups`), bottom to top: its embeddings, then each layer. Parameters in no group
are on top: what the task adds, and the body's parts after its last layer, such as a pooler or an output projection.

    freeze        the lowest groups are not trained: no gradient, no dropout, no optimiser state
    unfreeze      the body is frozen at first, and from the top down one more group is trained after each epoch, or
                  after so many steps (Howard & Ruder 2018, section 3.3)
    layer_decay   η_l = ξ η_{l+1}, from the top down: each group has a smaller learning rate than the one above it
                  (Howard & Ruder 2018, section 3.2, with ξ = 1 / 2.6; Clark et al. 2020, appendix B)
    reinit        the top layers of pre-trained weights, and the body's parts above them, are re-initialised
                  (Zhang et al. 2021, section 5)

No trained group is below a frozen one, so autograd records no graph for frozen groups and saves no activations. What
is frozen follows from the recipe and the progress alone, so that a run which is resumed freezes the same.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from weft.config.run import Run
from weft.config.sections import Train
from weft.data.readers.lines import plural
from weft.errors import ConfigError
from weft.models.base import Model
from weft.tasks.head import Head

LayerGroup = list[nn.Module]


def check_tuning(run: Run) -> None:
    """Refuse `train.reinit` without pre-trained weights, and `train.unfreeze` of a body that stays frozen."""
    train = run.train
    if train.unfreeze is not None and train.freeze == "body":
        raise ConfigError(
            "train.unfreeze: would train the body layer by layer, and train.freeze=body never does; leave one of the "
            "two out"
        )
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
    trainable = _trained(head)
    _freeze(head, modules, trainable)
    try:
        if modules and not _trained(head):
            raise ConfigError(f"train.freeze: {train.freeze} leaves no parameter to train; freeze fewer layer groups")
        yield f"train.freeze: {_describe_trained(head)}" if modules else ""
    finally:
        _freeze(head, (), trainable)


class GradualUnfreezing:
    """The layer groups that `train.unfreeze` trains: none of the body at first, then one more at a time, from the top.

    The groups that `train.freeze` freezes stay so.
    """

    def __init__(self, head: Head, train: Train) -> None:
        self._head, self._trainable = head, _trained(head)
        fixed, groups = frozen_groups(head.body, train), head.body.layer_groups()
        self._fixed, self._groups = [module for group in fixed for module in group], groups[len(fixed) :]
        self._frozen: int | None = None
        if not set(self._trainable) - set(_parameters(module for group in groups for module in group)):
            raise ConfigError(
                "train.unfreeze: begins with what stands on the body's layers, but here nothing does; leave it out"
            )

    def unfreeze(self, count: int) -> str:
        """Train the topmost `count` layer groups and what is above them; return a notice if that is new, else ""."""
        frozen = max(0, len(self._groups) - count)
        if frozen == self._frozen:
            return ""
        self._frozen = frozen
        modules = [module for group in self._groups[:frozen] for module in group]
        _freeze(self._head, [*self._fixed, *modules], self._trainable)
        return f"train.unfreeze: {_describe_trained(self._head)}"


def _freeze(head: Head, modules: Iterable[nn.Module], trainable: Iterable[nn.Parameter]) -> None:
    """Freeze modules, and unfreeze all else that is `trainable`."""
    head.frozen = tuple(modules)
    fixed = set(_parameters(head.frozen))
    for parameter in trainable:
        parameter.requires_grad_(parameter not in fixed)
    head.train(head.training)


def _trained(head: Head) -> list[nn.Parameter]:
    return [parameter for parameter in head.parameters() if parameter.requires_grad]


def _describe_trained(head: Head) -> str:
    trained, total = (sum(p.numel() for p in some) for some in (_trained(head), head.parameters()))
    return f"{trained:,} of {total:,} parameters learn"


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
