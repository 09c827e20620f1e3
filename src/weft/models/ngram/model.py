"""N-gram language models: maximum likelihood, add-k, and interpolated modified Kneser-Ney.

A document is w_0 w_1 … w_T with w_0 = bos and w_T = eos. A context u is the last n - 1 words, or all from bos on where
there are fewer; u' is u without its first word, |V| the number of predictable words (all but bos), c(u w) the count of
u w, and Σ runs over all w.

Maximum likelihood, `mle`, backs off to u' where u was never seen before any word:

    p(w | u) = c(u w) / Σ c(u w)

`add-k` (Lidstone 1920; Laplace's for k = 1):

    p(w | u) = (c(u w) + k) / (Σ c(u w) + k |V|)

Interpolated modified Kneser-Ney, `kneser-ney` (Chen & Goodman 1999, section 3 and equation 26; Kneser & Ney 1995), as
KenLM's lmplz estimates it (Heafield et al. 2013):

    p(w | u) = (a(u w) - D(a(u w))) / Σ a(u w) + γ(u) p(w | u')
    γ(u)     = (D_1 N_1(u) + D_2 N_2(u) + D_3 N_3+(u)) / Σ a(u w)          N_r: the number of u w with a(u w) = r
    a(g)     = c(g) where g has n words or begins with bos, else |{v: c(v g) > 0}|, its continuation count
    D_r      = r - (r + 1) Y n_{r+1} / n_r,  Y = n_1 / (n_1 + 2 n_2)         n_r: how many g of that order have a(g) = r
    p(w | )  = the same with the empty context, and 1 / |V| for p(w | u') there

D(a) is D_1, D_2 or, from 3 on, D_3 of the order; where an order has no such estimate, 0.5, 1 and 1.5, as lmplz has them
by --discount_fallback. All are stored as p(w | u) of the n-grams seen, and the back-off weights γ(u): an unseen u w has
γ(u) p(w | u').

`prune` drops n-grams with counts up to a threshold, one number an order, the last for all higher orders. Their mass
goes to γ(u) in a Kneser-Ney distribution, and with `mle` and `add-k` they count as unseen. Unigrams are never dropped.
"""

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from weft.config.schema import Named
from weft.data.batching.packed_items import PackedItems
from weft.errors import RoleError
from weft.models.base import FitBudget, FitProgress, LMDirection, Model, Role
from weft.models.ngram.counting import Trie, count_ngrams
from weft.models.ngram.external_sort import NGramCorpus
from weft.models.ngram.smoothing import above_thresholds, add_k, kneser_ney, make_tables, prune_estimate, prune_trie
from weft.models.ngram.trie import NGramTables, uniform_tables
from weft.tokens import Tokens

BUFFERS = ("orders", "words", "first", "logp", "codes", "values")


class NGramConfig(Named):
    """`order` is n; `at_once` is the number of words sorted in memory at a time, the rest is on disk."""

    order: int = Field(5, ge=1, le=64)  # n, the length of the longest n-grams
    smoothing: Literal["kneser-ney", "add-k", "mle"] = "kneser-ney"  # interpolated modified Kneser-Ney, add-k or none
    k: float = Field(1.0, gt=0)  # add-k: what is added to each count
    prune: tuple[Annotated[int, Field(ge=0)], ...] = ()  # thresholds by order: counts up to these are dropped
    at_once: int = Field(1 << 24, ge=1)  # words sorted in memory at a time; the rest is on disk

    @model_validator(mode="after")
    def _check(self) -> "NGramConfig":
        if len(self.prune) > self.order:
            raise ValueError(f"model.prune has a number an order: got {len(self.prune)} for model.order {self.order}")
        if list(self.prune) != sorted(self.prune):
            raise ValueError(f"model.prune must not fall from one order to the next: got {list(self.prune)}")
        return self

    @property
    def thresholds(self) -> tuple[int, ...]:
        """The threshold of each order: counts up to it are dropped."""
        return (*self.prune, *[self.prune[-1] if self.prune else 0] * (self.order - len(self.prune)))


@dataclass(frozen=True)
class NGramState:
    """The trie nodes of each hypothesis's last word, its last two, and so on, (B, n - 1); -1: unseen."""

    contexts: Tensor

    def select(self, rows: Tensor) -> "NGramState":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]."""
        return NGramState(self.contexts[rows.cpu()])

    def join(self, other: "NGramState") -> "NGramState":
        """Return the state of these hypotheses and, after them, the other's."""
        return NGramState(torch.cat([self.contexts, other.contexts]))


class NGram(Model):
    """N-gram tables (`weft.models.ngram.trie`) as buffers, which stay on the CPU in their own dtypes."""

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
        empty = uniform_tables(vocab, config.order)
        for name in BUFFERS:
            self.register_buffer(name, torch.from_numpy(getattr(empty, name)))
        self.register_buffer("discounts", torch.zeros(config.order, 3))

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Return its roles: language model and generator."""
        return frozenset({Role.LANGUAGE_MODEL, Role.GENERATOR})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "NGram":
        """Ignore moves to other devices and dtypes: tables stay as they are."""
        return self

    @property
    def tables(self) -> NGramTables:
        """The tables as numpy arrays."""
        return NGramTables(*(getattr(self, name).numpy() for name in BUFFERS))

    @tables.setter
    def tables(self, tables: NGramTables) -> None:
        for name in BUFFERS:
            setattr(self, name, torch.from_numpy(getattr(tables, name)))

    def is_consistent(self) -> bool:
        """Return whether the tables are consistent with each other and with the configuration."""
        order = self.config.order
        return self.tables.is_consistent(self.vocab, order) and self.discounts.shape == (order, 3)

    def fit(self, data: PackedItems, budget: FitBudget) -> Iterator[FitProgress]:
        """Count n-grams and estimate probabilities, in one pass over the data."""
        assert budget.eos is not None, "documents have an end"
        if budget.done or not len(data.ids):
            return
        corpus = NGramCorpus(data.ids, data.starts, budget.eos, self.vocab)
        trie, words = yield from self._count(corpus, budget)
        self._estimate(trie, int(data.ids[0]), budget.eos, budget.threads)
        yield FitProgress(1.0, math.nan, words, whole=True)

    def _count(self, corpus: NGramCorpus, budget: FitBudget) -> Generator[FitProgress, None, tuple[Trie, int]]:
        """Count n-grams; report each run but the last, whose number of words is returned with the trie."""
        runs = count_ngrams(corpus, self.config.order, self.config.at_once, budget.threads, budget.folder)
        read, words = 0, next(runs)
        while True:
            try:
                next_words = next(runs)
            except StopIteration as end:
                return end.value, words
            read += words
            yield FitProgress(read / len(corpus.ids), math.nan, words)
            words = next_words

    def _estimate(self, trie: Trie, bos: int, eos: int, threads: int) -> None:
        """Set the tables from counts."""
        keep_mask, pruned = above_thresholds(trie, self.config.thresholds, eos), any(self.config.thresholds)
        if self.config.smoothing == "kneser-ney":
            estimate = kneser_ney(trie, bos, eos, keep_mask, threads)
            if pruned:
                trie, estimate = prune_trie(trie, keep_mask), prune_estimate(trie, estimate, keep_mask)
        else:
            trie = prune_trie(trie, keep_mask) if pruned else trie
            estimate = add_k(trie, bos, eos, self.config.k if self.config.smoothing == "add-k" else 0.0)
        self.tables = make_tables(trie, estimate)
        self.discounts = torch.from_numpy(estimate.discounts).float()

    def log_prob(self, tokens: Tokens, targets: Tensor, direction: LMDirection = "forward") -> Tensor:
        """Return the log-probability (N,) of each target."""
        check_forward(direction)
        ids, starts, target_ids = (tensor.cpu().numpy() for tensor in (tokens.ids, tokens.starts, targets))
        return torch.from_numpy(self.tables.score(ids, starts, target_ids, torch.get_num_threads())).to(tokens.device)

    def logits(self, tokens: Tokens, at: Tensor | None = None, direction: LMDirection = "forward") -> Tensor:
        """Return the log-probabilities of the next tokens, (N, V), or (len(at), V)."""
        check_forward(direction)
        contexts = self._contexts(tokens)
        return self._log_probs(contexts if at is None else contexts[at.cpu()], tokens.device)

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, NGramState]:
        """Return the log-probabilities (B, V) of the token after each prompt, and the state."""
        last = self._contexts(prompt)[prompt.starts[1:].cpu().long() - 1]
        return self._log_probs(last, prompt.device), NGramState(last)

    def step(self, ids: Tensor, state: NGramState) -> tuple[Tensor, NGramState]:
        """Append one token to each hypothesis, ids (B,); return the log-probabilities (B, V), and the state."""
        contexts = torch.from_numpy(self.tables.step(state.contexts.numpy(), ids.cpu().numpy()))
        return self._log_probs(contexts, ids.device), NGramState(contexts)

    def _contexts(self, tokens: Tokens) -> Tensor:
        return torch.from_numpy(self.tables.contexts(tokens.ids.cpu().numpy(), tokens.starts.cpu().numpy()))

    def _log_probs(self, contexts: Tensor, device: torch.device) -> Tensor:
        return torch.from_numpy(self.tables.rows(contexts.numpy())).to(device)


def check_forward(direction: LMDirection) -> None:
    """Raise RoleError for any direction but forward."""
    if direction != "forward":
        raise RoleError(f"model: an n-gram model goes forward, but {direction!r} is asked for")
