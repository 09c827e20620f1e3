"""Fine-tuning: which part of a body learns, how fast, and what of it starts afresh.

A body stands on floors (`Model.layer_groups`): its embeddings, then each layer. What is in none of them stands on top:
what the task adds, and of the body what is made of its last layer, such as a pooler or an output.

    freeze        the lowest floors stay as they are: no gradient, no dropout, no state in the optimiser
    layer_decay   η_l = ξ η_{l+1}, from the top down: each floor learns more slowly than the one above it
                  (Howard & Ruder 2018, section 3.2, with ξ = 1 / 2.6; Clark et al. 2020, appendix B)
    reinit        the top layers of pre-trained weights, and what the body has above them, are drawn anew
                  (Zhang et al. 2021, section 5)

A frozen floor has no trained one below it, so no graph is made of it and nothing is kept for a backward pass. How many
floors are frozen is asked for once, where a training begins.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from weft.config.schema import Run, Train
from weft.data.readers.lines import count
from weft.errors import ConfigError
from weft.models.base import Model
from weft.tasks.base import Head

Floor = list[nn.Module]


def check_tuning(run: Run) -> None:
    """Refuse what cannot be, before any data is read."""
    train = run.train
    if train.reinit and getattr(run.model, "weights", None) is None:
        raise ConfigError(
            f"train.reinit: {count(train.reinit, 'layer')} of pre-trained weights would start afresh, but there is no "
            "model.weights and all of it does; leave it out"
        )


def frozen_floors(body: Model, train: Train) -> list[Floor]:
    """Return the floors that are to stay as they are, the lowest first."""
    floors, asked = body.layer_groups(), train.freeze
    if asked is None:
        return []
    if asked != "body" and abs(asked) > len(floors):
        raise ConfigError(
            f"train.freeze: must be body, or from {-len(floors)} to {len(floors)}, for the body has "
            f"{count(len(floors), 'floor')}, its embeddings the first, but is {asked} instead"
        )
    chosen = floors if asked == "body" else floors[:asked]
    most = max(0, len(floors) - train.reinit)
    if len(chosen) > most:
        raise ConfigError(
            f"train.freeze: {len(chosen)} of {count(len(floors), 'floor')} are frozen, but of these some start afresh "
            f"by train.reinit={train.reinit}, and would never learn; freeze {most} at most"
        )
    return chosen


@contextmanager
def frozen(head: Head, train: Train) -> Iterator[str]:
    """Let the lowest floors stay as they are inside, and say how much learns; nothing where nothing is frozen."""
    parts = [part for floor in frozen_floors(head.body, train) for part in floor]
    fixed = [one for one in _parameters(parts) if one.requires_grad]
    for one in fixed:
        one.requires_grad_(False)
    left = sum(one.numel() for one in head.parameters() if one.requires_grad)
    head.frozen = tuple(parts)
    try:
        if parts and not left:
            raise ConfigError(f"train.freeze: {train.freeze} leaves nothing to learn; freeze fewer floors")
        whole = sum(one.numel() for one in head.parameters())
        yield f"train.freeze: {left:,} of {whole:,} parameters learn" if parts else ""
    finally:
        head.frozen = ()
        for one in fixed:
            one.requires_grad_(True)


def rates(head: Head, decay: float) -> dict[nn.Parameter, float]:
    """Say by which factor the parameters of each floor learn more slowly; what stands on top has none."""
    if decay == 1:
        return {}
    found: dict[nn.Parameter, float] = {}
    for above, floor in enumerate(reversed(head.body.layer_groups()), 1):
        found |= dict.fromkeys(_parameters(floor), decay**above)  # of one on several floors, that of the lowest
    return found


@contextmanager
def renewed(body: Model, layers: int) -> Iterator[None]:
    """Let the top layers of a fresh body, and what it has above them, come out as they go in, whatever is loaded."""
    floors = body.layer_groups()
    if layers > len(floors) - 1:
        raise ConfigError(
            f"train.reinit: the body has {count(len(floors) - 1, 'layer')} above its embeddings, but {layers} are to "
            "start afresh; ask for fewer"
        )
    kept = set(_parameters(part for floor in floors[: len(floors) - layers] for part in floor))
    fresh = {one: one.detach().clone() for one in body.parameters() if layers and one not in kept}
    yield
    with torch.no_grad():
        for one, value in fresh.items():
            one.copy_(value)


def _parameters(parts: Iterable[nn.Module]) -> list[nn.Parameter]:
    """List the parameters of some parts, each once."""
    return list(dict.fromkeys(one for part in parts for one in part.parameters()))
