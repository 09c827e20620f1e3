"""The layers of BERT and GPT as ONNX nodes, over padded sequences: `weft.models` has them without padding.

    x (B, T, D)                 hidden states; rows are padded on the right
    mask (B, T)                 1 for a token, 0 for padding
    bias (B, 1, 1 or T, T)      added to the scores of attention: 0 where a query attends to a key, else `LOWEST`

Equations are those of `weft.nn.transformer.blocks`, `weft.models.bert` and `weft.models.gpt`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto
from torch import nn

from weft.formats.onnx.graph import Graph
from weft.models.bert import BERT
from weft.nn.attention.multihead import MultiHeadAttention
from weft.nn.layers.pooling import PoolingMode
from weft.nn.transformer.blocks import Block, Residual

LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class PaddedTokens:
    """The inputs, (B, T) each: token ids, the mask, and the segments of a model that has them."""

    ids: str
    mask: str
    segments: str | None


def linear(graph: Graph, x: str, layer: nn.Linear, part: int = 0, parts: int = 1) -> str:
    """Return x Wᵀ + b; where several outputs are stacked in the layer, one of them."""
    product = graph.add("MatMul", x, graph.weight(layer.weight, part, parts, transposed=True))
    return graph.add("Add", product, graph.weight(layer.bias, part, parts))


def layer_norm(graph: Graph, x: str, norm: nn.Module) -> str:
    """Return the layer norm; of an identity, x."""
    if not isinstance(norm, nn.LayerNorm):
        return x
    return graph.add("LayerNormalization", x, graph.weight(norm.weight), graph.weight(norm.bias), epsilon=norm.eps)


def gelu(graph: Graph, x: str) -> str:
    """Return x Φ(x) = x (1 + erf(x / √2)) / 2."""
    doubled = graph.add("Add", graph.add("Erf", graph.add("Div", x, graph.floats(math.sqrt(2)))), graph.floats(1))
    return graph.add("Mul", graph.add("Mul", x, doubled), graph.floats(0.5))


def gelu_tanh(graph: Graph, x: str) -> str:
    """Return x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2."""
    cubic = graph.add("Add", x, graph.add("Mul", graph.floats(0.044715), graph.add("Pow", x, graph.floats(3))))
    tanh = graph.add("Tanh", graph.add("Mul", graph.floats(math.sqrt(2 / math.pi)), cubic))
    return graph.add("Mul", graph.add("Mul", x, graph.add("Add", tanh, graph.floats(1))), graph.floats(0.5))


ACTIVATIONS: dict[str, Callable[[Graph, str], str]] = {
    "relu": lambda graph, x: graph.add("Relu", x),
    "gelu": gelu,
    "gelu-tanh": gelu_tanh,
    "silu": lambda graph, x: graph.add("Mul", x, graph.add("Sigmoid", x)),
    "tanh": lambda graph, x: graph.add("Tanh", x),
}


def attention(graph: Graph, x: str, layer: MultiHeadAttention, bias: str) -> str:
    """Return [softmax(Q Kᵀ / √d + bias) V of each head] W_O."""
    heads, order = graph.numbers(0, 0, len(layer.kept), layer.size), [0, 2, 1, 3]
    q, k, v = (
        graph.add("Transpose", graph.add("Reshape", linear(graph, x, layer.in_proj, part, 3), heads), perm=perm)
        for part, perm in enumerate((order, [0, 2, 3, 1], order))
    )
    scores = graph.add("Div", graph.add("MatMul", q, k), graph.floats(math.sqrt(layer.size)))
    weights = graph.add("Softmax", graph.add("Add", scores, bias), axis=-1)
    output = graph.add("Transpose", graph.add("MatMul", weights, v), perm=order)
    concatenated = graph.add("Reshape", output, graph.numbers(0, 0, len(layer.kept) * layer.size))
    return linear(graph, concatenated, layer.out_proj)


def attention_bias(graph: Graph, mask: str, causal: bool) -> str:
    """Return what is added to the scores: no token attends to padding or, with `causal`, to what comes after it."""
    # Two nodes, not one, as ONNX Runtime's optimizer for BERT expects a mask.
    row = graph.add("Unsqueeze", graph.add("Unsqueeze", mask, graph.numbers(1)), graph.numbers(2))
    seen = graph.add("Cast", row, to=TensorProto.FLOAT)
    bias = graph.add("Mul", graph.add("Sub", graph.floats(1), seen), graph.floats(LOWEST))
    if not causal:
        return bias
    length = graph.add("Squeeze", graph.add("Shape", mask, start=1))
    index = graph.add("Range", graph.number(0), length, graph.number(1))
    query, key = (graph.add("Unsqueeze", index, graph.numbers(axis)) for axis in (1, 0))
    is_later = graph.add("Cast", graph.add("Greater", key, query), to=TensorProto.FLOAT)
    return graph.add("Min", bias, graph.add("Mul", is_later, graph.floats(LOWEST)))


def residual(graph: Graph, x: str, connection: Residual, layer: Callable[[str], str]) -> str:
    """Return LayerNorm(x + layer(x)), or x + layer(LayerNorm(x))."""
    output = layer(layer_norm(graph, x, connection.norm) if connection.pre_norm else x)
    total = graph.add("Add", output, x)
    return total if connection.pre_norm else layer_norm(graph, total, connection.norm)


def block(graph: Graph, x: str, layer: Block, activation: str, bias: str) -> str:
    """Return the output of a block: self-attention, then the feed-forward layer."""
    x = residual(graph, x, layer.attention_residual, lambda y: attention(graph, y, layer.attention, bias))

    def feed_forward(y: str) -> str:
        hidden = ACTIVATIONS[activation](graph, linear(graph, y, layer.feed_forward.fc1))
        return linear(graph, hidden, layer.feed_forward.fc2)

    return residual(graph, x, layer.feed_forward_residual, feed_forward)


def hidden_states(graph: Graph, body: Any, tokens: PaddedTokens) -> list[str]:
    """Return the embeddings and the output of each layer, (B, T, D), as `encode` of a BERT or a GPT numbers them."""
    is_bert = isinstance(body, BERT)
    stack = body.encoder if is_bert else body.decoder
    states = [_bert_embeddings(graph, body, tokens) if is_bert else _token_embeddings(graph, body, tokens)]
    bias = attention_bias(graph, tokens.mask, causal=not is_bert)
    for layer in stack.blocks:
        states.append(block(graph, states[-1], layer, body.config.activation, bias))
    return [*states[:-1], layer_norm(graph, states[-1], stack.norm)]


def _token_embeddings(graph: Graph, body: Any, tokens: PaddedTokens, offset: int = 0) -> str:
    """Return the embeddings of the tokens and of their positions, the first of which is `offset`.

    The sum is an error where rows are longer than the table of positions.
    """
    embedded = graph.add("Gather", graph.weight(body.embed.weight), tokens.ids)
    stop = graph.add("Add", graph.add("Shape", tokens.ids, start=1), graph.numbers(offset))
    table = graph.weight(body.positions.table.weight)
    positions = graph.add("Slice", table, graph.numbers(offset), stop, graph.numbers(0))
    return graph.add("Add", embedded, positions)


def _bert_embeddings(graph: Graph, body: BERT, tokens: PaddedTokens) -> str:
    """Return the same with the embeddings of the segments, normed and projected to the width."""
    x = _token_embeddings(graph, body, tokens, body.config.offset)
    if body.segments is not None:
        segments = graph.number(0) if tokens.segments is None else tokens.segments
        x = graph.add("Add", x, graph.add("Gather", graph.weight(body.segments.weight), segments))
    x = layer_norm(graph, x, body.norm)
    return x if body.project is None else linear(graph, x, body.project)


def pool(graph: Graph, x: str, mask: str, mode: PoolingMode) -> str:
    """Return one vector a row, (B, D): of the first or last token, or the mean or maximum over all."""
    if mode == "cls":
        return graph.add("Gather", x, graph.number(0), axis=1)
    if mode == "last":
        count = graph.add("ReduceSum", mask, graph.numbers(1), keepdims=1)
        return graph.add("GatherND", x, graph.add("Sub", count, graph.number(1)), batch_dims=1)
    seen = graph.add("Cast", mask, to=TensorProto.FLOAT)
    if mode == "max":
        is_token = graph.add("Cast", graph.add("Unsqueeze", mask, graph.numbers(2)), to=TensorProto.BOOL)
        return graph.add("ReduceMax", graph.add("Where", is_token, x, graph.floats(LOWEST)), axes=[1], keepdims=0)
    row = graph.add("Unsqueeze", seen, graph.numbers(1))  # (B, 1, T)
    total = graph.add("Squeeze", graph.add("MatMul", row, x), graph.numbers(1))
    count = graph.add("Max", graph.add("ReduceSum", seen, graph.numbers(1), keepdims=1), graph.floats(1))
    return graph.add("Div", total, count)


def normalize(graph: Graph, x: str) -> str:
    """Return vectors of length 1."""
    length = graph.add("ReduceL2", x, axes=[-1], keepdims=1)
    return graph.add("Div", x, graph.add("Max", length, graph.floats(1e-12)))
