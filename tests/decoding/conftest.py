"""A toy generator whose distributions depend on the whole prefix, so that a wrong `select` is detected."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.tokens import Tokens

Prefix = tuple[int, ...]
Table = Callable[[Prefix, Prefix], list[float]]  # (source, prefix with its prompt) -> logits


@dataclass
class ToyState:
    sources: list[Prefix]
    prefixes: list[Prefix]
    forgets: bool = False  # the negative control: a state that takes the right number of rows, but the wrong ones

    def select(self, rows: Tensor) -> "ToyState":
        picked = [row % len(self.prefixes) for row in range(len(rows))] if self.forgets else rows.tolist()
        return ToyState([self.sources[row] for row in picked], [self.prefixes[row] for row in picked], self.forgets)


class Toy:
    """A Generator: `table` gives the logits after a prefix; without one they are random, drawn from the prefix."""

    def __init__(
        self,
        vocab: int,
        seed: int = 0,
        table: Table | None = None,
        dtype: torch.dtype = torch.float64,
        forgets: bool = False,
    ) -> None:
        self.vocab, self.seed, self.dtype, self.forgets = vocab, seed, dtype, forgets
        self.table = table or self.draw
        self.rows: list[int] = []  # how many rows each step was handed
        self.memory: dict[tuple[Prefix, Prefix], list[float]] = {}

    def draw(self, source: Prefix, prefix: Prefix) -> list[float]:
        rng = np.random.default_rng([self.seed, len(source), *source, len(prefix), *prefix])
        return list(rng.normal(scale=1.5, size=self.vocab))

    def logits(self, source: Prefix, prefix: Prefix) -> list[float]:
        key = source, prefix
        if key not in self.memory:
            self.memory[key] = self.table(source, prefix)
        return self.memory[key]

    def logprobs(self, source: Prefix, prefix: Prefix) -> np.ndarray:
        logits = np.array(self.logits(source, prefix))
        best = logits.max()
        return logits - best - np.log(np.exp(logits - best).sum())

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, ToyState]:
        prefixes = [tuple(ids.tolist()) for ids in prompt.split()]
        sources = [tuple(ids.tolist()) for ids in source.split()] if source is not None else [()] * len(prefixes)
        state = ToyState(sources, prefixes, self.forgets)
        return self._read(state), state

    def step(self, ids: Tensor, state: ToyState) -> tuple[Tensor, ToyState]:
        assert len(ids) == len(state.prefixes)
        self.rows.append(len(ids))
        prefixes = [(*prefix, token) for prefix, token in zip(state.prefixes, ids.tolist(), strict=True)]
        state = ToyState(state.sources, prefixes, self.forgets)
        return self._read(state), state

    def _read(self, state: ToyState) -> Tensor:
        rows = [self.logits(*pair) for pair in zip(state.sources, state.prefixes, strict=True)]
        return torch.tensor(rows, dtype=torch.float64).to(self.dtype)


@pytest.fixture(scope="session")
def toy() -> type[Toy]:
    return Toy
