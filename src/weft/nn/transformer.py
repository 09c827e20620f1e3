"""Blocks of attention and feed-forward layers, each inside a residual (Vaswani et al. 2017, section 3.1).

    post-norm   x ← LayerNorm(x + Dropout(f(x)))               as in the paper
    pre-norm    x ← x + Dropout(f(LayerNorm(x)))               trains deep stacks without warm-up (Xiong et al. 2020)

    FFN(x) = act(x W_1 + b_1) W_2 + b_2                                                                         (eq. 2)

A block reads all tokens of a batch at once (`forward`), or the next token of each hypothesis (`step`).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.attention import Layout, MultiHead
from weft.nn.cache import Cache, Reach

Activation = Literal["relu", "gelu", "silu"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


@dataclass(frozen=True)
class Shape:
    """What all blocks of a stack have alike; `off` names the heads that are left out, as `heads_off` does."""

    width: int
    heads: int
    hidden: int
    activation: Activation = "relu"
    norm: Literal["pre", "post"] = "post"
    dropout: float = 0.0
    off: Mapping[str, Collection[int]] = field(default_factory=dict)

    def attention(self, place: str, layer: int, causal: bool = False) -> MultiHead:
        """Make the attention of one layer, without its heads that are off."""
        off = {*self.off.get(str(layer), ()), *self.off.get(f"{place}.{layer}", ())}
        return MultiHead(self.width, self.heads, place, layer, causal, off)


class FeedForward(nn.Module):
    """Two layers, the same at every position."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(shape.width, shape.hidden), nn.Linear(shape.hidden, shape.width)
        self.activation = ACTIVATIONS[shape.activation]
        for part in (self.inner, self.outer):
            nn.init.xavier_uniform_(part.weight)
            nn.init.zeros_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, D) to (N, D)."""
        found: Tensor = self.outer(self.activation(self.inner(x)))
        return found


class Residual(nn.Module):
    """The way around a layer, with the norm before the layer or after the sum."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.dropout, self.before = nn.LayerNorm(shape.width), nn.Dropout(shape.dropout), shape.norm == "pre"

    def forward(self, x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """Add what the layer makes of x to x."""
        found: Tensor = layer(self.norm(x) if self.before else x)
        found = x + self.dropout(found)
        return found if self.before else self.norm(found)


class Block(nn.Module):
    """Self-attention, in a decoder a look at the source, and the feed-forward layer."""

    def __init__(self, shape: Shape, place: str, layer: int, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.attention, self.around_attention = shape.attention(place, layer, causal), Residual(shape)
        self.cross = shape.attention("cross", layer) if cross else None
        self.around_cross = Residual(shape) if cross else None
        self.feed, self.around_feed = FeedForward(shape), Residual(shape)

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        memory: Tensor | None = None,
        across: Layout | None = None,
        keep: list[Tensor] | None = None,
    ) -> Tensor:
        """Read (N, D), each sequence on its own, `across` at its source in `memory` (M, D): (N, D)."""
        x = self.around_attention(x, lambda y: self.attention(y, layout, keep=keep))
        if self.cross is not None and self.around_cross is not None:
            cross = self.cross
            x = self.around_cross(x, lambda y: cross(y, across, memory))
        found: Tensor = self.around_feed(x, self.feed)
        return found

    def step(self, x: Tensor, cache: Cache, held: Tensor | None = None, reach: Reach | None = None) -> Tensor:
        """Read the next token of each hypothesis (B, D); `held` are the source's keys and values (M, 2, H, d)."""

        def itself(y: Tensor) -> Tensor:
            q, kv = self.attention.project(y)
            return self.attention.look(q, cache.write(self.layer, kv), cache.reach)

        x = self.around_attention(x, itself)
        if self.cross is not None and self.around_cross is not None:
            assert held is not None
            assert reach is not None
            cross = self.cross
            x = self.around_cross(x, lambda y: cross.look(cross.queries(y), held, reach))
        found: Tensor = self.around_feed(x, self.feed)
        return found


class Blocks(nn.Module):
    """A stack; where the norm comes before each layer, one more stands at the end."""

    def __init__(self, shape: Shape, layers: int, place: str, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape, place, depth, causal, cross) for depth in range(layers))
        self.norm = nn.LayerNorm(shape.width) if shape.norm == "pre" else nn.Identity()

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        memory: Tensor | None = None,
        across: Layout | None = None,
        keep: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return what goes into the first block and what comes out of each, (N, D) each; the last one normed."""
        found = [x]
        for block in self.blocks:
            found.append(block(found[-1], layout, memory, across, keep))
        found[-1] = self.norm(found[-1])
        return found

    def step(self, x: Tensor, cache: Cache, held: tuple[Tensor, ...] = (), reach: Reach | None = None) -> Tensor:
        """Read the next token of each hypothesis, (B, D): (B, D)."""
        for depth, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x = block.step(x, cache, held[depth] if held else None, reach)
        found: Tensor = self.norm(x)
        return found

    def remember(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Make each layer's keys and values (M, 2, H, d) of a source (M, D), once for all steps."""
        crosses = [block.cross for block in self.blocks if isinstance(block, Block)]
        return tuple(cross.remember(memory) for cross in crosses if cross is not None)
