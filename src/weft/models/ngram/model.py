"""N-gram language models: how often words stood after the n - 1 before them, smoothed for what was never seen.

A document is w_0 w_1 … w_T with w_0 = bos and w_T = eos. A context u is the last n - 1 words, or all from bos on where
there are fewer; u' is u without its first word, |V| the words that can follow (all but bos), c(u w) how often u w was
seen, Σ goes over all w.

Maximum likelihood, `mle`: where u has never been seen before any word, u' speaks for it.

    p(w | u) = c(u w) / Σ c(u w)

`add-k` (Lidstone 1920; Laplace's for k = 1):

    p(w | u) = (c(u w) + k) / (Σ c(u w) + k |V|)

Interpolated modified Kneser-Ney, `kneser-ney` (Chen & Goodman 1999, section 3 and equation 26; Kneser & Ney 1995), as
KenLM's lmplz estimates it (Heafield et al. 2013):

    p(w | u) = (a(u w) - D(a(u w))) / Σ a(u w) + γ(u) p(w | u')
    γ(u)     = (D_1 N_1(u) + D_2 N_2(u) + D_3 N_3+(u)) / Σ a(u w)          N_r: how many u w have a(u w) = r
    a(g)     = c(g) where g has n words or begins with bos, else |{v: c(v g) > 0}|, the words it was seen after
    D_r      = r - (r + 1) Y n_{r+1} / n_r,  Y = n_1 / (n_1 + 2 n_2)         n_r: how many g of that order have a(g) = r
    p(w | )  = the same with the empty context, and 1 / |V| for p(w | u') there

D(a) is D_1, D_2 or, from 3 on, D_3 of the order; where an order has no such estimate, 0.5, 1 and 1.5, as lmplz has them
by --discount_fallback. All are kept as p(w | u) of what was seen, and γ(u): what was not has γ(u) p(w | u').

`prune` drops n-grams seen no more often than it says, one number an order, the last for all that follow; what they take
from a Kneser-Ney distribution goes to γ(u), and with `mle` and `add-k` they count as never seen. A word alone stays.
"""

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from weft.config.schema import Named
from weft.data.batching.packed import PackedItems
from weft.errors import RoleError
from weft.models.base import Budget, Direction, Model, Pass, Role
from weft.models.ngram.counting import Trie, count
from weft.models.ngram.external_sort import Corpus
from weft.models.ngram.smoothing import among, kneser_ney, relative, seen_often, tables_of, without
from weft.models.ngram.trie import Tables, uniform
from weft.tokens import Tokens

BUFFERS = ("orders", "words", "first", "logp", "codes", "values")


class NGramConfig(Named):
    """`order` is n; `at_once`, how many words are sorted in memory at a time, the rest is on the disk."""

    order: int = Field(5, ge=1, le=64)
    smoothing: Literal["kneser-ney", "add-k", "mle"] = "kneser-ney"
    k: float = Field(1.0, gt=0)
    prune: tuple[Annotated[int, Field(ge=0)], ...] = ()  # counts up to these are dropped
    at_once: int = Field(1 << 24, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> "NGramConfig":
        if len(self.prune) > self.order:
            raise ValueError(f"model.prune has a number an order: got {len(self.prune)} for model.order {self.order}")
        if list(self.prune) != sorted(self.prune):
            raise ValueError(f"model.prune must not fall from one order to the next: got {list(self.prune)}")
        return self

    @property
    def thresholds(self) -> tuple[int, ...]:
        """One number an order: counts up to it are dropped."""
        return (*self.prune, *[self.prune[-1] if self.prune else 0] * (self.order - len(self.prune)))


@dataclass(frozen=True)
class NGramState:
    """The numbers of each hypothesis's last word, its last two, and so on, (B, n - 1); -1 where they were not seen."""

    contexts: Tensor

    def select(self, rows: Tensor) -> "NGramState":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]."""
        return NGramState(self.contexts[rows.cpu()])


class NGram(Model):
    """Tables, and nothing else: they stay on the CPU, in their own types."""

    Config: ClassVar[type[Named]] = NGramConfig
    data_sized_buffers: ClassVar[bool] = True
    config: NGramConfig
    orders: Tensor
    words: Tensor
    first: Tensor
    logp: Tensor
    codes: Tensor
    values: Tensor
    discounts: Tensor  # (n, 3) D_1, D_2 and D_3 of each order, with Kneser-Ney

    def __init__(self, config: NGramConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        empty = uniform(vocab, config.order)
        for name in BUFFERS:
            self.register_buffer(name, torch.from_numpy(getattr(empty, name)))
        self.register_buffer("discounts", torch.zeros(config.order, 3))

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """It scores and generates."""
        return frozenset({Role.LANGUAGE_MODEL, Role.GENERATOR})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "NGram":
        """Stay as it is: no device and no type is better for a table than those it has."""
        return self

    @property
    def tables(self) -> Tables:
        """The tables as arrays."""
        return Tables(*(getattr(self, name).numpy() for name in BUFFERS))

    @tables.setter
    def tables(self, tables: Tables) -> None:
        for name in BUFFERS:
            setattr(self, name, torch.from_numpy(getattr(tables, name)))

    def is_consistent(self) -> bool:
        """Say whether the tables fit together."""
        return self.tables.is_consistent(self.vocab, self.config.order) and self.discounts.shape == (
            self.config.order,
            3,
        )

    def fit(self, data: PackedItems, budget: Budget) -> Iterator[Pass]:
        """Count and estimate: one pass over the data is all there is."""
        assert budget.eos is not None, "documents have an end"
        if budget.done or not len(data.ids):
            return
        corpus = Corpus(data.ids, data.starts, budget.eos, self.vocab)
        trie, words = yield from self._count(corpus, budget)
        self._learn(trie, int(data.ids[0]), budget.eos, budget.threads)
        yield Pass(1.0, math.nan, words, whole=True)

    def _count(self, corpus: Corpus, budget: Budget) -> Generator[Pass, None, tuple[Trie, int]]:
        """Count; report each run but the last, whose words are returned with the counts."""
        runs = count(corpus, self.config.order, self.config.at_once, budget.threads, budget.folder)
        read, words = 0, next(runs)
        while True:
            try:
                following = next(runs)
            except StopIteration as end:
                return end.value, words
            read += words
            yield Pass(read / len(corpus.ids), math.nan, words)
            words = following

    def _learn(self, trie: Trie, bos: int, eos: int, threads: int) -> None:
        """Turn counts into tables."""
        kept, pruned = seen_often(trie, self.config.thresholds, eos), any(self.config.thresholds)
        if self.config.smoothing == "kneser-ney":
            found = kneser_ney(trie, bos, eos, kept, threads)
            trie, found = (without(trie, kept), among(trie, found, kept)) if pruned else (trie, found)
        else:
            trie = without(trie, kept) if pruned else trie
            found = relative(trie, bos, eos, self.config.k if self.config.smoothing == "add-k" else 0.0)
        self.tables = tables_of(trie, found)
        self.discounts = torch.from_numpy(found.discounts).float()

    def log_prob(self, tokens: Tokens, targets: Tensor, direction: Direction = "forward") -> Tensor:
        """Look up the log-probability (N,) of each target."""
        check_forward(direction)
        ids, starts, wanted = (one.cpu().numpy() for one in (tokens.ids, tokens.starts, targets))
        return torch.from_numpy(self.tables.score(ids, starts, wanted, torch.get_num_threads())).to(tokens.device)

    def logits(self, tokens: Tokens, at: Tensor | None = None, direction: Direction = "forward") -> Tensor:
        """Return the log-probabilities of what follows each token, (N, V), or (len(at), V)."""
        check_forward(direction)
        contexts = self._contexts(tokens)
        return self._rows(contexts if at is None else contexts[at.cpu()], tokens.device)

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, NGramState]:
        """Read the prompts; return the log-probabilities (B, V) of what follows, and the state."""
        last = self._contexts(prompt)[prompt.starts[1:].cpu().long() - 1]
        return self._rows(last, prompt.device), NGramState(last)

    def step(self, ids: Tensor, state: NGramState) -> tuple[Tensor, NGramState]:
        """Read one more token a hypothesis."""
        contexts = torch.from_numpy(self.tables.step(state.contexts.numpy(), ids.cpu().numpy()))
        return self._rows(contexts, ids.device), NGramState(contexts)

    def _contexts(self, tokens: Tokens) -> Tensor:
        return torch.from_numpy(self.tables.contexts(tokens.ids.cpu().numpy(), tokens.starts.cpu().numpy()))

    def _rows(self, contexts: Tensor, device: torch.device) -> Tensor:
        return torch.from_numpy(self.tables.rows(contexts.numpy())).to(device)


def check_forward(direction: Direction) -> None:
    """Refuse to go backward."""
    if direction != "forward":
        raise RoleError(f"model: an n-gram model goes forward, but {direction!r} is asked for")
