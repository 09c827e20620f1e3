"""Transformer blocks: attention and feed-forward layers with residual connections (Vaswani et al. 2017, section 3.1).

    post-norm   x ← LayerNorm(x + Dropout(f(x)))               as in the paper
    pre-norm    x ← x + Dropout(f(LayerNorm(x)))               trains deep stacks without warm-up (Xiong et al. 2020)

    FFN(x) = act(x W_1 + b_1) W_2 + b_2                                                                         (eq. 2)

A block computes all tokens of a batch at once (`forward`), or the next token of each hypothesis (`step`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from weft.nn.attention.capture import capturing
from weft.nn.attention.kv_cache import KVCache, KVIndex
from weft.nn.attention.multihead import AttentionLayout, MultiHeadAttention
from weft.nn.kernels import dispatch
from weft.nn.layers.activations import ACTIVATIONS, Activation
from weft.nn.layers.packed_linear import Linear

INIT_STD = 0.02  # of the weights of GPT and BERT


@dataclass(frozen=True)
class BlockConfig:
    """Configuration shared by all blocks of a stack; `off` names the pruned heads, as `pruned_heads` does."""

    width: int
    heads: int
    ffn_width: int
    activation: Activation = "relu"
    norm: Literal["pre", "post"] = "post"
    dropout: float = 0.0
    off: Mapping[str, Collection[int]] = field(default_factory=dict)
    eps: float = 1e-5  # of the layer norms

    def attention(self, place: str, layer: int, causal: bool = False) -> MultiHeadAttention:
        """Return the attention of one layer, without its pruned heads."""
        pruned = {*self.off.get(str(layer), ()), *self.off.get(f"{place}.{layer}", ())}
        return MultiHeadAttention(self.width, self.heads, place, layer, causal, pruned)


class FeedForward(nn.Module):
    """Position-wise feed-forward network of two layers."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.fc1, self.fc2 = Linear(config.width, config.ffn_width), Linear(config.ffn_width, config.width)
        self.activation = ACTIVATIONS[config.activation]
        for linear in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, D) to (N, D)."""
        output: Tensor = self.fc2(self.hidden(x))
        return output

    def hidden(self, x: Tensor) -> Tensor:
        """Return the hidden layer act(x W_1 + b_1), the input of fc2: (N, hidden)."""
        if linear_activation := dispatch.linear_activation_kernel(x, self.activation):
            weight = dispatch.to_half(self.fc1.weight)
            hidden: Tensor = linear_activation(dispatch.to_half(x), weight, self.fc1.bias)
            return hidden
        projected = self.fc1(x)
        return projected.relu_() if self.activation is F.relu else self.activation(projected)


class Residual(nn.Module):
    """Residual connection around a layer, with the layer norm before the layer or after the sum."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(config.width, config.eps), nn.Dropout(config.dropout)
        self.pre_norm = config.norm == "pre"

    def forward(self, x: Tensor, layer: Callable[[Tensor], Tensor], last: nn.Linear | None = None) -> Tensor:
        """Return x + Dropout(last(layer(x))), or x + Dropout(layer(x)) without `last`, with the norm in its place."""
        output: Tensor = layer(self.norm(x) if self.pre_norm else x)
        if last is not None and not self.pre_norm and (add_norm := dispatch.add_norm_kernel(output)):
            return self._fused_add_norm(add_norm, x, F.linear(output, last.weight), last.bias)
        output = x + self.dropout(output if last is None else last(output))
        return output if self.pre_norm else self.norm(output)

    def _fused_add_norm(self, add_norm: dispatch.Kernel, x: Tensor, output: Tensor, bias: Tensor) -> Tensor:
        """Return LayerNorm(x + Dropout(output + bias)) by one kernel; half precision is enough for a normed stream."""
        norm = self.norm
        normed: Tensor = add_norm(
            x.to(output.dtype), output, bias, norm.weight, norm.bias, *self._dropout_seed(x), norm.eps
        )[0]
        return normed

    def add_then_norm(
        self, residual_norm: dispatch.Kernel, x: Tensor, output: Tensor, bias: Tensor, norm: nn.LayerNorm
    ) -> tuple[Tensor, Tensor]:
        """Return the sum s = x + Dropout(output + bias) and norm(s), the next layer's norm, by one kernel."""
        total, normed, *_ = residual_norm(x, output, bias, norm.weight, norm.bias, *self._dropout_seed(x), norm.eps)
        return total, normed

    def _dropout_seed(self, x: Tensor) -> tuple[Tensor | None, float]:
        """Return a seed for the dropout mask, None without dropout, and the dropout probability."""
        p = self.dropout.p if self.training else 0.0
        return torch.randint(2**62, (1,), device=x.device) if p else None, p


class Block(nn.Module):
    """Self-attention, in a decoder cross-attention to the source, and the feed-forward layer."""

    recomputes = False  # whether training keeps no activations of it, but computes them again (checkpointing)

    def __init__(self, config: BlockConfig, place: str, layer: int, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.attention, self.attention_residual = config.attention(place, layer, causal), Residual(config)
        self.cross_attention = config.attention("cross", layer) if cross else None
        self.cross_attention_residual = Residual(config) if cross else None
        self.feed_forward, self.feed_forward_residual = FeedForward(config), Residual(config)

    def forward(
        self,
        x: Tensor,
        layout: AttentionLayout,
        memory: Tensor | None = None,
        across: AttentionLayout | None = None,
        keep: list[Tensor] | None = None,
    ) -> Tensor:
        """Map (N, D) to (N, D), with self-attention by `layout` and cross-attention to memory (M, D) by `across`."""
        if self.recomputes and torch.is_grad_enabled():
            output: Tensor = checkpoint(self._apply_layers, x, layout, memory, across, keep, use_reentrant=False)
            return output
        return self._apply_layers(x, layout, memory, across, keep)

    def _apply_layers(
        self,
        x: Tensor,
        layout: AttentionLayout,
        memory: Tensor | None,
        across: AttentionLayout | None,
        keep: list[Tensor] | None,
    ) -> Tensor:
        for residual, layer, output_layer in self.layers(layout, memory, across, keep):
            x = residual(x, layer, output_layer)
        return x

    def layers(
        self, layout: AttentionLayout, memory: Tensor | None, across: AttentionLayout | None, keep: list[Tensor] | None
    ) -> list[tuple[Residual, Callable[[Tensor], Tensor], nn.Linear]]:
        """Return the sublayers in order: the residual connection, the layer up to its output projection, and that."""
        attention, cross, feed_forward = self.attention, self.cross_attention, self.feed_forward
        sublayers: list[tuple[Residual, Callable[[Tensor], Tensor], nn.Linear]] = [
            (self.attention_residual, lambda y: attention.concatenated_heads(y, layout, keep=keep), attention.out_proj)
        ]
        if cross is not None and self.cross_attention_residual is not None and across is not None:
            sublayers.append(
                (self.cross_attention_residual, lambda y: cross.concatenated_heads(y, across, memory), cross.out_proj)
            )
        return [*sublayers, (self.feed_forward_residual, feed_forward.hidden, feed_forward.fc2)]

    def step(self, x: Tensor, cache: KVCache, held: Tensor | None = None, kv_index: KVIndex | None = None) -> Tensor:
        """Map the next token of each hypothesis, (B, D) to (B, D); `held`: the source's keys, values (M, 2, H, d)."""

        def self_attention(y: Tensor) -> Tensor:
            q, kv = self.attention.project(y)
            return self.attention.attend_cached(q, cache.write(self.layer, kv), cache.kv_index)

        x = self.attention_residual(x, self_attention)
        if self.cross_attention is not None and self.cross_attention_residual is not None:
            assert held is not None
            assert kv_index is not None
            cross = self.cross_attention
            x = self.cross_attention_residual(x, lambda y: cross.attend_cached(cross.queries(y), held, kv_index))
        output: Tensor = self.feed_forward_residual(x, self.feed_forward)
        return output


class Blocks(nn.Module):
    """A stack of blocks; pre-norm stacks have one more layer norm at the end.

    With `shared`, all layers share the parameters of the first (Lan et al. 2020, section 3.1).
    """

    calls_singly = (
        False  # whether each block is a call: its weights are gathered, or its activations recomputed, for it
    )

    def __init__(
        self,
        config: BlockConfig,
        layers: int,
        place: str,
        causal: bool = False,
        cross: bool = False,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, place, depth, causal, cross) for depth in range(layers))
        self.norm = nn.LayerNorm(config.width, config.eps) if config.norm == "pre" else nn.Identity()
        for block in self.blocks[1:] if shared else ():
            _share_parameters(self.blocks[0], block)

    def forward(
        self,
        x: Tensor,
        layout: AttentionLayout,
        memory: Tensor | None = None,
        across: AttentionLayout | None = None,
        keep: list[Tensor] | None = None,
        layers: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Return the hidden states: the first block's input and each block's output, (N, D) each; the last one normed.

        With `layers` only those, such as the last one (-1); the others are not kept.
        """
        if memory is None and keep is None and layout.queries is layout.keys:
            encode = dispatch.encoder_kernel(self, x)
            if encode is not None and not self._captures():
                hidden_states: list[Tensor] = encode(self, x, layout.queries, layers)
                return hidden_states
        states = self._hidden_states(x, layout.with_schedule(x, self.shapes[0][1]), memory, across, keep)
        return states if layers is None else [states[layer] for layer in layers]

    def _hidden_states(
        self,
        x: Tensor,
        layout: AttentionLayout,
        memory: Tensor | None,
        across: AttentionLayout | None,
        keep: list[Tensor] | None,
    ) -> list[Tensor]:
        norm = None if self.calls_singly else self.norm
        if isinstance(norm, nn.LayerNorm) and (residual_norm := dispatch.residual_norm_kernel(x)):
            return self._fused_pre_norm(residual_norm, x, norm, layout, memory, across, keep)
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1], layout, memory, across, keep))
        states[-1] = self.norm(states[-1])
        return states

    def _captures(self) -> bool:
        """Return whether a layer's attention weights are captured, or a layer has no heads."""
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        return any(capturing(block.layer) or not block.attention.kept for block in blocks)

    def _fused_pre_norm(
        self,
        residual_norm: dispatch.Kernel,
        x: Tensor,
        last_norm: nn.LayerNorm,
        layout: AttentionLayout,
        memory: Tensor | None,
        across: AttentionLayout | None,
        keep: list[Tensor] | None,
    ) -> list[Tensor]:
        """Return the hidden states of a pre-norm stack, with one kernel a sum, in half precision, and its norm."""
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        layers = [block.layers(layout, memory, across, keep) for block in blocks]
        norms = iter([*(residual.norm for sublayers in layers for residual, *_ in sublayers), last_norm])
        x = dispatch.to_half(x)
        states, normed = [x], next(norms)(x)
        for sublayers in layers:
            for residual, layer, linear in sublayers:
                output = F.linear(layer(normed), linear.weight)
                x, normed = residual.add_then_norm(residual_norm, x, output, linear.bias, next(norms))
            states.append(x)
        return [*states[:-1], normed]

    def step(self, x: Tensor, cache: KVCache, held: tuple[Tensor, ...] = (), kv_index: KVIndex | None = None) -> Tensor:
        """Map the next token of each hypothesis, (B, D) to (B, D), and add its keys and values to the cache."""
        if decode_step := dispatch.decode_step_kernel(self, x):
            hidden: Tensor = decode_step(self, x, cache, held, kv_index)
            return hidden
        for depth, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            x = block.step(x, cache, held[depth] if held else None, kv_index)
        output: Tensor = self.norm(x)
        return output

    def layer_groups(self) -> list[list[nn.Module]]:
        """Return the modules of each layer, bottom to top; the final norm goes with the last layer."""
        *rest, last = self.blocks
        return [*([block] for block in rest), [last, self.norm]]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Number of heads of each layer's self-attention, and the head size."""
        attentions = [block.attention for block in self.blocks if isinstance(block, Block)]
        return [(len(attention.kept), attention.size) for attention in attentions]

    @property
    def cross_shapes(self) -> list[tuple[int, int]]:
        """The same of each layer's cross-attention."""
        crosses = [block.cross_attention for block in self.blocks if isinstance(block, Block)]
        return [(len(cross.kept), cross.size) for cross in crosses if cross is not None]

    def remember(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Return each layer's cross-attention keys and values (M, 2, H, d) of a source (M, D), once for all steps."""
        crosses = [block.cross_attention for block in self.blocks if isinstance(block, Block)]
        return tuple(cross.remember(memory) for cross in crosses if cross is not None)


def _share_parameters(first: nn.Module, other: nn.Module) -> None:
    """Replace a module's parameters by those of another one of the same structure."""
    for path, module in other.named_modules():
        for name in dict(module.named_parameters(recurse=False)):
            setattr(module, name, getattr(first.get_submodule(path), name))


def init_normal_(module: nn.Module, std: float = INIT_STD) -> None:
    """Initialize linear layers and embeddings as GPT and BERT do: weights from N(0, std²), biases 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
