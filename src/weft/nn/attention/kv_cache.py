"""What a model that attends remembers while it generates: keys and values, written once and never moved.

A `KVStorage` holds, for each layer, (rows, room) places for keys and values. A step writes those of its token into the
next column, hypothesis b into row b. An index a hypothesis says whose row it has in the columns before, and that index
is all that a beam search reorders: no key or value is ever copied for it.

States are values: of two steps from one state, the second finds its column taken and writes into a copy of the log. A
`StaticKVCache` is none: it stays where it is in memory, so that a CUDA graph can hold a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from weft.nn.kernels.numba.decode_attention import attend_in_loops
from weft.tokens import Tokens

ROOM = 64  # columns at first; doubled where a text grows beyond them


class KVIndex(NamedTuple):
    """Which keys and values a hypothesis sees: those at places[b, first[b]:last[b]] of all that are held."""

    places: Tensor  # (B, T) int32
    first: Tensor  # (B,) int32
    last: Tensor  # (B,) int32

    @classmethod
    def of(cls, tokens: Tokens) -> "KVIndex":
        """Each sequence sees its own tokens, held end to end."""
        step = torch.arange(max(tokens.longest, 1), dtype=torch.int32, device=tokens.device)
        places = (tokens.starts[:-1, None] + step).clamp(max=max(len(tokens.ids) - 1, 0))
        return cls(places, torch.zeros_like(tokens.starts[1:]), tokens.starts.diff())

    def select(self, rows: Tensor) -> "KVIndex":
        """Return what hypothesis rows[b] sees, for each b."""
        return KVIndex(*(part.index_select(0, rows) for part in self))


@dataclass
class KVStorage:
    """Keys and values of all layers, (R, room, 2, H, d) each, and how many columns are written."""

    layers: list[Tensor]
    filled: int

    @property
    def rows(self) -> int:
        """How many hypotheses can write."""
        return self.layers[0].shape[0]

    @property
    def room(self) -> int:
        """How many columns there are."""
        return self.layers[0].shape[1]

    def enlarged(self, rows: int, filled: int) -> "KVStorage":
        """Copy the first `filled` columns into a log with at least so many rows, and with room for one more column."""
        room = self.room
        while room <= filled:
            room *= 2
        layers = []
        for old in self.layers:
            new = old.new_empty(max(rows, self.rows), room, *old.shape[2:])
            new[: self.rows, :filled] = old[:, :filled]
            layers.append(new)
        return KVStorage(layers, filled)


@dataclass(frozen=True)
class KVCache:
    """What the hypotheses have read: whose columns of the log are whose."""

    log: KVStorage
    index: Tensor  # (B, room) int32: the place in the log of each column, row · room + column
    first: Tensor  # (B,) int32: prompts end at one column, so a shorter one begins later
    end: int  # columns that are written
    at: Tensor  # (1,) int64: the same, on the device

    @classmethod
    def of(cls, prompt: Tokens, layers: Sequence[Tensor]) -> "KVCache":
        """Hold the keys and values (N, 2, H, d) that the layers made of the prompts."""
        rows, end, device = len(prompt), prompt.longest, prompt.device
        room = ROOM * (end // ROOM + 1)
        lengths = prompt.starts.diff()
        first = end - lengths
        step = torch.arange(len(prompt.ids), device=device)
        row = torch.bucketize(step, prompt.starts[1:], right=True)
        place = row * room + step - prompt.starts[row] + first[row]  # prompts end together
        log = KVStorage([kv.new_empty(rows * room, *kv.shape[1:]).index_copy_(0, place, kv) for kv in layers], end)
        log.layers = [one.unflatten(0, (rows, room)) for one in log.layers]
        index = torch.arange(rows * room, dtype=torch.int32, device=device).view(rows, room)
        return cls(log, index, first, end, torch.full((1,), end, device=device))

    def select(self, rows: Tensor) -> "KVCache":
        """Return the cache whose hypothesis b continues the old hypothesis rows[b]; keys and values stay."""
        return replace(self, index=self.index.index_select(0, rows), first=self.first.index_select(0, rows))

    def opened(self) -> "KVCache":
        """Return the cache with one more column, still to be written."""
        rows, log, index = len(self.first), self.log, self.index
        if rows > log.rows or self.end >= log.room or log.filled != self.end:
            log = log.enlarged(rows, self.end)
            index = _moved(index, self.log.room, log.room)
        log.filled = self.end + 1
        own = torch.arange(rows, dtype=torch.int32, device=index.device) * log.room
        index = index.index_copy(1, self.at, (own + self.at.int())[:, None])
        return KVCache(log, index, self.first, self.end + 1, self.at + 1)

    def write(self, layer: int, kv: Tensor) -> Tensor:
        """Write a layer's keys and values (B, 2, H, d) into the last column; return all that are held, (M, 2, H, d)."""
        held = self.log.layers[layer]
        held[: len(kv), self.end - 1] = kv
        return held.flatten(0, 1)

    @property
    def reach(self) -> KVIndex:
        """What each hypothesis sees: all columns from its first one on."""
        return KVIndex(self.index, self.first, self.at.int().expand(len(self.first)))

    @property
    def position(self) -> Tensor:
        """Where the token in the last column stands in its text, from 0: (B,)."""
        return self.at - 1 - self.first


@dataclass(frozen=True)
class StaticKVCache(KVCache):
    """A cache that stays where it is: a step goes on in place, and `end` is how many columns there are.

    `select` is for hypotheses that go on with what another one of the same prompt has read; it is done by the step.
    """

    rows: Tensor | None = None  # (B,) whom each hypothesis continues; None: itself

    @property
    def room(self) -> int:
        """How many tokens of a hypothesis it holds."""
        return self.end

    @classmethod
    def like(cls, other: KVCache, rows: int, room: int) -> "StaticKVCache":
        """Make an empty one for so many hypotheses and columns."""
        log = KVStorage([held.new_zeros(rows, room, *held.shape[2:]) for held in other.log.layers], room)
        index, first, at = (other.first.new_zeros(size) for size in ((rows, room), rows, 1))
        return cls(log, index, first, room, at)

    def take(self, other: KVCache, rows: Tensor) -> None:
        """Become what the hypotheses `rows` of the other cache are, each with a copy of what it has read."""
        columns = min(other.end, self.end)
        places = other.index[rows, :columns].long()
        for mine, held in zip(self.log.layers, other.log.layers, strict=True):
            mine[:, :columns] = held.flatten(0, 1)[places]
        own = torch.arange(self.index.numel(), dtype=torch.int32, device=rows.device)
        self.index.copy_(own.view_as(self.index))
        self.first.copy_(other.first[rows])
        self.at.copy_(other.at)

    def select(self, rows: Tensor) -> "StaticKVCache":
        """Let hypothesis b continue what rows[b] has read, in the next step."""
        return replace(self, rows=rows)

    def opened(self) -> "StaticKVCache":
        """Open one more column, in place."""
        rows = torch.arange(len(self.first), device=self.at.device) if self.rows is None else self.rows
        if on_triton(self.log.layers[0]):
            from weft.nn.kernels.triton.decode_attention import advance

            advance(self.index, rows, self.at)
        else:
            self.index.copy_(self.index.index_select(0, rows))
            own = torch.arange(len(rows), dtype=torch.int32, device=rows.device) * self.log.room + self.at
            self.index.index_copy_(1, self.at.long(), own[:, None])
        self.at.add_(1)
        return replace(self, rows=None)

    def write(self, layer: int, kv: Tensor) -> Tensor:
        """Write a layer's keys and values into the last column, in place."""
        held = self.log.layers[layer]
        held.index_copy_(1, self.at.long() - 1, kv[:, None].to(held.dtype))
        return held.flatten(0, 1)


def but_last(prompt: Tokens) -> Tokens:
    """Leave out the last token of each prompt."""
    lengths = prompt.lengths - 1
    if prompt.longest <= 1:  # and nothing is moved to the device, so that this can be captured in a graph
        return replace(prompt, ids=prompt.ids[:0], starts=torch.zeros_like(prompt.starts), lengths=lengths, longest=0)
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    kept = (torch.arange(len(row)) + row).to(prompt.device)
    return replace(Tokens.flat(prompt.ids[kept], lengths), longest=prompt.longest - 1)


def on_triton(x: Tensor) -> bool:
    """Say whether Triton's kernels serve a step with such a tensor: on CUDA, with no gradient and nothing recast."""
    if not x.is_cuda or x.dtype is torch.float64 or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
        return False
    from weft.nn.rnn.fused.codegen_triton import ampere, available

    return available() and (x.dtype is torch.float32 or ampere(x.device))


def _moved(index: Tensor, before: int, after: int) -> Tensor:
    """Number the places of a log anew that has more room."""
    if before == after:
        return index
    wide = index.new_zeros(len(index), after)
    wide[:, :before] = index // before * after + index % before
    return wide


def attend_cached(q: Tensor, kv: Tensor, reach: KVIndex) -> Tensor:
    """Attend with one query a hypothesis, q (B, H, d), to the keys and values that it reaches: (B, H, d)."""
    if not len(kv):  # nothing to look at
        return torch.zeros_like(q)
    if on_triton(q):
        from weft.nn.kernels.triton.decode_attention import attend

        return attend(q, kv, reach)
    if q.dtype == torch.float32 and not q.is_cuda and not torch.is_grad_enabled():
        return attend_in_loops(q, kv, *reach)
    step = torch.arange(reach.places.shape[1], device=q.device)
    hidden = (step < reach.first[:, None]) | (step >= reach.last[:, None])  # (B, T)
    held = kv[reach.places.long()].masked_fill(hidden[..., None, None, None], 0.0)  # (B, T, 2, H, d)
    k, v = held.unbind(2)  # what was never written may be no number, which no weight of nought would hide
    scores = torch.einsum("bhd,bthd->bht", q, k) / q.shape[-1] ** 0.5
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)).masked_fill(hidden[:, None], float("-inf"))
    weights = torch.softmax(scores, -1).masked_fill(hidden[:, None], 0.0)  # of an empty sequence: nothing, not 0/0
    return torch.einsum("bht,bthd->bhd", weights.to(v.dtype), v)
