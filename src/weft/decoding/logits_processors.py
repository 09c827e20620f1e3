"""Logits processors: forbidden tokens, temperature, top-k and top-p, as pure functions on logits (B, V).

A token that may not be produced has the logit -inf. A search forbids ids first, then samples as temperature -> top_k ->
top_p, each applied to the result of the one before.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.errors import ConfigError

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
