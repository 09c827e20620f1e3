"""How likely texts are to a language model, and what that is worth: loss, perplexity, bits per byte.

A corpus is judged as it is read (`task.reads`): documents on their own, windows of the stream, or the stream read on.
Perplexity is exp(the mean loss of a token), and so hangs on what the tokens are. Bits per byte is fair across
tokenizers: the bits that all tokens cost together, over the bytes of the text, where a text's end counts as one byte.
It is only given where the tokens hold the whole text; an unknown word pays for its spelling, by 257 equally likely
signs, its bytes and its end (one that is spelt like the unknown token itself pays for the end alone).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.data.batching.lm_stream import Stream
from weft.data.batching.loader import plan
from weft.data.batching.packed import PackedItems, pack
from weft.models.base import Direction, Model
from weft.tasks.base import IGNORE_INDEX, Batch, Head, Item
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Tokens

WIDE, WIDE_ON_GPU = 1 << 25, 1 << 30  # numbers that one batch may score at once
NARROW = 1 << 20  # tokens, where the model never scores the whole vocabulary
AHEAD = 256  # tokens that each row of a stream reads before those that count, to have come to what it remembers
SIGN = math.log(257)  # nats of one sign of a spelling

Collate = Callable[[Sequence[Item]], Batch]


def room_for(body: Model, device: torch.device) -> int:
    """Say how many tokens to score at once."""
    if type(body).log_prob is not Model.log_prob:
        return NARROW
    return max(1, (WIDE if device.type == "cpu" else WIDE_ON_GPU) // body.vocab)


def score_items(head: Head, items: Sequence[Item], collate: Collate, directions: Sequence[Direction]) -> np.ndarray:
    """Return the log-probability of each item, (directions, items)."""
    found = np.zeros((len(directions), len(items)))
    for batch, index in _batches(head, items, collate):
        for row, (direction, targets) in enumerate(zip(directions, targets_of(batch, directions), strict=True)):
            logprob = _log_prob(head.body, batch.tokens, targets, direction)
            found[row, index] = [float(one.sum()) for one in batch.tokens.split(logprob.double().cpu())]
    return found


def _batches(head: Head, items: Sequence[Item], collate: Collate) -> Iterator[tuple[Batch, np.ndarray]]:
    device = device_of(head)
    for index in plan(pack(items, num_token_arrays=1), room_for(head.body, device), seed=None):
        yield collate([items[number] for number in index.tolist()]).to(device), index


def targets_of(batch: Batch, directions: Sequence[Direction]) -> list[Tensor]:
    """Return the targets (N,) of each direction."""
    assert batch.targets is not None
    return list(batch.targets.view(len(directions), -1))


def _log_prob(body: Any, tokens: Tokens, targets: Tensor, direction: Direction) -> Tensor:
    known: Tensor = body.log_prob(tokens, targets.clamp(min=0), direction)
    return known.where(targets != IGNORE_INDEX, 0.0)


def score_windows(head: Head, stream: Stream, width: int, stride: int, direction: Direction) -> float:
    """Sum the log-probabilities of a stream cut into windows, each of which counts from where the one before ended.

    Backward they are laid from the end of the stream: there it is what stands after a token that it sees.
    """
    at_once, total, size = max(1, room_for(head.body, device_of(head)) // width), 0.0, len(stream)
    starts = [0, *range(stride, size - width + stride, stride)] if size > width else [0]
    for first in range(0, len(starts), at_once):
        spans = [(start, min(start + width, size)) for start in starts[first : first + at_once]]
        skipped = [width - stride if start else 0 for start, _ in spans]
        if direction == "backward":
            spans = [(size - stop, size - start) for start, stop in spans]
        total += _sum_counted(head, [stream.pair(*span) for span in spans], skipped, direction)
    return total


def _sum_counted(head: Head, pairs: list[Any], skipped: list[int], direction: Direction) -> float:
    read, follow = zip(*pairs, strict=True)
    if direction == "backward":
        read, follow = follow, read
    device = device_of(head)
    tokens = Tokens.pack(read).to(device)
    targets = torch.from_numpy(np.concatenate(follow).astype(np.int64)).to(device)
    logprob = tokens.split(head.body.log_prob(tokens, targets, direction).double())
    counted = (one[: len(one) - skip] if direction == "backward" else one[skip:]
               for one, skip in zip(logprob, skipped, strict=True))  # fmt: skip
    return float(sum(one.sum() for one in counted))


def score_stream(head: Head, stream: Stream, piece: int) -> float:
    """Sum the log-probabilities of a stream that is read on, piece by piece, in several rows side by side.

    A row begins a little before its own part, where what it reads does not count.
    """
    device, total = device_of(head), 0.0
    rows = max(1, min(len(stream) // (4 * AHEAD), room_for(head.body, device) // piece, 64))
    each = -(-len(stream) // rows)
    own = np.arange(rows) * each
    at, ends = np.maximum(own - AHEAD, 0), np.minimum(own + each, len(stream))
    state = None
    while len(at):
        stops = np.minimum(at + piece, ends)
        read, follow = zip(*map(stream.pair, at.tolist(), stops.tolist()), strict=True)
        logits, state = head.body.read(Tokens.pack(read).to(device), state)
        targets = torch.from_numpy(np.concatenate(follow).astype(np.int64)).to(device)
        counts = np.concatenate([np.arange(a, b) >= first for a, b, first in zip(at, stops, own, strict=True)])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        known = logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)
        total += float(known.double()[torch.from_numpy(counts).to(device)].sum())
        stay = np.flatnonzero(stops < ends)
        at, ends, own = stops[stay], ends[stay], own[stay]
        state = state.select(torch.from_numpy(stay).to(device))
    return total


def are_whole(data: PackedItems, eos: int, documents: int) -> bool:
    """Say whether pairs (what is read, what follows) go on to the end of as many texts: none was cut or dropped."""
    ends = data.ids[data.starts[data.items[:-1] + 2] - 1]
    return int((ends == eos).sum()) == documents


def spelling_cost(texts: Iterable[str], tokenizer: Tokenizer) -> float | None:
    """Return what the unknown words of texts pay, in nats; None if the tokens do not hold the texts whole."""
    if tokenizer.lossless:
        return 0.0
    unknown, total = tokenizer.specials.unk, 0.0
    mark = None if unknown is None else tokenizer.token(unknown)
    for text in texts:
        found = tokenizer.encode(text)
        spelt = [text[a:b] for id, (a, b) in zip(found.ids, found.offsets, strict=True) if id == unknown]
        parts = tokenizer.decode(found.ids).split(mark) if mark else [tokenizer.decode(found.ids)]
        if len(parts) != len(spelt) + 1 or "".join(_between(parts, spelt)) != text.strip(" "):
            return None
        total += sum(SIGN * (1 + (len(word.encode()) if word != mark else 0)) for word in spelt)
    return total


def _between(parts: Sequence[str], spelt: Sequence[str]) -> Iterator[str]:
    for number, part in enumerate(parts):
        yield part
        yield from spelt[number : number + 1]


def device_of(head: Head) -> torch.device:
    """Say where a model is; one that only counts has no parameters."""
    return next(iter([*head.parameters(), *head.buffers()])).device
