"""What a search has written, in memory that stays where it is: each turn is the same work on the same tensors.

A board has groups of rows: the beams of a source, or the one row of a sequence that is chosen greedily or sampled.
`choose` reads the logits of all rows and writes what comes next, in place and without a look from the host: what is
written is counted on the device. A group that is done goes on until it is taken off, and what it writes counts no more.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.decoding.beam_search import Beam, FinishedPool, Hypothesis, extend
from weft.decoding.logits_processors import NEVER, ForbiddenTokens, log_probs
from weft.nn.attention.kv_cache import on_triton

NARROW = 16  # beams that one kernel can look through at once


class Rules(Protocol):
    """How a search goes."""

    @property
    def eos(self) -> int:
        """The id that ends a text."""

    @property
    def forbid(self) -> tuple[int, ...]:
        """Ids that are never written."""

    @property
    def min_length(self) -> int:
        """Tokens before eos may be."""

    @property
    def max_length(self) -> int:
        """Tokens at most."""

    @property
    def width(self) -> int:
        """Rows a group."""

    @property
    def copies(self) -> int:
        """Groups a sequence."""

    @property
    def key(self) -> Hashable:
        """What is the same in all searches on one board."""


R = TypeVar("R", bound=Rules)


class DecodingState(ABC, Generic[R]):
    """What all searches write; a tensor of the groups has them as its first axis."""

    def __init__(self, rules: R, logits: Tensor, groups: int, room: int) -> None:
        ForbiddenTokens.over(logits, rules.eos, rules.forbid, rules.min_length)  # an id that is not there is refused
        self.eos, self.like, self.room = rules.eos, logits[:0], room
        self.token = self.new(groups, rules.width, dtype=torch.long)  # what the model reads next
        self.row = self.new(groups, rules.width, dtype=torch.long)  # whom each row continues
        self.done = self.new(groups, dtype=torch.bool)
        self.written = self.new(groups, dtype=torch.int32)  # tokens, of every group as many
        self.barred = self.new(logits.shape[-1], dtype=torch.bool)  # ids that may never be
        self.numbers = self.new(room + 4)  # what the rules are in numbers
        self.count, self.least = self.numbers[:1], self.numbers[1:2]  # groups that are real; tokens before eos

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Make a tensor, of log-probabilities where nothing else is said."""
        precise = torch.promote_types(self.like.dtype, torch.float32)
        return torch.zeros(*shape, dtype=dtype or precise, device=self.like.device)

    @property
    def grouped(self) -> list[Tensor]:
        """What goes with a group to another board, where an axis may be longer."""
        return [self.token, self.done, self.written]

    def tell(self, rules: R, groups: Tensor) -> None:
        """Say what the rules are, and which groups of the search are here."""
        barred = ForbiddenTokens.over(self.like, rules.eos, rules.forbid, rules.min_length)
        self.barred.zero_().index_fill_(0, barred.always, True)
        self.numbers.copy_(torch.tensor(self.rule(rules, len(groups)), dtype=torch.float64))

    def rule(self, rules: R, count: int) -> list[float]:
        """Put the rules into numbers, room + 4 of them."""
        return [count, rules.min_length, *[1.0] * (self.room + 2)]

    def reset(self) -> None:
        """Start anew; groups that are not real are done."""
        rows = torch.arange(self.row.numel(), device=self.row.device)
        self.row.copy_(rows.view_as(self.row))
        self.done.copy_(rows[: len(self.done)] >= self.count)
        self.written.zero_()

    def take(self, other: "DecodingState[R]", groups: Tensor) -> None:
        """Go on with these groups of another board."""
        for mine, theirs in zip(self.grouped, other.grouped, strict=True):
            mine[(slice(len(groups)), *map(slice, theirs.shape[1:]))] = theirs[groups]

    @abstractmethod
    def choose(self, logits: Tensor) -> None:
        """Write one more token a row."""

    @abstractmethod
    def found(self, rules: R, groups: Sequence[int]) -> list[list[Hypothesis]]:
        """Return the hypotheses of these groups, best first."""

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return log-probabilities (B, V) in which what may not come now is -inf."""
        found = log_probs(logits, self.row[0, :0]).masked_fill_(self.barred, NEVER)
        early = (self.written < self.least).repeat_interleave(self.row.shape[1])
        found[:, self.eos].masked_fill_(early, NEVER)
        return found

    def column(self) -> Tensor:
        """Return where the next token is written, (1,)."""
        return self.written[:1].long()


class BeamState(DecodingState[Beam]):
    """A beam search; a hypothesis of n tokens that ends in beam j is the node n · k + j of its source."""

    def __init__(self, rules: Beam, logits: Tensor, groups: int, room: int) -> None:
        super().__init__(rules, logits, groups, room)
        width, keep = rules.width, rules.keep
        self.logprob, self.score = self.new(groups, width), self.new(groups, keep)
        self.node = self.new(groups, keep, dtype=torch.int32)
        self.parents, self.tokens = (self.new(groups, room, width, dtype=torch.int32) for _ in range(2))
        self.bound, self.penalty = self.numbers[2:3], self.numbers[3:]  # of the longest, and by length

    @property
    def grouped(self) -> list[Tensor]:
        """What goes with a source."""
        return [*super().grouped, self.score, self.node, self.logprob, self.parents, self.tokens]

    def rule(self, rules: Beam, count: int) -> list[float]:
        """Put the penalties into numbers."""
        lengths = range(1, self.room + 1)
        return [count, rules.min_length, rules.penalty(rules.max_length), 1.0, *map(rules.penalty, lengths)]

    def reset(self) -> None:
        """Start with one empty prefix a source, and no hypothesis."""
        super().reset()
        self.logprob.fill_(NEVER)[:, 0] = 0.0
        self.score.fill_(NEVER)

    def choose(self, logits: Tensor) -> None:
        """Continue each beam by each token."""
        if on_triton(logits) and self.row.shape[1] <= NARROW:
            from weft.decoding import static_state_triton

            return static_state_triton.beam(self, logits)
        at, width = self.column(), self.row.shape[1]
        going, token, parent, ending = extend(self.log_probs(logits), self.logprob, self.eos, width)
        node = self.written[:, None] * width + torch.arange(width, dtype=torch.int32, device=at.device)
        pool = FinishedPool(self.score, self.node).merge(FinishedPool(ending / self.penalty[at + 1], node))
        self.score.copy_(pool.score)
        self.node.copy_(pool.node)
        self.parents.index_copy_(1, at, parent[:, None].int())
        self.tokens.index_copy_(1, at, token[:, None].int())
        self.logprob.copy_(going)
        self.token.copy_(token)
        self.row.copy_(parent + torch.arange(0, self.row.numel(), width, device=at.device)[:, None])
        self.done |= going[:, 0] / self.bound <= self.score[:, -1]
        self.written += 1
        return None

    def found(self, rules: Beam, groups: Sequence[int]) -> list[list[Hypothesis]]:
        """Return what is in the pool, and in places that are left what was cut off at the end."""
        score, node, logprob, parents, tokens = (_host(part, groups) for part in self.grouped[3:])
        written, keep = int(self.written[0]), score.shape[1]
        if written == rules.max_length:
            cut = np.broadcast_to(np.arange(rules.width) + written * rules.width, logprob.shape)
            score, node = np.hstack([score, logprob / _host(self.bound)]), np.hstack([node, cut])
        best = np.argsort(score == NEVER, axis=1, kind="stable")[:, : max(keep, np.isnan(score).sum())]
        paths = iter(_paths(parents[:, :written], tokens[:, :written], np.take_along_axis(node, best, 1)))
        found = [[(score[row, place], place < keep, next(paths)) for place in best[row]] for row in range(len(best))]
        return [[_hypothesis(rules, *one) for one in row if one[0] != NEVER][:keep] for row in found]


def _host(part: Tensor, groups: Sequence[int] | None = None) -> np.ndarray:
    held: np.ndarray = part.cpu().numpy()
    return held if groups is None else held[list(groups)]


def _paths(parents: np.ndarray, tokens: np.ndarray, nodes: np.ndarray) -> list[tuple[int, ...]]:
    """Read the tokens of the nodes (A, n) back, in trees (A, T, k)."""
    _, longest, width = parents.shape
    parents, tokens = parents.ravel(), tokens.ravel()
    tree = np.repeat(np.arange(len(nodes)) * longest * width, nodes.shape[1])
    lengths, beam = np.divmod(nodes.ravel(), width)
    grid = np.zeros((len(tree), longest), np.int64)
    for at in reversed(range(longest)):
        place = tree + at * width + beam
        grid[:, at] = tokens[place]
        beam = np.where(at < lengths, parents[place], beam)
    return [tuple(row[:length]) for row, length in zip(grid.tolist(), lengths.tolist(), strict=True)]


def _hypothesis(rules: Beam, score: float, finished: bool, ids: tuple[int, ...]) -> Hypothesis:
    return Hypothesis(ids, float(score) * rules.penalty(len(ids) + bool(finished)), float(score), bool(finished))


# Takes log-probabilities (A, V) and numbers in [0, 1), one a row (A,); returns a token a row (A,).
Pick = Callable[[Tensor, Tensor], Tensor]


def best(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Pick the most probable token; a tie goes to the lowest id."""
    return logprobs.argmax(-1)


@dataclass(frozen=True)
class Walking:
    """Choose token after token, the best or as `pick` does."""

    eos: int
    max_length: int
    penalty: Callable[[int], float]
    min_length: int = 0
    forbid: tuple[int, ...] = ()
    copies: int = 1
    rescale: bool = False  # this and the next are for a search that is not captured
    finish: bool = False
    pick: Pick = best
    picking: Hashable = None  # what `pick` does
    uniform: Tensor | None = None  # (groups, max_length)
    width: ClassVar[int] = 1

    @property
    def key(self) -> Hashable:
        """The way of choosing."""
        return self.eos, self.picking

    def hypothesis(self, ids: list[int], logprob: float) -> Hypothesis:
        """Put a text and its log-probability together."""
        finished = ids[-1] == self.eos
        return Hypothesis(tuple(ids[:-1] if finished else ids), logprob, logprob / self.penalty(len(ids)), finished)


class GreedyState(DecodingState[Walking]):
    """Sequences, each on its own."""

    def __init__(self, rules: Walking, logits: Tensor, groups: int, room: int) -> None:
        super().__init__(rules, logits, groups, room)
        self.pick, self.uniform = rules.pick, self.new(groups, room, dtype=torch.float32)
        self.tokens, self.logprobs = self.new(groups, room, dtype=torch.int32), self.new(groups, room)

    @property
    def grouped(self) -> list[Tensor]:
        """What goes with a sequence."""
        return [*super().grouped, self.tokens, self.logprobs]

    def tell(self, rules: Walking, groups: Tensor) -> None:
        """Hand out the numbers that were drawn, too."""
        super().tell(rules, groups)
        if rules.uniform is not None:
            drawn = rules.uniform[groups, : self.room]
            self.uniform[: len(groups), : drawn.shape[1]] = drawn

    def choose(self, logits: Tensor) -> None:
        """Write the next token of each sequence."""
        if self.pick is best and on_triton(logits):
            from weft.decoding import static_state_triton

            return static_state_triton.greedy(self, logits)
        at, logprobs = self.column(), self.log_probs(logits)
        token = self.pick(logprobs, self.uniform.index_select(1, at)[:, 0])[:, None]
        self.tokens.index_copy_(1, at, token.int())
        self.logprobs.index_copy_(1, at, logprobs.gather(1, token))
        self.token.copy_(token)
        self.done |= token[:, 0] == self.eos
        self.written += 1
        return None

    def found(self, rules: Walking, groups: Sequence[int]) -> list[list[Hypothesis]]:
        """Return the one text of each sequence, up to its eos."""
        written = int(self.written[0])
        tokens, logprobs = (_host(part, groups)[:, :written] for part in (self.tokens, self.logprobs))
        ends = np.where((tokens == rules.eos).any(1), (tokens == rules.eos).argmax(1) + 1, written)
        totals = np.where(np.arange(written) < ends[:, None], logprobs.astype(np.float64), 0.0).sum(1)
        rows = zip(tokens.tolist(), ends.tolist(), totals.tolist(), strict=True)
        return [[rules.hypothesis(ids[:end], total)] for ids, end, total in rows]
