"""A stack of blocks that answers on the CPU: matrix products, and between them compiled loops.

Loops (`weft.nn.kernels.numba.rowwise`, `weft.nn.kernels.numba.attention`) do in one go what else takes an operation for
each step and a walk through memory for each operation. Sequences are cut into parts, and each part goes through all
layers before the next one comes, on the calling thread: so what a layer leaves is near when the next one reads it, and
it does not matter how large the batch is. Threads are for whole batches (`weft.tasks.inference.side_by_side`).
"""

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.attention.multihead import MultiHeadAttention
from weft.nn.kernels.numba.attention import FEW, attend
from weft.nn.kernels.numba.matmul import FLOAT32
from weft.nn.kernels.numba.rowwise import Rows, activate, add_norm, quantize_rows
from weft.nn.layers.linear import Linear
from weft.nn.layers.quantization import Int8Linear
from weft.nn.transformer.blocks import Block, Blocks
from weft.tokens import Tokens

_PART = 512  # tokens that go through all layers together


def read(blocks: Blocks, x: Tensor, tokens: Tokens, layers: Sequence[int] | None = None) -> list[Tensor]:
    """Return the chosen ones of what goes into the first block, and what comes out of each; the last one is normed."""
    all_of_them = range(len(blocks.blocks) + 1)
    wanted = all_of_them if layers is None else [all_of_them[layer] for layer in layers]
    outputs = {depth: _memory(x.numel()).view(x.shape) if depth else x for depth in {0, *wanted}}
    for first, last in pairwise(_cuts(tokens)):
        _read_part(blocks, outputs, tokens, first, last)
    return [outputs[depth] for depth in wanted]


def _cuts(tokens: Tokens) -> list[int]:
    """Cut the sequences into parts of like many tokens: where each part begins, and where the last one ends."""
    count = -(-len(tokens.ids) // _PART)
    ends = torch.arange(1, count).mul(len(tokens.ids)) // count
    cuts = torch.searchsorted(tokens.starts, ends.int()).unique().tolist()
    return [0, *(cut for cut in cuts if 0 < cut < len(tokens)), len(tokens)]


def _read_part(blocks: Blocks, outputs: dict[int, Tensor], tokens: Tokens, first: int, last: int) -> None:
    """Take some of the sequences through all layers, and write what comes out where it is asked for."""
    starts = tokens.starts[first : last + 1]
    part = {depth: states[int(starts[0]) : int(starts[-1])] for depth, states in outputs.items()}
    if len(part[0]):
        with torch.inference_mode():
            _through(blocks, part, starts - starts[0], int(tokens.lengths[first:last].max()))


def _through(blocks: Blocks, outputs: dict[int, Tensor], starts: Tensor, longest: int) -> None:
    layers, last = [block for block in blocks.blocks if isinstance(block, Block)], blocks.norm
    norms = iter(
        [around.norm for block in layers for around in (block.attention_residual, block.feed_forward_residual)]
    )
    x, form = outputs[0], getattr(layers[0].feed_forward.fc1, "form", FLOAT32)
    if pre_norm := isinstance(last, nn.LayerNorm):
        norms = chain(norms, [last])
    rows = quantize_rows(next(norms)(x) if pre_norm else x, form)
    wide = _memory(len(x) * max(3 * x.shape[1], layers[0].feed_forward.fc1.out_features))
    for depth, block in enumerate(layers, 1):
        rows = quantize_rows(_attend(block.attention, rows, starts, longest, wide), form)
        y = _product(block.attention.out_proj, rows)
        rows = add_norm(x, y, next(norms), form)
        x = y if pre_norm else rows.values
        rows = activate(block.feed_forward.activation, _product(block.feed_forward.fc1, rows, wide), form)
        y = _product(block.feed_forward.fc2, rows)
        rows = add_norm(x, y, next(norms), form)
        x = y if pre_norm else rows.values
        if depth in outputs:
            outputs[depth].copy_(rows.values if depth == len(layers) else x)


def _memory(size: int) -> Tensor:
    """Get memory in huge pages, as numpy asks for it: in small ones much of it costs more to come by than to write."""
    return torch.from_numpy(np.empty(size, np.float32))


def _product(layer: Linear | Int8Linear, rows: Rows, memory: Tensor | None = None) -> Tensor:
    """Return a dense layer's output, in `memory` where that is given."""
    shape = len(rows.values), layer.out_features
    out = (_memory(shape[0] * shape[1]) if memory is None else memory[: shape[0] * shape[1]]).view(shape)
    if isinstance(layer, Int8Linear):
        return layer.product(rows, out)
    product = layer.product(rows.values, layer.bias, out)
    return torch.addmm(layer.bias, rows.values, layer.weight.t(), out=out) if product is None else product


def _attend(attention: MultiHeadAttention, rows: Rows, starts: Tensor, longest: int, memory: Tensor) -> Tensor:
    qkv, heads = _product(attention.in_proj, rows, memory), len(attention.kept)
    return (attend if longest <= FEW else _attend_each)(qkv, starts, heads, attention.causal)


def _attend_each(qkv: Tensor, starts: Tensor, heads: int, causal: bool) -> Tensor:
    """Do what `attend` does for long sequences, by the library's kernel: no copies are made of what it reads."""
    whole = qkv.unflatten(1, (3, heads, -1))
    out = torch.empty_like(whole[:, 0], memory_format=torch.contiguous_format)
    for first, last in pairwise(starts.tolist()):
        q, k, v = whole[first:last].permute(1, 2, 0, 3)[:, None]  # (1, H, T, d)
        out[first:last] = F.scaled_dot_product_attention(q, k, v, is_causal=causal)[0].transpose(0, 1)
    return out.flatten(1)
