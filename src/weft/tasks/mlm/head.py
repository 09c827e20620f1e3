"""The head of a masked language model: its loss, what it fills in, and how likely a text is to it.

A model that sees both sides of a word gives a text no probability. Its pseudo-log-likelihood (Salazar et al. 2020) is
the sum over its tokens of log p(token | all the others), where each token is masked in turn:

    PLL(W) = Σ_t log p(w_t | W with w_t masked)            pseudo-perplexity = exp(-Σ PLL(W) / Σ |W|)
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from weft.config.schema import Section
from weft.nn.layers.losses import cross_entropy_sum
from weft.tasks.base import Batch, Head, Sums
from weft.tasks.lm.scoring import device_of
from weft.tokens import Tokens

AT_ONCE, AT_ONCE_ON_GPU = 1 << 13, 1 << 17  # tokens that are read at once to find how likely texts are
_SPREAD = 0.02  # as the body's weights start

Asked = tuple[int, range]  # the number of a text, and places of it
Fills = list[list[tuple[int, float]]]  # for each mask the best tokens, with their probabilities


class Fill(Section):
    """How many tokens are given for each mask, the best first."""

    top: int = Field(5, ge=1)


class MLMHead(Head):
    """The body's own output scores what is masked; `next` says whether the second segment follows the first."""

    def __init__(self, body: Any, specials: Sequence[int], mask: int, next_sentence: bool) -> None:
        super().__init__(body)
        self.specials, self.mask = list(specials), mask
        (self.direction,) = type(body).directions(body.config)
        self.next = nn.Linear(body.width, 2) if next_sentence else None
        if self.next is None:
            body.drop_pooler()
        else:
            nn.init.normal_(self.next.weight, std=_SPREAD)
            nn.init.zeros_(self.next.bias)

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Sum the cross-entropy of the words that were chosen, and of whether segments follow each other."""
        assert batch.at is not None
        assert batch.targets is not None
        masked, summary = self.body.fill_loss(batch.tokens, batch.at.ids, batch.targets)
        if self.next is None or batch.labels is None:
            return {"masked": masked}, None
        return {"masked": masked, "next": cross_entropy_sum(self._follows(batch.tokens, summary), batch.labels)}, None

    def _follows(self, tokens: Tokens, summary: Tensor | None = None) -> Tensor:
        """Score whether B follows A (0) or not (1), (B, 2)."""
        assert self.next is not None
        scores: Tensor = self.next(self.body.summary(tokens) if summary is None else summary)
        return scores

    def flops(self, batch: Batch) -> int:
        """Count what the body does, but its output only where words were chosen."""
        parts = (getattr(self.body, name, None) for name in ("transform", "output"))
        outer = sum(part.weight.numel() for part in parts if isinstance(part, nn.Linear))
        spared = 0 if batch.at is None else len(batch.tokens.ids) - len(batch.at.ids)
        own = 0 if self.next is None else self.next.weight.numel() * len(batch.tokens)
        return super().flops(batch) + 2 * (own - outer * spared)

    def tally(self, batch: Batch) -> dict[str, float]:
        """Sum the losses of a batch and count what is right, for each part."""
        assert batch.at is not None
        assert batch.targets is not None
        judged = {"masked": (self._scores(batch.tokens, batch.at.ids), batch.targets)}
        if self.next is not None and batch.labels is not None:
            judged["next"] = self._follows(batch.tokens), batch.labels
        found: dict[str, float] = {}
        for part, (scores, right) in judged.items():
            found[part] = float(cross_entropy_sum(scores, right))
            found[f"{part} right"] = int((scores.argmax(-1) == right).sum())
            found[f"{part} count"] = len(right)
        return found

    def predict(self, batch: Batch, options: Section) -> list[Fills]:
        """Choose the best tokens for each mask, no specials among them."""
        assert isinstance(options, Fill)
        assert batch.at is not None
        likely = self._scores(batch.tokens, batch.at.ids).float().softmax(-1)
        likely[:, self.specials] = -1
        best, ids = likely.topk(min(options.top, likely.shape[-1] - len(self.specials)), -1)
        pairs = [list(zip(own, values, strict=True)) for own, values in zip(ids.tolist(), best.tolist(), strict=True)]
        ahead = iter(pairs)
        return [list(islice(ahead, size)) for size in batch.at.lengths.tolist()]

    def log_probs(self, texts: Sequence[np.ndarray]) -> list[float]:
        """Return the pseudo-log-likelihood of each text, given with what begins and ends it."""
        found = np.zeros(len(texts))
        for tokens, at, right, owners in self._copies(texts):
            scores = self._scores(tokens, at)
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            known = scores.gather(1, right[:, None])[:, 0] - scores.logsumexp(-1)
            np.add.at(found, owners, known.double().cpu().numpy())
        return [float(one) for one in found]

    def _scores(self, tokens: Tokens, at: Tensor) -> Tensor:
        scores: Tensor = self.body.logits(tokens, at=at, direction=self.direction)
        return scores

    def _copies(self, texts: Sequence[np.ndarray]) -> Iterator[tuple[Tokens, Tensor, Tensor, np.ndarray]]:
        """Yield batches of like lengths: texts, the places that are asked for, what stands there, and whose it is."""
        device, held, size = device_of(self), list[Asked](), 0
        most = AT_ONCE if device.type == "cpu" else AT_ONCE_ON_GPU
        for number in sorted(range(len(texts)), key=lambda number: len(texts[number])):
            for places in self._places(len(texts[number])):
                held.append((number, places))
                size += len(texts[number])
                if size >= most:
                    yield self._hidden(texts, held, device)
                    held, size = [], 0
        if held:
            yield self._hidden(texts, held, device)

    def _places(self, length: int) -> list[range]:
        """Each token in turn; at once, where no place sees itself."""
        inside = range(1, length - 1)
        return [range(place, place + 1) for place in inside] if self.direction == "masked" else [inside]

    def _hidden(
        self, texts: Sequence[np.ndarray], held: Sequence[Asked], device: torch.device
    ) -> tuple[Tokens, Tensor, Tensor, np.ndarray]:
        tokens = Tokens.pack([texts[number] for number, _ in held])
        firsts = tokens.starts.tolist()
        at = torch.tensor([first + place for first, (_, own) in zip(firsts, held, strict=False) for place in own])
        right = tokens.ids[at]
        if self.direction == "masked":
            tokens.ids[at] = self.mask
        owners = np.repeat([number for number, _ in held], [len(own) for _, own in held])
        return tokens.to(device), at.to(device), right.to(device), owners
