"""Inference of a Transformer encoder on the CPU: matrix products, and numba loops between them.

The loops (`weft.nn.kernels.numba.rowwise`, `weft.nn.kernels.numba.attention`) fuse what would else be an operation, and
a pass over memory, for each step. The batch is split into parts, and each part goes through all layers before the next
one, on the calling thread: so a layer's output is still in the cache when the next layer reads it, whatever the batch
size. Threads are for whole batches (`weft.tasks.inference_batches.map_in_threads`). On one core, and with short
sequences, a layer is one function (`weft.nn.kernels.numba.encoder_layer`).
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.attention.multihead import MultiHeadAttention
from weft.nn.kernels.numba.attention import MAX_LENGTH, ragged_self_attention
from weft.nn.kernels.numba.encoder_layer import encode_layer, packed_products
from weft.nn.kernels.numba.matmul import FLOAT32, Format
from weft.nn.kernels.numba.microkernel import COLUMNS
from weft.nn.kernels.numba.rowwise import Rows, activate, add_norm_rows, quantize_rows
from weft.nn.layers.packed_linear import Linear
from weft.nn.layers.quantization import Int8Linear
from weft.nn.transformer.blocks import Block, Blocks
from weft.tokens import Tokens

_PART_TOKENS = 512  # tokens that go through all layers together


def encode(blocks: Blocks, x: Tensor, tokens: Tokens, layers: Sequence[int] | None = None) -> list[Tensor]:
    """Return the hidden states: the first block's input and each block's output, or only `layers`; the last normed."""
    depths = range(len(blocks.blocks) + 1)
    chosen = depths if layers is None else [depths[layer] for layer in layers]
    outputs = {depth: _allocate(x.numel()).view(x.shape) if depth else x for depth in {0, *chosen}}
    for first, last in pairwise(_part_bounds(tokens)):
        _encode_part(blocks, outputs, tokens, first, last)
    return [outputs[depth] for depth in chosen]


def _part_bounds(tokens: Tokens) -> list[int]:
    """Split the sequences into parts of similar numbers of tokens; return each part's first sequence, and the end."""
    count = -(-len(tokens.ids) // _PART_TOKENS)
    ends = torch.arange(1, count).mul(len(tokens.ids)) // count
    bounds = torch.searchsorted(tokens.starts, ends.int()).unique().tolist()
    return [0, *(bound for bound in bounds if 0 < bound < len(tokens)), len(tokens)]


def _encode_part(blocks: Blocks, outputs: dict[int, Tensor], tokens: Tokens, first: int, last: int) -> None:
    """Put the sequences first … last through all layers, and write the hidden states that are wanted to `outputs`."""
    starts = tokens.starts[first : last + 1]
    part = {depth: states[int(starts[0]) : int(starts[-1])] for depth, states in outputs.items()}
    if len(part[0]):
        with torch.inference_mode():
            _encode_layers(blocks, part, starts - starts[0], int(tokens.lengths[first:last].max()))


def _encode_layers(blocks: Blocks, outputs: dict[int, Tensor], starts: Tensor, longest: int) -> None:
    layers, final_norm = [block for block in blocks.blocks if isinstance(block, Block)], blocks.norm
    norms = [residual.norm for block in layers for residual in (block.attention_residual, block.feed_forward_residual)]
    x, form = outputs[0], getattr(layers[0].feed_forward.fc1, "form", FLOAT32)
    if pre_norm := isinstance(final_norm, nn.LayerNorm):
        norms.append(final_norm)
    rows = quantize_rows(norms.pop(0)(x) if pre_norm else x, form)
    buffer = _allocate(len(x) * max(3 * x.shape[1], layers[0].feed_forward.fc1.out_features) + COLUMNS)
    buffer[-COLUMNS:] = 0  # attention reads the last panel of values to its end
    for depth, block in enumerate(layers, 1):
        inputs = (norms[2 * depth - 2], norms[2 * depth - 1]), x, rows, starts, buffer, form
        products = packed_products(block, len(x)) if longest <= MAX_LENGTH else None
        x, rows = _layer_by_operations(block, *inputs) if products is None else encode_layer(block, products, *inputs)
        if depth in outputs:
            outputs[depth].copy_(rows.values if depth == len(layers) else x)


def _layer_by_operations(
    block: Block,
    norms: tuple[nn.LayerNorm, nn.LayerNorm],
    x: Tensor,
    rows: Rows,
    starts: Tensor,
    buffer: Tensor,
    form: Format,
) -> tuple[Tensor, Rows]:
    """Return the output of a layer and its norm, the next layer's input, by a function for each operation."""
    pre_norm, (middle_norm, next_norm) = block.attention_residual.pre_norm, norms
    rows = quantize_rows(_attend(block.attention, rows, starts, buffer), form)
    y = _linear(block.attention.out_proj, rows)
    rows = add_norm_rows(x, y, middle_norm, form)
    x = y if pre_norm else rows.values
    rows = activate(block.feed_forward.activation, _linear(block.feed_forward.fc1, rows, buffer), form)
    y = _linear(block.feed_forward.fc2, rows)
    rows = add_norm_rows(x, y, next_norm, form)
    return y if pre_norm else rows.values, rows


def _allocate(size: int) -> Tensor:
    """Return uninitialised memory in huge pages, as numpy allocates it: getting small ones costs more than writing."""
    return torch.from_numpy(np.empty(size, np.float32))


def _linear(layer: Linear | Int8Linear, rows: Rows, memory: Tensor | None = None) -> Tensor:
    """Return a linear layer's output, in the buffer `memory` where that is given."""
    shape = len(rows.values), layer.out_features
    out = (_allocate(shape[0] * shape[1]) if memory is None else memory[: shape[0] * shape[1]]).view(shape)
    if isinstance(layer, Int8Linear):
        return layer.product(rows, out)
    product = layer.product(rows.values, layer.bias, out)
    return torch.addmm(layer.bias, rows.values, layer.weight.t(), out=out) if product is None else product


def _attend(attention: MultiHeadAttention, rows: Rows, starts: Tensor, memory: Tensor) -> Tensor:
    qkv, heads = _linear(attention.in_proj, rows, memory), len(attention.kept)
    attend = ragged_self_attention if int(starts.diff().max()) <= MAX_LENGTH else _attend_sdpa
    return attend(qkv, starts, heads, attention.causal)


def _attend_sdpa(qkv: Tensor, starts: Tensor, heads: int, causal: bool) -> Tensor:
    """Return the same as `attend` for long sequences, by PyTorch's kernel, without copying its inputs."""
    heads_qkv = qkv.unflatten(1, (3, heads, -1))
    out = torch.empty_like(heads_qkv[:, 0], memory_format=torch.contiguous_format)
    for first, last in pairwise(starts.tolist()):
        q, k, v = heads_qkv[first:last].permute(1, 2, 0, 3)[:, None]  # (1, H, T, d)
        out[first:last] = F.scaled_dot_product_attention(q, k, v, is_causal=causal)[0].transpose(0, 1)
    return out.flatten(1)
