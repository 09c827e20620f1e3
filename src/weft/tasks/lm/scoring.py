"""Scoring texts with a language model: log-probabilities for loss, perplexity and bits per byte.

A corpus is scored as it is read (`task.sequences`): single documents, windows of the stream, or the stream with carried
state. Perplexity is exp(mean loss of a token), and so depends on the tokenizer. Bits per byte is comparable across
tokenizers: the total of all tokens' -log2 p over the bytes of the text, where the end of a text counts as one byte.
It is only given if the tokens determine the whole text; an unknown word costs its spelling, by 257 equally likely
symbols, its bytes and an end symbol (a word written like the unknown token itself costs the end symbol alone).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.data.batching.lm_stream import TokenStream
from weft.data.batching.loader import plan_batches
from weft.data.batching.packed_items import PackedItems, pack
from weft.models.base import LMDirection, Model
from weft.tasks.batch import IGNORE_INDEX, Batch, Item
from weft.tasks.head import Head
from weft.tasks.sharding import num_ranks, share, sum_over_ranks
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Tokens

MAX_LOGITS, MAX_LOGITS_ON_GPU = 1 << 25, 1 << 30  # logits of one batch
MAX_TOKENS = 1 << 20  # of one batch, if the model never computes all logits
WARMUP_TOKENS = 256  # tokens that each row of a stream reads before those that count, to warm up its state
BYTE_COST = math.log(257)  # nats of one symbol of a spelling

Collate = Callable[[Sequence[Item]], Batch]


def tokens_per_batch(body: Model, device: torch.device) -> int:
    """Return how many tokens to score in one batch."""
    if type(body).log_prob is not Model.log_prob:
        return MAX_TOKENS
    return max(1, (MAX_LOGITS if device.type == "cpu" else MAX_LOGITS_ON_GPU) // body.vocab)


def score_items(head: Head, items: Sequence[Item], collate: Collate, directions: Sequence[LMDirection]) -> np.ndarray:
    """Return the log-probability of each item, (directions, items)."""
    scores = np.zeros((len(directions), len(items)))
    for batch, index in _scoring_batches(head, items, collate):
        for row, (direction, targets) in enumerate(zip(directions, targets_of(batch, directions), strict=True)):
            logprob = _log_prob(head.body, batch.tokens, targets, direction)
            scores[row, index] = [float(sequence.sum()) for sequence in batch.tokens.split(logprob.double().cpu())]
    return sum_over_ranks(torch.from_numpy(scores)).numpy()


def _scoring_batches(head: Head, items: Sequence[Item], collate: Collate) -> Iterator[tuple[Batch, np.ndarray]]:
    device = head.device
    for index in share(plan_batches(pack(items, num_token_arrays=1), tokens_per_batch(head.body, device), seed=None)):
        yield collate([items[number] for number in index.tolist()]).to(device), index


def targets_of(batch: Batch, directions: Sequence[LMDirection]) -> list[Tensor]:
    """Return the targets (N,) of each direction."""
    assert batch.targets is not None
    return list(batch.targets.view(len(directions), -1))


def _log_prob(body: Any, tokens: Tokens, targets: Tensor, direction: LMDirection) -> Tensor:
    logprobs: Tensor = body.log_prob(tokens, targets.clamp(min=0), direction)
    return logprobs.where(targets != IGNORE_INDEX, 0.0)


def window_log_probs(head: Head, stream: TokenStream, width: int, stride: int, direction: LMDirection) -> np.ndarray:
    """Return the log-probability of each token of a stream in windows, (len(stream),), in the stream's order.

    A window counts from where the one before ended. Backward, windows start from the end of the stream: there the
    context of a token is what follows it.
    """
    size, result = len(stream), np.zeros(len(stream))
    windows_per_batch = max(1, tokens_per_batch(head.body, head.device) // width)
    starts = [0, *range(stride, size - width + stride, stride)] if size > width else [0]
    windows_per_batch = min(windows_per_batch, -(-len(starts) // num_ranks()))
    for first in share(range(0, len(starts), windows_per_batch)):
        spans = [(start, min(start + width, size)) for start in starts[first : first + windows_per_batch]]
        context_lengths = [width - stride if start else 0 for start, _ in spans]
        if direction == "backward":
            spans = [(size - stop, size - start) for start, stop in spans]
        windows = _log_probs_of_windows(head, [stream.item(*span) for span in spans], direction)
        for (start, stop), context, logprobs in zip(spans, context_lengths, windows, strict=True):
            if direction == "backward":
                result[start : stop - context] = logprobs[: len(logprobs) - context]
            else:
                result[start + context : stop] = logprobs[context:]
    return sum_over_ranks(torch.from_numpy(result)).numpy()


def _log_probs_of_windows(head: Head, pairs: list[Any], direction: LMDirection) -> list[np.ndarray]:
    inputs, following = zip(*pairs, strict=True)
    if direction == "backward":
        inputs, following = following, inputs
    device = head.device
    tokens = Tokens.pack(inputs).to(device)
    targets = torch.from_numpy(np.concatenate(following).astype(np.int64)).to(device)
    logprobs = head.body.log_prob(tokens, targets, direction).double().cpu()
    return [window.numpy() for window in logprobs.split(tokens.lengths.tolist())]


def stream_log_probs(head: Head, stream: TokenStream, chunk: int) -> np.ndarray:
    """Return the log-probability of each token of a stream, (len(stream),).

    It is read in chunks with carried state, in several rows at once. A row begins WARMUP_TOKENS before its own part;
    these tokens do not count.
    """
    device, result = head.device, np.zeros(len(stream))
    rows = max(1, min(len(stream) // (4 * WARMUP_TOKENS), tokens_per_batch(head.body, device) // chunk, 64))
    row_length = -(-len(stream) // rows)
    row_starts = share(np.arange(rows) * row_length)
    starts, ends = np.maximum(row_starts - WARMUP_TOKENS, 0), np.minimum(row_starts + row_length, len(stream))
    state = None
    while len(starts):
        stops = np.minimum(starts + chunk, ends)
        inputs, following = zip(*map(stream.item, starts.tolist(), stops.tolist()), strict=True)
        logits, state = head.body.read(Tokens.pack(inputs).to(device), state)
        targets = torch.from_numpy(np.concatenate(following).astype(np.int64)).to(device)
        places = np.concatenate([np.arange(*span) for span in zip(starts, stops, strict=True)])
        counted = places >= np.repeat(row_starts, stops - starts)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logprobs = logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)
        result[places[counted]] = logprobs.double().cpu().numpy()[counted]
        staying = np.flatnonzero(stops < ends)
        starts, ends, row_starts = stops[staying], ends[staying], row_starts[staying]
        state = state.select(torch.from_numpy(staying).to(device))
    return sum_over_ranks(torch.from_numpy(result)).numpy()


def are_complete(data: PackedItems, eos: int, documents: int) -> bool:
    """Return whether the pairs (inputs, targets) reach the end of all `documents`: none was cut or dropped."""
    ends = data.ids[data.starts[data.items[:-1] + 2] - 1]
    return int((ends == eos).sum()) == documents


def unknown_word_cost(texts: Iterable[str], tokenizer: Tokenizer) -> float | None:
    """Return the cost of the unknown words of texts, in nats; None if the tokens do not determine the texts."""
    if tokenizer.lossless:
        return 0.0
    total = 0.0
    for text in texts:
        cost = _unknown_cost(text, tokenizer)
        if cost is None:
            return None
        total += cost
    return total


def unknown_word_costs(texts: Sequence[str], tokenizer: Tokenizer) -> np.ndarray | None:
    """Return `unknown_word_cost` of each text; None if the tokens do not determine all of them."""
    if tokenizer.lossless:
        return np.zeros(len(texts))
    costs = [_unknown_cost(text, tokenizer) for text in texts]
    return None if None in costs else np.array(costs)


def _unknown_cost(text: str, tokenizer: Tokenizer) -> float | None:
    unknown = tokenizer.specials.unk
    unk_token, encoding = None if unknown is None else tokenizer.token(unknown), tokenizer.encode(text)
    unknown_words = [
        text[start:end] for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True) if id == unknown
    ]
    parts = tokenizer.decode(encoding.ids).split(unk_token) if unk_token else [tokenizer.decode(encoding.ids)]
    if len(parts) != len(unknown_words) + 1 or "".join(_interleave(parts, unknown_words)) != text.strip(" "):
        return None
    return sum(BYTE_COST * (1 + (len(word.encode()) if word != unk_token else 0)) for word in unknown_words)


def _interleave(parts: Sequence[str], unknown_words: Sequence[str]) -> Iterator[str]:
    for index, part in enumerate(parts):
        yield part
        yield from unknown_words[index : index + 1]
