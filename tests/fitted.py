"""A model that only counts: what the trainer of fitted models is tried with."""

import time
from collections.abc import Iterator
from typing import ClassVar

import torch

from weft.config.schema import Named
from weft.data.batching.packed_items import PackedItems
from weft.models.base import FitBudget, FitProgress, Model, Role


class UnigramConfig(Named):
    stop_after: int | None = None  # passes, after which it raises
    seconds: float = 0.0  # that a pass takes


class Unigram(Model):
    """p(w) ∝ 1 + how often w was read, in all passes."""

    Config: ClassVar[type[Named]] = UnigramConfig

    def __init__(self, config, vocab, target_vocab=None):
        super().__init__(config, vocab, target_vocab)
        self.register_buffer("counts", torch.ones(vocab, dtype=torch.float64))

    @classmethod
    def roles(cls, config):
        return frozenset({Role.LANGUAGE_MODEL})

    def fit(self, data: PackedItems, budget: FitBudget) -> Iterator[FitProgress]:
        began = time.perf_counter() - budget.elapsed
        for number in range(budget.done, budget.passes):
            if self.config.stop_after == number:
                raise KeyboardInterrupt
            if budget.seconds is not None and time.perf_counter() - began >= budget.seconds:
                return
            time.sleep(self.config.seconds)
            half = len(data.ids) // 2
            for part, share in ((data.ids[:half], 0.5), (data.ids[half:], 1.0)):
                self.counts += torch.bincount(torch.from_numpy(part.astype("int64")), minlength=self.vocab)
                yield FitProgress(number + share, float("nan"), len(part), share == 1.0)

    def logits(self, tokens, at=None, direction="forward"):
        return self.counts.log().expand(len(tokens.ids), -1)
