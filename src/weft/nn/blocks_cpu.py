"""A stack of blocks that answers on the CPU: matrix products, and between them compiled loops.

Loops (`weft.nn.rows_cpu`, `weft.nn.attention_cpu`) do in one go what else takes an operation for each step and a walk
through memory for each operation. Sequences are cut into parts, and each part goes through all layers before the next
one comes, on one thread: so what a layer leaves is near when the next one reads it, no thread waits for another, and it
does not matter how large the batch is.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import chain, pairwise
from threading import Barrier

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.attention import MultiHead
from weft.nn.attention_cpu import FEW, attend
from weft.nn.quantized import Int8Linear
from weft.nn.rows_cpu import Rows, activate, add_norm, round_rows
from weft.nn.transformer import Block, Blocks
from weft.tokens import Tokens

_PART = 2048  # tokens that go through all layers together


def read(blocks: Blocks, x: Tensor, tokens: Tokens, layers: Sequence[int] | None = None) -> list[Tensor]:
    """Return the chosen ones of what goes into the first block, and what comes out of each; the last one is normed."""
    all_of_them = range(len(blocks.blocks) + 1)
    wanted = all_of_them if layers is None else [all_of_them[layer] for layer in layers]
    found = {depth: _room(x.numel()).view(x.shape) if depth else x for depth in {0, *wanted}}
    threads = torch.get_num_threads()
    cuts = _cuts(tokens, threads)
    over = map if threads == 1 or len(cuts) == 2 else _pool(threads).map
    list(over(partial(_read_part, blocks, found, tokens), cuts, cuts[1:]))
    return [found[depth] for depth in wanted]


def _each(blocks: Blocks) -> list[Block]:
    return list(blocks.blocks)  # type: ignore[arg-type]


def _cuts(tokens: Tokens, threads: int) -> list[int]:
    """Cut the sequences into parts of like many tokens: where each part begins, and where the last one ends."""
    count = -(-len(tokens.ids) // (_PART * threads)) * threads
    ends = torch.arange(1, count).mul(len(tokens.ids)) // count
    cuts = torch.searchsorted(tokens.starts, ends.int()).unique().tolist()
    return [0, *(cut for cut in cuts if 0 < cut < len(tokens)), len(tokens)]


def _read_part(blocks: Blocks, found: dict[int, Tensor], tokens: Tokens, first: int, last: int) -> None:
    """Take some of the sequences through all layers, and write what comes out where it is asked for."""
    starts = tokens.starts[first : last + 1]
    part = {depth: one[int(starts[0]) : int(starts[-1])] for depth, one in found.items()}
    if len(part[0]):
        with torch.inference_mode():  # which is a thread's own
            _through(blocks, part, starts - starts[0], int(tokens.lengths[first:last].max()))


def _through(blocks: Blocks, found: dict[int, Tensor], starts: Tensor, longest: int) -> None:
    each, last = _each(blocks), blocks.norm
    norms = iter([around.norm for block in each for around in (block.around_attention, block.around_feed)])
    x = found[0]
    if before := isinstance(last, nn.LayerNorm):
        norms = chain(norms, [last])
    first = next(norms)(x) if before else x
    read = round_rows(first) if isinstance(each[0].feed.inner, Int8Linear) else Rows.over(first, False)
    wide = max(3 * x.shape[1], each[0].feed.inner.out_features)
    room = None if read.rounded else _room(len(x) * wide)  # for what is wide; products in int8 find their own
    for depth, block in enumerate(each, 1):
        look, feed = block.attention, block.feed
        seen = _attended(look, read, starts, longest, room)
        made = _product(look.output, seen)
        read = add_norm(x, made, seen, look.output.bias, next(norms))
        x = made if before else read.values
        inner = activate(feed.activation, _product(feed.inner, read, room), read, feed.inner.bias)
        made = _product(feed.outer, inner)
        read = add_norm(x, made, inner, feed.outer.bias, next(norms))
        x = made if before else read.values
        if depth in found:
            found[depth].copy_(read.values if depth == len(each) else x)


def _room(size: int) -> Tensor:
    """Get memory in huge pages, as numpy asks for it: in small ones much of it costs more to come by than to write."""
    return torch.from_numpy(np.empty(size, np.float32))


def _product(layer: nn.Linear | Int8Linear, rows: Rows, room: Tensor | None = None) -> Tensor:
    """Multiply with a layer's matrix, in `room` where there is some; what is found is yet to be scaled, and shifted."""
    if isinstance(layer, Int8Linear):
        return layer.product(rows.bytes_)
    shape = len(rows.values), layer.out_features
    out = None if room is None else room[: shape[0] * shape[1]].view(shape)
    return torch.mm(rows.values, layer.weight.t(), out=out)


def _attended(look: MultiHead, read: Rows, starts: Tensor, longest: int, room: Tensor | None) -> Rows:
    known = _product(look.query, read, room), read.scale, look.query.bias, starts, len(look.kept), look.causal
    found = attend(*known) if longest <= FEW else _attend_each(*known)
    return round_rows(found) if read.rounded else Rows.over(found, False)


def _attend_each(found: Tensor, scale: Tensor, bias: Tensor, starts: Tensor, heads: int, causal: bool) -> Tensor:
    """Do what `attend` does for long sequences, by the library's kernel: no copies are made of what it reads."""
    whole = torch.addcmul(bias, found, scale).unflatten(1, (3, heads, -1))
    out = torch.empty_like(whole[:, 0], memory_format=torch.contiguous_format)
    for first, last in pairwise(starts.tolist()):
        q, k, v = whole[first:last].permute(1, 2, 0, 3)[:, None]  # (1, H, T, d)
        out[first:last] = F.scaled_dot_product_attention(q, k, v, is_causal=causal)[0].transpose(0, 1)
    return out.flatten(1)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Start threads whose products are made on one thread each."""
    together = Barrier(threads)

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread takes what was set last when it first asks
        together.wait()

    pool = ThreadPoolExecutor(threads, "weft-read", begin)
    list(pool.map(int, range(threads)))  # all of them begin: as long as one waits, none is free for the next call
    torch.set_num_threads(threads)
    return pool


os.register_at_fork(after_in_child=_pool.cache_clear)
