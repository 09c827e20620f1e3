"""Logits processors: forbidden tokens, repetition, temperature, top-k and top-p, as pure functions on logits (B, V).

A token that may not be produced has the logit -inf. A search forbids ids first, then applies what depends on the tokens
so far (`TokenHistory`) as repetition_penalty -> no_repeat_ngram_size -> bad_words, then samples as temperature ->
top_k -> top_p, each applied to the result of the one before: the order and the formulas of transformers.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.tokens import Tokens

NEG_INF = float("-inf")


@dataclass(frozen=True)
class ForbiddenTokens:
    """The ids that may not be produced: `always` at any step, `early` (with eos) before `min_length` tokens."""

    always: Tensor
    early: Tensor
    min_length: int

    @classmethod
    def for_logits(
        cls, logits: Tensor, eos: int, forbid: Collection[int] = (), min_length: int = 0
    ) -> "ForbiddenTokens":
        """Return the ids as tensors on the logits' device, after checking them against the vocabulary."""
        vocab, forbidden = logits.shape[-1], {eos, *forbid}
        if out_of_range := sorted(token for token in forbidden if not 0 <= token < vocab):
            raise ConfigError(
                f"decode: eos and forbid must lie in 0..{vocab - 1}, the model's vocabulary: got {out_of_range}"
            )
        always = set(forbid)
        early = forbidden if min_length else always
        if len(early) == vocab:
            raise ConfigError(
                f"decode: nothing is left to produce: all {vocab} ids are forbidden, or barred by min_length"
            )
        return cls(
            torch.tensor(sorted(always), dtype=torch.long, device=logits.device),
            torch.tensor(sorted(early), dtype=torch.long, device=logits.device),
            min_length,
        )

    def after(self, written: int) -> Tensor:
        """Return the ids forbidden after `written` tokens."""
        return self.early if written < self.min_length else self.always


def log_probs(
    logits: Tensor, forbidden: Tensor, buffer: Tensor | None = None, renormalize_logits: bool = False
) -> Tensor:
    """Return the model's own log-probabilities, in float32 or better, with -inf at the `forbidden` ids.

    Without `renormalize_logits` the others are not renormalized: a hypothesis is scored by the probability that the
    model gave it. `buffer`, the result of the step before, is overwritten if it is large enough: on a CPU, allocating
    new memory costs as much as the rest.
    """
    logits = logits.index_fill(-1, forbidden, NEG_INF) if renormalize_logits else logits
    dtype = torch.promote_types(logits.dtype, torch.float32)
    out = None if buffer is None or len(buffer) < len(logits) or logits.is_cuda else buffer[: len(logits)]
    return torch.log_softmax(logits, -1, dtype=dtype, out=out).index_fill_(-1, forbidden, NEG_INF)


def force_eos(logprobs: Tensor, eos: int) -> Tensor:
    """Return log-probabilities of 0 for eos and -inf for all other tokens; `logprobs` is overwritten."""
    logprobs.fill_(NEG_INF)[:, eos] = 0.0
    return logprobs


@dataclass(frozen=True)
class TokenHistory:
    """The tokens that each row has read and written, its prompt included: (B, T), -1 before the first of a row."""

    ids: Tensor

    @classmethod
    def of(cls, prompt: Tokens) -> "TokenHistory":
        """Return the history of prompts, aligned at their ends."""
        starts, ends = prompt.starts[:-1, None].long(), prompt.starts[1:, None].long()
        at = ends - torch.arange(prompt.longest, 0, -1, device=prompt.device)  # (B, T), flat positions
        if not len(prompt.ids):
            return cls(torch.full_like(at, -1))
        return cls(torch.where(at < starts, -1, prompt.ids[at.clamp(min=0)].long()))

    def select(self, rows: Tensor) -> "TokenHistory":
        """Keep the rows `rows`."""
        return TokenHistory(self.ids[rows])

    def append(self, tokens: Tensor) -> "TokenHistory":
        """Add one token to each row."""
        return TokenHistory(torch.cat([self.ids, tokens[:, None]], 1))


@dataclass(frozen=True)
class HistoryConstraints:
    """What the tokens so far allow: penalized repetitions, and n-grams and token sequences that are never completed."""

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()  # of two tokens or more; a single token is simply forbidden

    def __bool__(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.no_repeat_ngram_size or self.bad_words)

    def penalize(self, scores: Tensor, history: TokenHistory) -> Tensor:
        """Return the scores (B, V) with those of the history's tokens penalized."""
        if self.repetition_penalty == 1:
            return scores
        return penalize_repetition(scores, history.ids, self.repetition_penalty)

    def ban(self, logprobs: Tensor, history: TokenHistory, eos: int, logits: Tensor) -> Tensor:
        """Set the log-probabilities (B, V) of banned tokens to -inf, in place; a row with none left may end.

        The log-probability of that end is the model's own, of its `logits`.
        """
        if not (self.no_repeat_ngram_size or self.bad_words):
            return logprobs
        banned = torch.zeros_like(logprobs, dtype=torch.bool)
        if self.no_repeat_ngram_size:
            mark_repeated_ngrams(banned, history.ids, self.no_repeat_ngram_size)
        for _, sequences in groupby(sorted(self.bad_words, key=len), len):
            mark_bad_words(banned, history.ids, torch.tensor(list(sequences), device=banned.device))
        logprobs.masked_fill_(banned, NEG_INF)
        nothing_left = logprobs.amax(-1) == NEG_INF
        own_eos = logits[:, eos].to(logprobs.dtype) - logits.to(logprobs.dtype).logsumexp(-1)
        logprobs[:, eos] = torch.where(nothing_left, own_eos, logprobs[:, eos])
        return logprobs


NO_CONSTRAINTS = HistoryConstraints()


def penalize_repetition(scores: Tensor, history: Tensor, penalty: float) -> Tensor:
    """Divide the positive scores (B, V) of tokens in the history (B, T) by the penalty, multiply the negative ones.

    Keskar et al. 2019 (CTRL), section 4.1, for scores of either sign as in transformers.
    """
    if not history.shape[1]:
        return scores
    index = torch.where(history < 0, history[:, -1:], history)  # padding repeats the last token, if there is one
    score = scores.gather(1, index.clamp(min=0))
    penalized = torch.where(score < 0, score * penalty, score / penalty)
    return scores.scatter(1, index.clamp(min=0), torch.where(index < 0, score, penalized))


def mark_repeated_ngrams(banned: Tensor, history: Tensor, size: int) -> None:
    """Mark in `banned` (B, V) the tokens that would complete an n-gram of the history (B, T) a second time.

    Paulus et al. 2018, section 2.5. All n-grams of all rows are compared at once.
    """
    if history.shape[1] < size:
        return
    ngrams = history.unfold(1, size, 1)  # (B, T - n + 1, n)
    suffix = history[:, history.shape[1] - size + 1 :]  # (B, n - 1)
    repeats = (ngrams[..., :-1] == suffix[:, None]).all(-1) & (ngrams[..., 0] >= 0)
    rows, places = repeats.nonzero(as_tuple=True)
    banned[rows, ngrams[rows, places, -1]] = True


def mark_bad_words(banned: Tensor, history: Tensor, sequences: Tensor) -> None:
    """Mark in `banned` (B, V) the tokens that would complete one of the token sequences (W, n)."""
    before = sequences.shape[1] - 1
    if history.shape[1] < before:
        return
    suffix = history[:, history.shape[1] - before :]  # (B, n - 1)
    rows, words = (suffix[:, None] == sequences[:, :-1]).all(-1).nonzero(as_tuple=True)
    banned[rows, sequences[words, -1]] = True


def split_bad_words(sequences: Sequence[Sequence[int]]) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Return the tokens that are bad by themselves, and the sequences of several tokens."""
    single = [sequence[0] for sequence in sequences if len(sequence) == 1]
    return single, tuple(tuple(sequence) for sequence in sequences if len(sequence) > 1)


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide by the temperature, after subtracting the maximum: a tiny temperature can only overflow to -inf."""
    tiny = torch.finfo(logits.dtype).tiny
    return (logits - logits.amax(-1, keepdim=True)) / max(temperature, tiny)


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k highest logits and all that tie with the k-th, whatever the order of ids (Fan et al. 2018)."""
    worst = logits.topk(min(k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < worst, NEG_INF)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the nucleus: the smallest set of most probable tokens with mass at least p (Holtzman et al. 2020, eq. 2).

    It is never empty. Of tokens that tie at its edge, the lower id enters first.
    """
    if p >= 1:  # by rounding, the cumulative sum can reach 1 before the last token
        return logits
    sorted_logits, ids = logits.sort(dim=-1, descending=True, stable=True)
    probs = sorted_logits.softmax(-1)
    outside = probs.cumsum(-1) - probs >= p  # the tokens before it have mass p already; before the first, the mass is 0
    return logits.masked_fill(torch.empty_like(outside).scatter_(-1, ids, outside), NEG_INF)


def keep_top(logits: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """Apply `top_k` and then `top_p` to each row, (B, V), with its own k and p, (B,); k = 0 and p > 1 keep all."""
    sorted_logits, ids = logits.sort(dim=-1, descending=True, stable=True)
    worst = sorted_logits.gather(1, (k.long() - 1).clamp(0, logits.shape[-1] - 1)[:, None])
    dropped = (sorted_logits < worst) & (k > 0)[:, None]
    probs = sorted_logits.masked_fill(dropped, NEG_INF).softmax(-1)
    dropped |= probs.cumsum(-1) - probs >= p[:, None]
    return logits.masked_fill(torch.empty_like(dropped).scatter_(-1, ids, dropped), NEG_INF)
