"""Masked-language-model head: loss, mask filling and pseudo-log-likelihood.

A bidirectional model gives a text no probability. Its pseudo-log-likelihood (Salazar et al. 2020) is the sum over the
tokens of log p(token | all other tokens), where each token is masked in turn:

    PLL(W) = Σ_t log p(w_t | W with w_t masked)            pseudo-perplexity = exp(-Σ PLL(W) / Σ |W|)
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from weft.config.schema import Section
from weft.models.bert import BERT
from weft.nn.layers.losses import cross_entropy_sum, soft_cross_entropy_sum
from weft.tasks.batch import Batch
from weft.tasks.head import Sums
from weft.tasks.soft_targets import SoftTargetHead
from weft.tokens import Tokens

BATCH_TOKENS, BATCH_TOKENS_ON_GPU = 1 << 13, 1 << 17  # tokens a batch of the pseudo-log-likelihood
_INIT_STD = 0.02  # of the initial weights, as in the body

PairObjective = Literal["next", "order"]  # what is learnt of segment pairs
MaskedText = tuple[int, range]  # the number of a text, and the positions predicted in it
MaskPredictions = list[list[tuple[int, float]]]  # for each mask the best tokens with their probabilities


class FillMaskConfig(Section):
    """Options of mask filling: the number of tokens returned for each mask, best first."""

    top: int = Field(5, ge=1)


class MLMHead(SoftTargetHead):
    """The body's own output projection for masked tokens; `next` classifies whether segment B follows A.

    Without an objective of segment pairs there is no `next`.
    """

    def __init__(self, body: Any, specials: Sequence[int], mask: int, objective: PairObjective | None) -> None:
        super().__init__(body)
        self.specials, self.mask, self.objective = list(specials), mask, objective
        (self.direction,) = type(body).directions(body.config)
        self.has_soft_targets, self.has_states = objective is None, isinstance(body, BERT)
        self.next = nn.Linear(body.width, 2) if objective else None
        if self.next is None:
            body.drop_pooler()
        else:
            nn.init.normal_(self.next.weight, std=_INIT_STD)
            nn.init.zeros_(self.next.bias)

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Return the summed cross-entropy of the chosen tokens, and of the objective of segment pairs."""
        assert batch.positions is not None
        assert batch.targets is not None
        masked_loss, pooled = self.body.masked_lm_loss(batch.tokens, batch.positions.ids, batch.targets)
        if self.objective is None or batch.labels is None:
            return {"masked": masked_loss}, None
        pair_loss = cross_entropy_sum(self._pair_logits(batch.tokens, pooled), batch.labels)
        return {"masked": masked_loss, self.objective: pair_loss}, None

    def read(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the logits (M, V) at the chosen positions, and the hidden states of a BERT."""
        assert batch.positions is not None
        if not self.has_states:
            return self._logits(batch.tokens, batch.positions.ids), None
        states = self.body.encode(batch.tokens)[0]
        return self.body.masked_logits_of(states, batch.positions.ids), states

    def losses(self, logits: Tensor, batch: Batch) -> Sums:
        """Return the summed cross-entropy of the chosen tokens."""
        assert batch.targets is not None
        return {"masked": cross_entropy_sum(logits, batch.targets)}

    def soft_losses(self, logits: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Sums:
        """Return the distance from a teacher's distributions, summed over the chosen tokens."""
        return {"masked": soft_cross_entropy_sum(logits, teacher, temperature)}

    def _pair_logits(self, tokens: Tokens, pooled: Tensor | None = None) -> Tensor:
        """Return the logits of segment B following A (0) or not (1), (B, 2)."""
        assert self.next is not None
        logits: Tensor = self.next(self.body.pooled_output(tokens) if pooled is None else pooled)
        return logits

    def flops(self, batch: Batch) -> int:
        """Return the flops of the body, with the output projection at the chosen positions alone."""
        parts = (getattr(self.body, name, None) for name in ("transform", "output"))
        output_size = sum(part.weight.numel() for part in parts if isinstance(part, nn.Linear))
        skipped = 0 if batch.positions is None else len(batch.tokens.ids) - len(batch.positions.ids)
        own_flops = 0 if self.next is None else self.next.weight.numel() * len(batch.tokens)
        return super().flops(batch) + 2 * (own_flops - output_size * skipped)

    def tally(self, batch: Batch) -> dict[str, float]:
        """Return the summed loss and the number of correct predictions of a batch, for each part."""
        assert batch.positions is not None
        assert batch.targets is not None
        masked_logits = self._logits(batch.tokens, batch.positions.ids)
        predictions: dict[str, tuple[Tensor, Tensor]] = {"masked": (masked_logits, batch.targets)}
        if self.objective is not None and batch.labels is not None:
            predictions[self.objective] = self._pair_logits(batch.tokens), batch.labels
        totals: dict[str, float] = {}
        for part, (logits, targets) in predictions.items():
            totals[part] = float(cross_entropy_sum(logits, targets))
            totals[f"{part} right"] = int((logits.argmax(-1) == targets).sum())
            totals[f"{part} count"] = len(targets)
        return totals

    def predict(self, batch: Batch, options: Section) -> list[MaskPredictions]:
        """Return the best tokens for each mask, without special tokens."""
        assert isinstance(options, FillMaskConfig)
        assert batch.positions is not None
        probs = self._logits(batch.tokens, batch.positions.ids).float().softmax(-1)
        probs[:, self.specials] = -1
        best, ids = probs.topk(min(options.top, probs.shape[-1] - len(self.specials)), -1)
        rows = zip(ids.tolist(), best.tolist(), strict=True)
        remaining = iter([list(zip(row_ids, values, strict=True)) for row_ids, values in rows])
        return [list(islice(remaining, size)) for size in batch.positions.lengths.tolist()]

    def log_probs(self, texts: Sequence[np.ndarray]) -> list[float]:
        """Return the pseudo-log-likelihood of each text, given with bos and eos."""
        totals = np.zeros(len(texts))
        for tokens, positions, targets, owners in self._masked_batches(texts):
            logits = self._logits(tokens, positions)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            logprobs = logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)
            np.add.at(totals, owners, logprobs.double().cpu().numpy())
        return [float(total) for total in totals]

    def _logits(self, tokens: Tokens, at: Tensor) -> Tensor:
        logits: Tensor = self.body.logits(tokens, at=at, direction=self.direction)
        return logits

    def _masked_batches(self, texts: Sequence[np.ndarray]) -> Iterator[tuple[Tokens, Tensor, Tensor, np.ndarray]]:
        """Yield batches of similar lengths: masked texts, flat positions, targets, and the number of their text."""
        device, pending, size = self.device, list[MaskedText](), 0
        max_tokens = BATCH_TOKENS if device.type == "cpu" else BATCH_TOKENS_ON_GPU
        for number in sorted(range(len(texts)), key=lambda number: len(texts[number])):
            for positions in self._masked_positions(len(texts[number])):
                pending.append((number, positions))
                size += len(texts[number])
                if size >= max_tokens:
                    yield self._mask_batch(texts, pending, device)
                    pending, size = [], 0
        if pending:
            yield self._mask_batch(texts, pending, device)

    def _masked_positions(self, length: int) -> list[range]:
        """Return the positions of each copy: one at a time, or all at once if no position attends to itself."""
        positions = range(1, length - 1)
        return [range(position, position + 1) for position in positions] if self.direction == "masked" else [positions]

    def _mask_batch(
        self, texts: Sequence[np.ndarray], pending: Sequence[MaskedText], device: torch.device
    ) -> tuple[Tokens, Tensor, Tensor, np.ndarray]:
        tokens = Tokens.pack([texts[number] for number, _ in pending])
        firsts = tokens.starts.tolist()
        at = torch.tensor(
            [first + position for first, (_, positions) in zip(firsts, pending, strict=False) for position in positions]
        )
        targets = tokens.ids[at]
        if self.direction == "masked":
            tokens.ids[at] = self.mask
        owners = np.repeat([number for number, _ in pending], [len(positions) for _, positions in pending])
        return tokens.to(device), at.to(device), targets.to(device), owners
