"""Attention on demand: `with capture() as maps:` collects the weights that are computed inside it.

Outside the context nothing is kept and nothing is slower. The output does not change.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor

from weft.errors import ConfigError


@dataclass
class Maps:
    """What `capture` collected: for each place, such as "cross", and layer, one tensor a call, in order."""

    layers: Collection[int] | None = None
    heads: Collection[int] | None = None
    weights: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    numbers: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # of the heads, where a layer has some

    def wants(self, layer: int) -> bool:
        """Say whether the weights of this layer are asked for."""
        return self.layers is None or layer in self.layers


_maps: ContextVar[Maps | None] = ContextVar("maps", default=None)


@contextmanager
def capture(layers: Collection[int] | None = None, heads: Collection[int] | None = None) -> Iterator[Maps]:
    """Collect attention weights of the chosen layers and heads (all where none is named)."""
    maps = Maps(layers, heads)
    token = _maps.set(maps)
    try:
        yield maps
    finally:
        _maps.reset(token)


def capturing(layer: int = 0) -> bool:
    """Say whether someone looks at this layer, so that a fused path can compute what it otherwise would not."""
    maps = _maps.get()
    return maps is not None and maps.wants(layer)


def watched() -> bool:
    """Say whether someone looks at any layer."""
    return _maps.get() is not None


def chosen_heads(heads: Collection[int]) -> list[int]:
    """Say which of a layer's heads are looked at."""
    maps = _maps.get()
    asked = None if maps is None else maps.heads
    if asked is None:
        return list(heads)
    if not set(asked) <= set(heads):
        raise ConfigError(f"heads: the model has {len(heads)} heads, counted from 0, but {sorted(asked)} are asked for")
    return list(asked)


def record(place: str, weights: Tensor, layer: int = 0, heads: Sequence[int] | None = None) -> None:
    """Hand weights over, if someone looks: (B, T, S), or (B, H, T, S) of all heads, or of the chosen `heads` alone."""
    maps = _maps.get()
    if maps is None or not maps.wants(layer):
        return
    if weights.dim() == 4:
        if heads is None:
            heads = chosen_heads(range(weights.shape[1]))
            weights = weights[:, heads]
        maps.numbers[place, layer] = list(heads)
    maps.weights.setdefault((place, layer), []).append(weights.detach())
