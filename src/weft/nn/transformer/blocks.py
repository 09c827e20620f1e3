"""Blocks of attention and feed-forward layers, each inside a residual (Vaswani et al. 2017, section 3.1).

    post-norm   x ← LayerNorm(x + Dropout(f(x)))               as in the paper
    pre-norm    x ← x + Dropout(f(LayerNorm(x)))               trains deep stacks without warm-up (Xiong et al. 2020)

    FFN(x) = act(x W_1 + b_1) W_2 + b_2                                                                         (eq. 2)

A block reads all tokens of a batch at once (`forward`), or the next token of each hypothesis (`step`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.attention.capture import capturing
from weft.nn.attention.kv_cache import KVCache, KVIndex, on_triton
from weft.nn.attention.multihead import AttentionLayout, MultiHeadAttention
from weft.nn.layers.linear import Linear
from weft.nn.rnn.fused.codegen_triton import halved, trusted

_MUCH = 512  # tokens from which on loops that are compiled, once a process, are worth it; those of int8 always are
Activation = Literal["relu", "gelu", "gelu-tanh", "silu"]


def gelu_tanh(x: Tensor) -> Tensor:
    """Return x · Φ(x), nearly: 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), as GPT has it (Hendrycks & Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": gelu_tanh,
    "silu": F.silu,
}


@dataclass(frozen=True)
class BlockConfig:
    """What all blocks of a stack have alike; `off` names the heads that are left out, as `heads_off` does."""

    width: int
    heads: int
    hidden: int
    activation: Activation = "relu"
    norm: Literal["pre", "post"] = "post"
    dropout: float = 0.0
    off: Mapping[str, Collection[int]] = field(default_factory=dict)
    eps: float = 1e-5  # of the norms

    def attention(self, place: str, layer: int, causal: bool = False) -> MultiHeadAttention:
        """Make the attention of one layer, without its heads that are off."""
        off = {*self.off.get(str(layer), ()), *self.off.get(f"{place}.{layer}", ())}
        return MultiHeadAttention(self.width, self.heads, place, layer, causal, off)


class FeedForward(nn.Module):
    """Two layers, the same at every position."""

    def __init__(self, shape: BlockConfig) -> None:
        super().__init__()
        self.fc1, self.fc2 = Linear(shape.width, shape.hidden), Linear(shape.hidden, shape.width)
        self.activation = ACTIVATIONS[shape.activation]
        for part in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(part.weight)
            nn.init.zeros_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, D) to (N, D)."""
        found: Tensor = self.fc2(self.hidden(x))
        return found

    def hidden(self, x: Tensor) -> Tensor:
        """Return what the outer layer reads, (N, hidden)."""
        if self.activation not in (F.relu, F.gelu, gelu_tanh) or not trusted(x):
            made = self.fc1(x)
            return made.relu_() if self.activation is F.relu else self.activation(made)
        from weft.nn.kernels.triton.linear_activation import linear_gelu, linear_relu

        known = halved(x), halved(self.fc1.weight), self.fc1.bias
        plain = self.activation is F.relu
        found: Tensor = linear_relu(*known) if plain else linear_gelu(*known, self.activation is F.gelu)[0]
        return found


class Residual(nn.Module):
    """The way around a layer, with the norm before the layer or after the sum."""

    def __init__(self, shape: BlockConfig) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(shape.width, shape.eps), nn.Dropout(shape.dropout)
        self.before = shape.norm == "pre"

    def forward(self, x: Tensor, layer: Callable[[Tensor], Tensor], last: nn.Linear | None = None) -> Tensor:
        """Add what the layer makes of x, and `last` of that, to x."""
        found: Tensor = layer(self.norm(x) if self.before else x)
        if last is not None and not self.before and trusted(found):
            return self._in_one(x, F.linear(found, last.weight), last.bias)
        found = x + self.dropout(found if last is None else last(found))
        return found if self.before else self.norm(found)

    def _in_one(self, x: Tensor, found: Tensor, shift: Tensor) -> Tensor:
        """Shift, drop, add and norm in one kernel. What is normed anew each time need not be more than half precise."""
        from weft.nn.kernels.triton.add_norm import add_norm

        norm = self.norm
        made: Tensor = add_norm(x.to(found.dtype), found, shift, norm.weight, norm.bias, *self._drop(x), norm.eps)[0]
        return made

    def joined(self, x: Tensor, found: Tensor, shift: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """Shift, drop and add in one kernel with the norm that comes next; return the sum, and that normed."""
        from weft.nn.kernels.triton.residual_norm import join_norm

        total, made, *_ = join_norm(x, found, shift, norm.weight, norm.bias, *self._drop(x), norm.eps)
        return total, made

    def _drop(self, x: Tensor) -> tuple[Tensor | None, float]:
        """Say which share is dropped, and draw a seed for the places."""
        share = self.dropout.p if self.training else 0.0
        return torch.randint(2**62, (1,), device=x.device) if share else None, share


class Block(nn.Module):
    """Self-attention, in a decoder a look at the source, and the feed-forward layer."""

    def __init__(self, shape: BlockConfig, place: str, layer: int, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.attention, self.attention_residual = shape.attention(place, layer, causal), Residual(shape)
        self.cross_attention = shape.attention("cross", layer) if cross else None
        self.cross_attention_residual = Residual(shape) if cross else None
        self.feed_forward, self.feed_forward_residual = FeedForward(shape), Residual(shape)

    def forward(
        self,
        x: Tensor,
        layout: AttentionLayout,
        memory: Tensor | None = None,
        across: AttentionLayout | None = None,
        keep: list[Tensor] | None = None,
    ) -> Tensor:
        """Read (N, D), each sequence on its own, `across` at its source in `memory` (M, D): (N, D)."""
        for around, layer, last in self.layers(layout, memory, across, keep):
            x = around(x, layer, last)
        return x

    def layers(
        self, layout: AttentionLayout, memory: Tensor | None, across: AttentionLayout | None, keep: list[Tensor] | None
    ) -> list[tuple[Residual, Callable[[Tensor], Tensor], nn.Linear]]:
        """Name what is done, in order: the way around a layer, the layer, and its last part."""
        attention, cross, feed_forward = self.attention, self.cross_attention, self.feed_forward
        found: list[tuple[Residual, Callable[[Tensor], Tensor], nn.Linear]] = [
            (self.attention_residual, lambda y: attention.gathered(y, layout, keep=keep), attention.out_proj)
        ]
        if cross is not None and self.cross_attention_residual is not None and across is not None:
            found.append((self.cross_attention_residual, lambda y: cross.gathered(y, across, memory), cross.out_proj))
        return [*found, (self.feed_forward_residual, feed_forward.hidden, feed_forward.fc2)]

    def step(self, x: Tensor, cache: KVCache, held: Tensor | None = None, reach: KVIndex | None = None) -> Tensor:
        """Read the next token of each hypothesis (B, D); `held` are the source's keys and values (M, 2, H, d)."""

        def itself(y: Tensor) -> Tensor:
            q, kv = self.attention.project(y)
            return self.attention.look(q, cache.write(self.layer, kv), cache.reach)

        x = self.attention_residual(x, itself)
        if self.cross_attention is not None and self.cross_attention_residual is not None:
            assert held is not None
            assert reach is not None
            cross = self.cross_attention
            x = self.cross_attention_residual(x, lambda y: cross.look(cross.queries(y), held, reach))
        found: Tensor = self.feed_forward_residual(x, self.feed_forward)
        return found


class Blocks(nn.Module):
    """A stack; where the norm comes before each layer, one more stands at the end.

    With `shared`, all layers have the weights of the first (Lan et al. 2020, section 3.1).
    """

    def __init__(
        self,
        shape: BlockConfig,
        layers: int,
        place: str,
        causal: bool = False,
        cross: bool = False,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape, place, depth, causal, cross) for depth in range(layers))
        self.norm = nn.LayerNorm(shape.width, shape.eps) if shape.norm == "pre" else nn.Identity()
        for block in self.blocks[1:] if shared else ():
            _share(self.blocks[0], block)

    def forward(
        self,
        x: Tensor,
        layout: AttentionLayout,
        memory: Tensor | None = None,
        across: AttentionLayout | None = None,
        keep: list[Tensor] | None = None,
        layers: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Return what goes into the first block and what comes out of each, (N, D) each; the last one normed.

        With `layers` only those, such as the last one (-1): nothing is kept of the others.
        """
        if memory is None and keep is None and self._in_loops(x, layout):
            from weft.nn.kernels.numba import encoder

            return encoder.read(self, x, layout.at, layers)
        planned = layout.planned(x, self.shapes[0][1]) if keep is None else layout
        found = self._each(x, planned, memory, across, keep)
        return found if layers is None else [found[layer] for layer in layers]

    def _each(
        self,
        x: Tensor,
        layout: AttentionLayout,
        memory: Tensor | None,
        across: AttentionLayout | None,
        keep: list[Tensor] | None,
    ) -> list[Tensor]:
        if isinstance(self.norm, nn.LayerNorm) and trusted(x):
            return self._joined(x, self.norm, layout, memory, across, keep)
        found = [x]
        for block in self.blocks:
            found.append(block(found[-1], layout, memory, across, keep))
        found[-1] = self.norm(found[-1])
        return found

    def _in_loops(self, x: Tensor, layout: AttentionLayout) -> bool:
        """Say whether compiled loops read it: on the CPU, in float32, to answer and not to learn, and if it is much."""
        if x.device.type != "cpu" or x.dtype is not torch.float32 or torch.is_autocast_enabled("cpu"):
            return False
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or self.training or layout.at is not layout.over:
            return False
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        much = len(x) >= _MUCH or (len(x) > 0 and not isinstance(blocks[0].feed_forward.fc1, nn.Linear))
        return much and all(block.attention.kept and not capturing(block.layer) for block in blocks)

    def _joined(
        self,
        x: Tensor,
        last_norm: nn.LayerNorm,
        layout: AttentionLayout,
        memory: Tensor | None,
        across: AttentionLayout | None,
        keep: list[Tensor] | None,
    ) -> list[Tensor]:
        """Do it with each sum, in half precision as what is added is, and the norm after it in one kernel."""
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        layers = [block.layers(layout, memory, across, keep) for block in blocks]
        norms = iter([*(around.norm for one in layers for around, *_ in one), last_norm])
        x = halved(x)
        found, read = [x], next(norms)(x)
        for some in layers:
            for around, layer, last in some:
                x, read = around.joined(x, F.linear(layer(read), last.weight), last.bias, next(norms))
            found.append(x)
        return [*found[:-1], read]

    def step(self, x: Tensor, cache: KVCache, held: tuple[Tensor, ...] = (), reach: KVIndex | None = None) -> Tensor:
        """Read the next token of each hypothesis, (B, D): (B, D)."""
        if on_triton(x) and x.dtype is not torch.float32 and not self.training:
            from weft.nn.kernels.triton import decode_step, decode_step_small_batch

            if decode_step_small_batch.fits(self, x):
                return decode_step_small_batch.step(self, x, cache)
            return decode_step.step(self, x, cache, held, reach)
        for depth, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x = block.step(x, cache, held[depth] if held else None, reach)
        found: Tensor = self.norm(x)
        return found

    def layer_groups(self) -> list[list[nn.Module]]:
        """Say what each layer has, the lowest first; the norm at the end goes with the last."""
        *rest, last = self.blocks
        return [*([block] for block in rest), [last, self.norm]]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The heads of each layer's own attention, and their size."""
        looks = [block.attention for block in self.blocks if isinstance(block, Block)]
        return [(len(look.kept), look.size) for look in looks]

    def remember(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Make each layer's keys and values (M, 2, H, d) of a source (M, D), once for all steps."""
        crosses = [block.cross_attention for block in self.blocks if isinstance(block, Block)]
        return tuple(cross.remember(memory) for cross in crosses if cross is not None)


def _share(first: nn.Module, other: nn.Module) -> None:
    """Give a module the parameters of another one that is made alike."""
    for place, part in other.named_modules():
        for name in dict(part.named_parameters(recurse=False)):
            setattr(part, name, getattr(first.get_submodule(place), name))
