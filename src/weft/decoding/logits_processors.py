"""What may come next: pure functions on logits (B, V), where -inf stands for "not this one".

Search bars ids first, then samples as temperature -> top_k -> top_p, each over what the one before has left.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.errors import ConfigError

NEVER = float("-inf")


@dataclass(frozen=True)
class ForbiddenTokens:
    """The ids that may not be produced: some at no step, and eos not before `min_length` tokens."""

    always: Tensor
    early: Tensor
    min_length: int

    @classmethod
    def over(cls, logits: Tensor, eos: int, forbid: Collection[int] = (), min_length: int = 0) -> "ForbiddenTokens":
        """Check the ids against the vocabulary and keep them on the logits' device."""
        vocab, asked = logits.shape[-1], {eos, *forbid}
        if outside := sorted(token for token in asked if not 0 <= token < vocab):
            raise ConfigError(
                f"decode: eos and forbid must lie in 0..{vocab - 1}, the model's vocabulary: got {outside}"
            )
        always = set(forbid)
        early = asked if min_length else always
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
        """Return the ids barred once `written` tokens are there."""
        return self.early if written < self.min_length else self.always


def log_probs(logits: Tensor, barred: Tensor, spent: Tensor | None = None, rescale: bool = False) -> Tensor:
    """Return the model's own log-probabilities, in float32 or better, with -inf at the `barred` ids.

    Unless asked to `rescale`, the others are not scaled up to make up for the barred ones: a hypothesis is scored by
    what the model gave it. What was `spent` at the step before serves again where it is large enough: new memory costs
    a CPU as much as the rest.
    """
    logits = logits.index_fill(-1, barred, NEVER) if rescale else logits
    precise = torch.promote_types(logits.dtype, torch.float32)
    out = None if spent is None or len(spent) < len(logits) or logits.is_cuda else spent[: len(logits)]
    return torch.log_softmax(logits, -1, dtype=precise, out=out).index_fill_(-1, barred, NEVER)


def ending(logprobs: Tensor, eos: int) -> Tensor:
    """Let nothing but eos come next, for certain; what is given is used up."""
    logprobs.fill_(NEVER)[:, eos] = 0.0
    return logprobs


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide by the temperature, counting down from the best, so that a tiny temperature overflows to -inf alone."""
    tiny = torch.finfo(logits.dtype).tiny
    return (logits - logits.amax(-1, keepdim=True)) / max(temperature, tiny)


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k best, and all that tie with the k-th: the order of the ids decides nothing (Fan et al. 2018)."""
    worst = logits.topk(min(k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < worst, NEVER)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the nucleus: the smallest set of best tokens whose mass is at least p (Holtzman et al. 2020, eq. 2).

    Never empty. Tokens that tie at its edge enter by the lower id.
    """
    if p >= 1:  # by rounding, the running sum can get to 1 before the last token
        return logits
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    mass = ordered.softmax(-1)
    outside = mass.cumsum(-1) - mass >= p  # what comes before makes up p already; before the first comes nothing
    return logits.masked_fill(torch.empty_like(outside).scatter_(-1, ids, outside), NEVER)
