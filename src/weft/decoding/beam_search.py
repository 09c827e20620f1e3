"""Beam search: the `width` best prefixes of each source are extended together; the best finished ones are returned.

Each step scores all continuations of a source's live beams. Of the top `width` of them, those that end in eos are
finished and compete, by score, for the `keep` places in the pool; the best `width` that do not end stay live. So the
beam never narrows, and a finished hypothesis that the beam would have pruned does not count: otherwise a poor but short
hypothesis (such as the empty one) could enter the pool of every source, and often win (Stahlberg & Byrne 2019).

Score (Wu et al. 2016, eq. 14): score(Y) = log P(Y) / lp(|Y|), where |Y| counts eos and lp > 0 does not decrease.

**Early stopping changes no result.** Let x be a live beam and Y any hypothesis that it may become, |Y| <= max_length.
Each token multiplies by a probability, so log P(Y) <= log P(x) <= 0. A number that is not positive does not fall when
it is divided by more, so score(Y) <= log P(x) / lp(|Y|) <= log P(x) / lp(max_length). Once the pool is full and its
worst score is at least that bound for the best live beam, no Y can enter (a tie goes to the older), and the source
leaves the batch. Rounding is monotone, so this holds for the computed numbers too.

**Other stopping rules** may change results; they are those of transformers, for models tuned with them. The pool then
has a place for each beam. A source leaves the batch once all places are taken (`early_stopping: first`), or once, in
addition, the best live beam would not enter if it ended now: log P(x) / lp(|x|) <= the worst score (`early_stopping:
soon`).

**Constraints** that depend on the tokens so far (repetition penalty, n-grams, bad words) change log-probabilities
before beams are extended. They stay at most 0, so what is said of early stopping holds for their sums.

**Unfinished hypotheses**, cut off at max_length, come after all finished ones, sorted by score, and only fill
places that are left: their score is that of a prefix, an upper bound on that of all its continuations, and not
comparable with the score of a finished hypothesis.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.decoding.logits_processors import (
    NEG_INF,
    NO_CONSTRAINTS,
    ForbiddenTokens,
    HistoryConstraints,
    TokenHistory,
    force_eos,
    log_probs,
)
from weft.errors import DataError
from weft.models.base import Generator
from weft.tokens import Tokens

EarlyStopping = Literal["sure", "soon", "first"]
TOP_K_BLOCK = 64  # ids a block, of a large vocabulary, in the top-k on the CPU


@dataclass(frozen=True)
class Hypothesis:
    """One output of a search."""

    ids: tuple[int, ...]  # without eos
    # Natural log of the model's own probability, eos included, before temperature, top_k and top_p; of a beam search
    # with a repetition penalty, the sum of the penalized log-probabilities.
    logprob: float
    score: float  # logprob over the length penalty
    finished: bool  # ended by eos, not by max_length

    def __post_init__(self) -> None:
        if self.logprob != self.logprob:
            raise DataError(
                "decode: the model's logits are not numbers (NaN): its weights are damaged, or training diverged"
            )


class FinishedPool(NamedTuple):
    """The best finished hypotheses of each source, best first; an empty place has the score -inf."""

    score: Tensor  # (A, n)
    node: Tensor  # (A, n) tree node of the last token before eos

    def select(self, rows: Tensor) -> "FinishedPool":
        """Keep the sources `rows`."""
        return FinishedPool(*(part[rows] for part in self))

    def merge(self, other: "FinishedPool") -> "FinishedPool":
        """Keep the n best of both; a tie goes to `self`."""
        places = self.score.shape[1]
        score, order = torch.cat([self.score, other.score], 1).sort(dim=1, descending=True, stable=True)
        node = torch.cat([self.node, other.node], 1).gather(1, order[:, :places])
        return FinishedPool(score[:, :places], node)


class HypothesisTree:
    """Prefix tree of all beams: node i is `tokens[i]` after the prefix that ends at `parents[i]`; 0 is the root."""

    def __init__(self, device: torch.device) -> None:
        root = torch.zeros(1, dtype=torch.long, device=device)
        self.parents, self.tokens, self.size = [root], [root], 1

    def grow(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Add one token after each of `parents`; return the new nodes."""
        self.parents.append(parents.flatten())
        self.tokens.append(tokens.flatten())
        self.size += tokens.numel()
        return torch.arange(self.size - tokens.numel(), self.size, device=tokens.device).view_as(tokens)

    def paths(self, nodes: Tensor) -> list[tuple[int, ...]]:
        """Return the tokens from the root to each of `nodes` (M,)."""
        parents, tokens = torch.cat(self.parents).cpu().numpy(), torch.cat(self.tokens).cpu().numpy()
        node, columns = nodes.cpu().numpy(), []
        while node.any():
            columns.append(np.where(node > 0, tokens[node], -1))
            node = parents[node]
        table = np.stack(columns[::-1], 1) if columns else np.empty((len(node), 0), np.int64)
        return [tuple(row[row >= 0].tolist()) for row in table]


class ActiveBeams(NamedTuple):
    """The live beams of each active source, best first."""

    logprob: Tensor  # (A, k); -inf for beams that do not exist yet
    token: Tensor  # (A, k) the last token
    row: Tensor  # (A, k) row of the model state that it extends
    node: Tensor  # (A, k) tree node

    def select(self, rows: Tensor) -> "ActiveBeams":
        """Keep the sources `rows`."""
        return ActiveBeams(*(part[rows] for part in self))


@dataclass(frozen=True)
class Beam:
    """Configuration of a beam search. `penalty` is lp: positive, and not decreasing up to `max_length`."""

    eos: int
    width: int
    keep: int
    max_length: int
    penalty: Callable[[int], float]
    min_length: int = 0
    forbid: tuple[int, ...] = ()
    early_stopping: EarlyStopping = "sure"
    renormalize_logits: bool = False
    finish: bool = False  # whether max_length ends a hypothesis, rather than cutting it off
    constraints: HistoryConstraints = NO_CONSTRAINTS
    copies: ClassVar[int] = 1  # searches a prompt

    @property
    def places(self) -> int:
        """The size of a source's pool of finished hypotheses."""
        return self.keep if self.early_stopping == "sure" else max(self.width, self.keep)

    @property
    def key(self) -> tuple[int, ...]:
        """The settings that fix the shapes of the decoding state."""
        return self.eos, self.width, self.keep

    @torch.no_grad()
    def search(self, model: Generator, prompt: Tokens, source: Tokens | None = None) -> list[list[Hypothesis]]:
        """Return the `keep` best hypotheses of each prompt, best first (fewer if fewer exist)."""
        logits, state = model.start(prompt, source)
        run = BeamRun(self, prompt, logits)
        while beams := run.advance(logits):
            logits, state = model.step(beams.token.flatten(), state.select(beams.row.flatten()))
        return run.hypotheses()

    def begin(self, active: Tensor, dtype: torch.dtype) -> tuple[ActiveBeams, FinishedPool]:
        """Return one empty prefix a source, at the root, and an empty pool."""
        root = torch.zeros_like(active)[:, None]
        logprob = torch.zeros_like(root, dtype=torch.promote_types(dtype, torch.float32))
        pool = FinishedPool((logprob + NEG_INF).expand(-1, self.places), root.expand(-1, self.places))
        return ActiveBeams(logprob, root, root, root), pool

    def constrain(self, logprobs: Tensor, history: TokenHistory, logits: Tensor) -> Tensor:
        """Return log-probabilities after the constraints: as in transformers, it is these that a beam is scored by."""
        logprobs = self.constraints.penalize(logprobs, history)
        logprobs = self.constraints.ban(logprobs, history, self.eos, logits)
        return logprobs.log_softmax(-1) if self.renormalize_logits else logprobs

    def extend(
        self, logprobs: Tensor, beams: ActiveBeams, tree: HypothesisTree, length: int
    ) -> tuple[ActiveBeams, FinishedPool]:
        """Extend each beam by each token: return the best live beams, and the hypotheses that end."""
        num_sources, num_beams = beams.logprob.shape
        logprob, token, parent, ending = extend(logprobs, beams.logprob, self.eos, self.width)
        row = parent + torch.arange(0, num_sources * num_beams, num_beams, device=parent.device)[:, None]
        node = tree.grow(beams.node.gather(1, parent), token)
        return ActiveBeams(logprob, token, row, node), FinishedPool(ending / self.penalty(length), beams.node)

    def done(self, beams: ActiveBeams, pool: FinishedPool, length: int) -> Tensor:
        """Return for each source whether no live beam can still enter its pool: bounds in the module's docstring."""
        if self.early_stopping == "first":
            return pool.score[:, -1] > NEG_INF
        bound = self.penalty(self.max_length if self.early_stopping == "sure" else length)
        return beams.logprob[:, 0] / bound <= pool.score[:, -1]

    def collect(
        self, pools: list[tuple[Tensor, FinishedPool, bool]], tree: HypothesisTree, num_sources: int
    ) -> list[list[Hypothesis]]:
        """Read the hypotheses out of the tree; those of a source are in the order of `pools`."""
        owner = torch.cat([active[:, None].expand_as(pool.score).flatten() for active, pool, _ in pools])
        is_finished = [finished for _, pool, finished in pools for _ in range(pool.score.numel())]
        score, node = (torch.cat([pool[part].flatten() for _, pool, _ in pools]) for part in range(2))
        results: list[list[Hypothesis]] = [[] for _ in range(num_sources)]
        for source, ids, final_score, finished in zip(
            owner.tolist(), tree.paths(node), score.tolist(), is_finished, strict=True
        ):
            if final_score != NEG_INF:
                logprob = final_score * self.penalty(len(ids) + finished)
                results[source].append(Hypothesis(ids, logprob, final_score, finished))
        return [hypotheses[: self.keep] for hypotheses in results]


class BeamRun:
    """A beam search in progress, which is given the logits of each step by its caller."""

    def __init__(self, beam: Beam, prompt: Tokens, logits: Tensor) -> None:
        self.beam, self._sources, self._length = beam, len(prompt), 0
        self._forbidden = ForbiddenTokens.for_logits(logits, beam.eos, beam.forbid, beam.min_length)
        self._active = torch.arange(len(prompt), device=logits.device)  # (A,) sources not done
        self._beams, self._pool = beam.begin(self._active, logits.dtype)
        self._tree = HypothesisTree(logits.device)
        self._done: list[tuple[Tensor, FinishedPool, bool]] = []
        self._logprobs: Tensor | None = None
        self._history = TokenHistory.of(prompt) if beam.constraints else None

    def advance(self, logits: Tensor) -> ActiveBeams | None:
        """Extend the beams by their next tokens, of logits (A · b, V); return them, None once the search is over."""
        beam, history = self.beam, self._history
        self._length = length = self._length + 1
        self._beams, ended = beam.extend(self._log_probs(logits), self._beams, self._tree, length)
        self._pool = self._pool.merge(ended)
        if length == beam.max_length:
            return None
        done = beam.done(self._beams, self._pool, length)
        num_active = len(done) - int(done.sum())  # the one sync of a step
        if num_active < len(done):
            staying, leaving = done.to(torch.uint8).argsort(stable=True).tensor_split([num_active])
            self._done.append((self._active[leaving], self._pool.select(leaving), True))
            self._active, self._beams = self._active[staying], self._beams.select(staying)
            self._pool = self._pool.select(staying)
        if not num_active:
            return None
        if history is not None:
            self._history = history.select(self._beams.row.flatten()).append(self._beams.token.flatten())
        return self._beams

    def _log_probs(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities of the next tokens, after all constraints."""
        beam, history = self.beam, self._history
        renormalize = beam.renormalize_logits and history is None  # else after the constraints
        forbidden = self._forbidden.after(self._length - 1)
        logprobs = self._logprobs = log_probs(logits, forbidden, self._logprobs, renormalize)
        if history is not None:
            logprobs = beam.constrain(logprobs, history, logits)
        return force_eos(logprobs, beam.eos) if beam.finish and self._length == beam.max_length else logprobs

    def hypotheses(self) -> list[list[Hypothesis]]:
        """Return the best hypotheses of each source; those cut off at max_length fill places that are left."""
        beam, beams = self.beam, self._beams
        unfinished = FinishedPool(beams.logprob / beam.penalty(beam.max_length), beams.node)
        pools = [*self._done, (self._active, self._pool, True), (self._active, unfinished, False)]
        return beam.collect(pools, self._tree, self._sources)


class Extended(NamedTuple):
    """The beams of each source, one token longer."""

    logprob: Tensor  # (A, k) of the best live beams
    token: Tensor  # (A, k)
    parent: Tensor  # (A, k) the beam that each of them extends
    ending: Tensor  # (A, b) of a beam followed by eos, if that is among the top k of all; else -inf


def extend(logprobs: Tensor, before: Tensor, eos: int, width: int) -> Extended:
    """Extend beams of log-probability `before` (A, b) by each token, of `logprobs` (A · b, V), which is overwritten."""
    num_sources, num_beams = before.shape
    ending = before + logprobs[:, eos].view(num_sources, num_beams)
    logprobs[:, eos] = NEG_INF
    top_logprobs, ids = _top_k(logprobs, width)  # the best k of a source's k * V are among the best k of each beam
    live, index = (top_logprobs + before.view(-1, 1)).view(num_sources, -1).topk(width)
    threshold = torch.cat([live, ending], 1).topk(width).values[:, -1:]  # the k-th best of them all
    ending = torch.where(ending >= threshold, ending, NEG_INF)
    return Extended(live, ids.view(num_sources, -1).gather(1, index), index // width, ending)


def _top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of each row and their ids; a vocabulary smaller than k is padded with -inf."""
    if not scores.is_cuda and scores.shape[-1] >= 4 * k * TOP_K_BLOCK:
        return _blockwise_top_k(scores, k)
    values, ids = scores.topk(min(k, scores.shape[-1]))
    padding = (0, k - ids.shape[-1])
    return (pad(values, padding, value=NEG_INF), pad(ids, padding)) if padding[1] else (values, ids)


def _blockwise_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of each row and their ids: they lie in the k blocks with the highest maxima."""
    in_blocks = scores.shape[-1] // TOP_K_BLOCK * TOP_K_BLOCK
    blocks = scores[:, :in_blocks].unflatten(1, (-1, TOP_K_BLOCK)).amax(-1).topk(k).indices  # (B, k)
    block_ids = (blocks[..., None] * TOP_K_BLOCK + torch.arange(TOP_K_BLOCK)).flatten(1)
    candidates = torch.cat([block_ids, torch.arange(in_blocks, scores.shape[-1]).expand(len(scores), -1)], 1)
    values, index = scores.gather(1, candidates).topk(k)
    return values, candidates.gather(1, index)
