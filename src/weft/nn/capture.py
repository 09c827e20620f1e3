"""Attention on demand: `with capture() as maps:` collects the weights that are computed inside it.

Outside the context nothing is kept and nothing is slower. The output does not change.
"""

from collections.abc import Collection, Iterator
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


def record(place: str, weights: Tensor, layer: int = 0) -> None:
    """Hand over weights (B, T, S), or (B, H, T, S) of which the chosen heads are kept, if someone looks."""
    maps = _maps.get()
    if maps is not None and maps.wants(layer):
        chosen = weights if maps.heads is None or weights.dim() < 4 else weights[:, _existing(maps.heads, weights)]
        maps.weights.setdefault((place, layer), []).append(chosen.detach())


def _existing(heads: Collection[int], weights: Tensor) -> list[int]:
    count = weights.shape[1]
    if not all(0 <= head < count for head in heads):
        raise ConfigError(f"heads: the model has {count} heads, counted from 0, but {sorted(heads)} are asked for")
    return list(heads)
