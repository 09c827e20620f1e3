"""Beam search: the `width` best prefixes of each source go on together, and the best that end are kept.

Each step looks at all continuations of a source's live beams. Of the top `width` of them, those that end in eos are
finished and compete, by score, for the `keep` places in the pool; the best `width` that do not end go on. So a beam
never narrows, and an ending that the beam would have pruned does not count: without this, a poor but short hypothesis
(the empty one, say) would have its chance at every source, and often win (Stahlberg & Byrne 2019).

Score (Wu et al. 2016, eq. 14): score(Y) = log P(Y) / lp(|Y|), where |Y| counts eos and lp > 0 does not decrease.

**The early stop changes no answer.** Let x be a live beam and Y any hypothesis that it may become, |Y| <= max_length.
Each token multiplies by a probability, so log P(Y) <= log P(x) <= 0. A number that is not positive does not fall when
it is divided by more, so score(Y) <= log P(x) / lp(|Y|) <= log P(x) / lp(max_length). Once the pool is full and its
worst score is at least that bound for the best live beam, no Y can enter (a tie goes to the older), and the source
leaves the batch. Rounding is monotone, so this holds for the computed numbers too.

**Other stops** may change answers; they are those of transformers, for models tuned with them. A pool then has
a place for each beam, and a source leaves the batch once all are taken (`stopping: first`), or once, too, the best live
beam, were it to end now, would not enter: log P(x) / lp(|x|) is no more than the worst score (`stopping: soon`).

**Unfinished hypotheses**, cut off at max_length, come after all finished ones, by score among themselves, and only fill
places that are left: theirs is the probability of a prefix, an upper bound on that of all it could have become, so it
does not compare with the probability of a whole hypothesis.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.decoding.logits_processors import NEVER, ForbiddenTokens, ending, log_probs
from weft.errors import WeftError
from weft.models.base import Generator
from weft.tokens import Tokens

Stopping = Literal["sure", "soon", "first"]
BLOCK = 64  # ids of a large vocabulary that are looked at together, on the CPU


@dataclass(frozen=True)
class Hypothesis:
    """One output of a search."""

    ids: tuple[int, ...]  # without eos
    logprob: float  # natural log of the model's own probability, eos included, before temperature, top_k and top_p
    score: float  # logprob over the length penalty
    finished: bool  # ended by eos, not by max_length

    def __post_init__(self) -> None:
        if self.logprob != self.logprob:
            raise WeftError(
                "decode: the model's logits are not numbers (NaN): its weights are damaged, or training diverged"
            )


class FinishedPool(NamedTuple):
    """The best hypotheses of each source, best first; an empty place has the score -inf."""

    score: Tensor  # (A, n)
    node: Tensor  # (A, n) the last token before eos, in the tree

    def select(self, rows: Tensor) -> "FinishedPool":
        """Keep the sources `rows`."""
        return FinishedPool(*(part[rows] for part in self))

    def merge(self, other: "FinishedPool") -> "FinishedPool":
        """Keep the n best of both; a tie goes to what was here."""
        places = self.score.shape[1]
        score, order = torch.cat([self.score, other.score], 1).sort(dim=1, descending=True, stable=True)
        node = torch.cat([self.node, other.node], 1).gather(1, order[:, :places])
        return FinishedPool(score[:, :places], node)


class Tree:
    """Every token that a beam took: node i is `tokens[i]` after the prefix that ends at `parents[i]`; 0 is the root."""

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
        """Read the tokens from the root to each of `nodes` (M,)."""
        parents, tokens = torch.cat(self.parents).cpu().numpy(), torch.cat(self.tokens).cpu().numpy()
        here, columns = nodes.cpu().numpy(), []
        while here.any():
            columns.append(np.where(here > 0, tokens[here], -1))
            here = parents[here]
        grid = np.stack(columns[::-1], 1) if columns else np.empty((len(here), 0), np.int64)
        return [tuple(row[row >= 0].tolist()) for row in grid]


class ActiveBeams(NamedTuple):
    """The live beams of each active source, best first."""

    logprob: Tensor  # (A, k); -inf where there are not so many
    token: Tensor  # (A, k) the last token
    row: Tensor  # (A, k) the row of the state that it continues
    node: Tensor  # (A, k) its place in the tree

    def select(self, rows: Tensor) -> "ActiveBeams":
        """Keep the sources `rows`."""
        return ActiveBeams(*(part[rows] for part in self))


@dataclass(frozen=True)
class Beam:
    """A beam search, set up. `penalty` is lp: positive, and not decreasing up to `max_length`."""

    eos: int
    width: int
    keep: int
    max_length: int
    penalty: Callable[[int], float]
    min_length: int = 0
    forbid: tuple[int, ...] = ()
    stopping: Stopping = "sure"
    rescale: bool = False
    finish: bool = False  # whether max_length ends a hypothesis, rather than cutting it off
    copies: ClassVar[int] = 1  # searches a prompt

    @property
    def places(self) -> int:
        """How many hypotheses of a source the pool holds."""
        return self.keep if self.stopping == "sure" else max(self.width, self.keep)

    @property
    def key(self) -> tuple[int, ...]:
        """What the shape of a search depends on."""
        return self.eos, self.width, self.keep

    @torch.no_grad()
    def search(self, model: Generator, prompt: Tokens, source: Tokens | None = None) -> list[list[Hypothesis]]:
        """Return the `keep` best hypotheses of each prompt, best first (fewer where there are not so many)."""
        logits, state = model.start(prompt, source)
        barred = ForbiddenTokens.over(logits, self.eos, self.forbid, self.min_length)
        active = torch.arange(len(prompt), device=logits.device)  # (A,) the sources that are not done
        front, pool, tree = *self._begin(active, logits.dtype), Tree(active.device)
        found: list[tuple[Tensor, FinishedPool, bool]] = []
        logprobs: Tensor | None = None
        for length in range(1, self.max_length + 1):
            logprobs = log_probs(logits, barred.after(length - 1), logprobs, self.rescale)
            if self.finish and length == self.max_length:
                logprobs = ending(logprobs, self.eos)
            front, ended = self._extend(logprobs, front, tree, length)
            pool = pool.merge(ended)
            if length == self.max_length:
                break
            done = self._done(front, pool, length)
            left = len(done) - int(done.sum())  # the one sync of a step
            if left < len(done):
                stay, leave = done.to(torch.uint8).argsort(stable=True).tensor_split([left])
                found.append((active[leave], pool.select(leave), True))
                active, front, pool = active[stay], front.select(stay), pool.select(stay)
            if not left:
                break
            logits, state = model.step(front.token.flatten(), state.select(front.row.flatten()))
        cut = FinishedPool(front.logprob / self.penalty(self.max_length), front.node)
        return self._collect([*found, (active, pool, True), (active, cut, False)], tree, len(prompt))

    def _begin(self, active: Tensor, dtype: torch.dtype) -> tuple[ActiveBeams, FinishedPool]:
        """One empty prefix a source, at the root, and no hypothesis yet."""
        node = torch.zeros_like(active)[:, None]
        logprob = torch.zeros_like(node, dtype=torch.promote_types(dtype, torch.float32))
        empty = FinishedPool((logprob + NEVER).expand(-1, self.places), node.expand(-1, self.places))
        return ActiveBeams(logprob, node, node, node), empty

    def _extend(
        self, logprobs: Tensor, front: ActiveBeams, tree: Tree, length: int
    ) -> tuple[ActiveBeams, FinishedPool]:
        """Continue each beam by each token: the best that go on, and those that end."""
        sources, beams = front.logprob.shape
        going, token, parent, ending = extend(logprobs, front.logprob, self.eos, self.width)
        row = parent + torch.arange(0, sources * beams, beams, device=parent.device)[:, None]
        node = tree.grow(front.node.gather(1, parent), token)
        return ActiveBeams(going, token, row, node), FinishedPool(ending / self.penalty(length), front.node)

    def _done(self, front: ActiveBeams, pool: FinishedPool, length: int) -> Tensor:
        """Say of each source whether no live beam can still enter its pool: the bounds of the module's docstring."""
        if self.stopping == "first":
            return pool.score[:, -1] > NEVER
        bound = self.penalty(self.max_length if self.stopping == "sure" else length)
        return front.logprob[:, 0] / bound <= pool.score[:, -1]

    def _collect(
        self, found: list[tuple[Tensor, FinishedPool, bool]], tree: Tree, sources: int
    ) -> list[list[Hypothesis]]:
        """Read the hypotheses out of the tree; of each source, those found first come first."""
        owner = torch.cat([active[:, None].expand_as(pool.score).flatten() for active, pool, _ in found])
        whole = [finished for _, pool, finished in found for _ in range(pool.score.numel())]
        score, node = (torch.cat([pool[part].flatten() for _, pool, _ in found]) for part in range(2))
        results: list[list[Hypothesis]] = [[] for _ in range(sources)]
        for place, ids, value, finished in zip(owner.tolist(), tree.paths(node), score.tolist(), whole, strict=True):
            if value != NEVER:
                logprob = value * self.penalty(len(ids) + finished)
                results[place].append(Hypothesis(ids, logprob, value, finished))
        return [candidates[: self.keep] for candidates in results]


class Extended(NamedTuple):
    """The beams of each source, one token on."""

    logprob: Tensor  # (A, k) of the best that go on
    token: Tensor  # (A, k)
    parent: Tensor  # (A, k) the beam that each of them continues
    ending: Tensor  # (A, b) of a beam with eos after it, if that is among the top k of all; else -inf


def extend(logprobs: Tensor, before: Tensor, eos: int, width: int) -> Extended:
    """Continue beams of log-probability `before` (A, b) by each token, of `logprobs` (A · b, V), which is used up."""
    sources, beams = before.shape
    ending = before + logprobs[:, eos].view(sources, beams)
    logprobs[:, eos] = NEVER
    each, ids = _top(logprobs, width)  # the best k of a source's k * V are among the best k of each beam
    going, place = (each + before.view(-1, 1)).view(sources, -1).topk(width)
    last = torch.cat([going, ending], 1).topk(width).values[:, -1:]  # the k-th best of them all
    ending = torch.where(ending >= last, ending, NEVER)
    return Extended(going, ids.view(sources, -1).gather(1, place), place // width, ending)


def _top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of each row and their ids; a vocabulary that is smaller is filled up with -inf."""
    if not scores.is_cuda and scores.shape[-1] >= 4 * k * BLOCK:
        return _top_of_blocks(scores, k)
    values, ids = scores.topk(min(k, scores.shape[-1]))
    missing = (0, k - ids.shape[-1])
    return (pad(values, missing, value=NEVER), pad(ids, missing)) if missing[1] else (values, ids)


def _top_of_blocks(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the k best in the k blocks with the highest peaks: these are quick to find, and blocks are short."""
    whole = scores.shape[-1] // BLOCK * BLOCK
    blocks = scores[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1).topk(k).indices  # (B, k)
    inside = (blocks[..., None] * BLOCK + torch.arange(BLOCK)).flatten(1)
    places = torch.cat([inside, torch.arange(whole, scores.shape[-1]).expand(len(scores), -1)], 1)
    values, at = scores.gather(1, places).topk(k)
    return values, places.gather(1, at)
