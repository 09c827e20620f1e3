"""A layer of a Transformer encoder as one compiled function, for inference on one core of the CPU.

It computes what `weft.nn.kernels.numba.encoder` does by a function for each operation. Between two functions a thread
needs Python's lock: where several threads compute, or a server's event loop runs beside them, waiting for it takes
longer than a product of few tokens. Here a thread needs it once a layer.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from weft.nn.kernels.numba.attention import attend
from weft.nn.kernels.numba.matmul import FLOAT32, Format, PackedWeights, multiply_panels, pad_to_panels, uses_threads
from weft.nn.kernels.numba.rowwise import (
    Rows,
    activate_values,
    activation_code,
    add_norm,
    allocate_integers,
    integer_arrays,
    quantize_all,
)
from weft.nn.layers.packed_linear import Linear, packed
from weft.nn.layers.quantization import Int8Linear
from weft.nn.rnn.fused.codegen_numba import cached_njit
from weft.nn.transformer.blocks import Block


class Product(NamedTuple):
    """The packed weights of a linear layer and its padded bias, as arrays."""

    panels: Any
    scale: Any
    sums: Any
    bias: Any


class Norm(NamedTuple):
    """The weight and the bias of a layer norm, as arrays, and its epsilon."""

    weight: Any
    bias: Any
    eps: np.float32


def packed_products(block: Block, rows: int) -> list[Product] | None:
    """Return a block's linear layers as arrays; None where they are not packed, or share a product of so many rows."""
    layers = block.attention.in_proj, block.attention.out_proj, block.feed_forward.fc1, block.feed_forward.fc2
    if uses_threads(rows * max(layer.in_features * layer.out_features for layer in layers)):
        return None
    weights = [layer.packed if isinstance(layer, Int8Linear) else packed(layer.weight, rows) for layer in layers]
    if any(own is None for own in weights):
        return None
    return [_product(layer, own) for layer, own in zip(layers, weights, strict=True)]  # type: ignore[arg-type]


def _product(layer: Linear | Int8Linear, weights: PackedWeights) -> Product:
    bias = torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
    tensors = weights.panels, weights.scale, weights.sums, pad_to_panels(bias)
    return Product(*(tensor.numpy() for tensor in tensors))


def encode_layer(
    block: Block,
    products: list[Product],
    norms: tuple[nn.LayerNorm, nn.LayerNorm],
    x: Tensor,
    rows: Rows,
    starts: Tensor,
    buffer: Tensor,
    form: Format,
) -> tuple[Tensor, Rows]:
    """Return the output of a layer and its norm, the next layer's input; where norms come after sums both are one.

    `x` is the residual stream, and `rows` what the first product reads: x itself, or its norm. `buffer` has room for
    the queries, keys and values, and for the hidden layer.
    """
    attention, feed_forward = block.attention, block.feed_forward
    y, z = torch.empty_like(x), torch.empty_like(x)
    attended, middle, output = (
        Rows(torch.empty(len(x), size), allocate_integers(len(x), size, form))
        for size in (attention.out_proj.in_features, x.shape[1], x.shape[1])
    )
    _encode_layer(
        x.numpy(),
        _arrays(rows),
        starts.numpy(),
        len(attention.kept),
        attention.causal,
        block.attention_residual.pre_norm,
        activation_code(feed_forward.activation),
        feed_forward.fc1.out_features,
        tuple(products),
        tuple(Norm(norm.weight.detach().numpy(), norm.bias.detach().numpy(), np.float32(norm.eps)) for norm in norms),
        buffer.numpy(),
        _arrays(attended),
        _arrays(middle),
        integer_arrays(allocate_integers(len(x), feed_forward.fc1.out_features, form)),
        y.numpy(),
        z.numpy(),
        _arrays(output),
        form.steps,
        None if form is FLOAT32 else True,
    )
    return z if block.attention_residual.pre_norm else output.values, output


def _arrays(rows: Rows) -> tuple[Any, ...]:
    return rows.values.numpy(), *integer_arrays(rows.integers)


@cached_njit()
def _multiply(layer, rows, out, is_integer):  # type: ignore[no-untyped-def]
    values, integers, scale, zero = rows
    count = layer.panels.shape[0]
    if is_integer is None:  # known when it is compiled
        multiply_panels(0, count, values, scale, zero, layer.panels, layer.scale, layer.sums, layer.bias, out)
    else:
        multiply_panels(0, count, integers, scale, zero, layer.panels, layer.scale, layer.sums, layer.bias, out)


@cached_njit()
def _encode_layer(  # type: ignore[no-untyped-def]
    x,
    rows,
    starts,
    heads,
    causal,
    pre_norm,
    activation,
    hidden_size,
    products,
    norms,
    buffer,
    attended,
    middle,
    integers,
    y,
    z,
    output,
    steps,
    is_integer,
):
    in_proj, out_proj, fc1, fc2 = products
    N, inner = attended[0].shape
    qkv = buffer[: N * 3 * inner].reshape(N, 3 * inner)
    _multiply(in_proj, rows, qkv, is_integer)
    attend(heads, causal, qkv, starts, attended[0])
    if is_integer is not None:
        quantize_all(attended[0], attended[1], attended[2], attended[3], steps)
    _multiply(out_proj, attended, y, is_integer)
    weight, bias, eps = norms[0]
    add_norm(x, y, weight, bias, eps, middle[0], middle[1], middle[2], middle[3], steps)
    hidden = buffer[: N * hidden_size].reshape(N, hidden_size)
    _multiply(fc1, middle, hidden, is_integer)
    activate_values(activation, hidden, integers[0], integers[1], integers[2], steps)
    _multiply(fc2, (hidden, integers[0], integers[1], integers[2]), z, is_integer)
    weight, bias, eps = norms[1]
    residual = y if pre_norm else middle[0]
    add_norm(residual, z, weight, bias, eps, output[0], output[1], output[2], output[3], steps)
