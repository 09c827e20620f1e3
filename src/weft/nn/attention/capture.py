"""Capture attention weights: `with capture() as maps:` collects those that are computed inside the context.

Outside it no weights are kept and nothing is slower. The model's output does not change.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor

from weft.errors import ConfigError


@dataclass
class Maps:
    """Captured attention weights: for each place, such as "cross", and layer, one tensor a call, in order."""

    layers: Collection[int] | None = None
    heads: Collection[int] | None = None
    weights: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    numbers: dict[tuple[str, int], list[int]] = field(
        default_factory=dict
    )  # the heads that were captured, where a layer has several

    def wants(self, layer: int) -> bool:
        """Return whether the weights of this layer are captured."""
        return self.layers is None or layer in self.layers


_maps: ContextVar[Maps | None] = ContextVar("maps", default=None)


@contextmanager
def capture(layers: Collection[int] | None = None, heads: Collection[int] | None = None) -> Iterator[Maps]:
    """Collect attention weights of the chosen layers and heads (None: all)."""
    maps = Maps(layers, heads)
    token = _maps.set(maps)
    try:
        yield maps
    finally:
        _maps.reset(token)


def capturing(layer: int = 0) -> bool:
    """Return whether this layer's weights are captured, so that a fused path has to compute them."""
    maps = _maps.get()
    return maps is not None and maps.wants(layer)


def watched() -> bool:
    """Return whether any layer's weights are captured."""
    return _maps.get() is not None


def chosen_heads(heads: Collection[int]) -> list[int]:
    """Return which of a layer's heads are captured."""
    maps = _maps.get()
    chosen = None if maps is None else maps.heads
    if chosen is None:
        return list(heads)
    if not set(chosen) <= set(heads):
        raise ConfigError(
            f"heads: the model has {len(heads)} heads, counted from 0, but {sorted(chosen)} are asked for"
        )
    return list(chosen)


def record(place: str, weights: Tensor, layer: int = 0, heads: Sequence[int] | None = None) -> None:
    """Record weights (B, T, S), or (B, H, T, S) of all heads or only of `heads`, if they are to be captured."""
    maps = _maps.get()
    if maps is None or not maps.wants(layer):
        return
    if weights.dim() == 4:
        if heads is None:
            heads = chosen_heads(range(weights.shape[1]))
            weights = weights[:, heads]
        maps.numbers[place, layer] = list(heads)
    maps.weights.setdefault((place, layer), []).append(weights.detach())
