"""Static decoding state for CUDA graphs: every step runs the same operations on the same tensors.

A state has groups of rows: the beams of a source, or the one row of a sequence that is decoded greedily or sampled.
`choose` reads the logits of all rows and writes the next tokens in place, without a sync with the host: the number of
tokens written is counted on the device. A group that is done still steps until it is removed; its output is ignored.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.decoding.beam_search import Beam, FinishedPool, Hypothesis, extend
from weft.decoding.logits_processors import NEG_INF, NO_CONSTRAINTS, ForbiddenTokens, HistoryConstraints, log_probs
from weft.nn.kernels.dispatch import decodes_on_triton

NARROW = 16  # the widest beam that the Triton kernel handles


class SearchRules(Protocol):
    """Settings of a search."""

    @property
    def eos(self) -> int:
        """The id of the end-of-sequence token."""

    @property
    def forbid(self) -> tuple[int, ...]:
        """Ids that are never produced."""

    @property
    def min_length(self) -> int:
        """The least number of tokens before eos."""

    @property
    def max_length(self) -> int:
        """The greatest number of tokens, eos included."""

    @property
    def width(self) -> int:
        """The number of rows of a group."""

    @property
    def copies(self) -> int:
        """The number of groups of a prompt."""

    @property
    def key(self) -> Hashable:
        """The settings that all searches with one state share."""


R = TypeVar("R", bound=SearchRules)


class DecodingState(ABC, Generic[R]):
    """State that all searches have; the first axis of a tensor by group is the group."""

    def __init__(self, rules: R, logits: Tensor, groups: int, room: int) -> None:
        ForbiddenTokens.for_logits(logits, rules.eos, rules.forbid, rules.min_length)  # checks the ids
        self.eos, self.logits_like, self.room = rules.eos, logits[:0], room
        self.token = self.new_zeros(groups, rules.width, dtype=torch.long)  # the model's next input
        self.row = self.new_zeros(groups, rules.width, dtype=torch.long)  # the row that each row extends
        self.done = self.new_zeros(groups, dtype=torch.bool)
        self.written = self.new_zeros(groups, dtype=torch.int32)  # tokens so far, the same for every group
        self.forbidden = self.new_zeros(logits.shape[-1], dtype=torch.bool)  # ids that are never produced
        self.rule_buffer = self.new_zeros(room + 4)  # the settings as numbers
        self.num_groups, self.min_length = self.rule_buffer[:1], self.rule_buffer[1:2]  # groups without padding

    def new_zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of zeros, by default in the dtype of log-probabilities."""
        precise = torch.promote_types(self.logits_like.dtype, torch.float32)
        return torch.zeros(*shape, dtype=dtype or precise, device=self.logits_like.device)

    @property
    def group_tensors(self) -> list[Tensor]:
        """The tensors by group, which `copy_from` copies; another state may have longer axes."""
        return [self.token, self.done, self.written]

    def set_rules(self, rules: R, groups: Tensor) -> None:
        """Write the settings of a search; `groups` are the numbers of its groups in this state."""
        forbidden = ForbiddenTokens.for_logits(self.logits_like, rules.eos, rules.forbid, rules.min_length)
        self.forbidden.zero_().index_fill_(0, forbidden.always, True)
        self.rule_buffer.copy_(torch.tensor(self.rule_values(rules, len(groups)), dtype=torch.float64))

    def rule_values(self, rules: R, count: int) -> list[float]:
        """Return the settings as room + 4 numbers."""
        return [count, rules.min_length, *[1.0] * (self.room + 2)]

    def reset(self) -> None:
        """Start a search; groups that are padding are done."""
        rows = torch.arange(self.row.numel(), device=self.row.device)
        self.row.copy_(rows.view_as(self.row))
        self.done.copy_(rows[: len(self.done)] >= self.num_groups)
        self.written.zero_()

    def copy_from(self, other: "DecodingState[R]", groups: Tensor) -> None:
        """Copy these groups of another state into the first groups of this one."""
        for target, source in zip(self.group_tensors, other.group_tensors, strict=True):
            target[(slice(len(groups)), *map(slice, source.shape[1:]))] = source[groups]

    @abstractmethod
    def choose(self, logits: Tensor) -> None:
        """Choose and write the next token of each row."""

    @abstractmethod
    def hypotheses(self, rules: R, groups: Sequence[int]) -> list[list[Hypothesis]]:
        """Return the hypotheses of these groups, best first."""

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return log-probabilities (B, V), -inf for tokens that are forbidden at this step."""
        logprobs = log_probs(logits, self.row[0, :0]).masked_fill_(self.forbidden, NEG_INF)
        early = (self.written < self.min_length).repeat_interleave(self.row.shape[1])
        logprobs[:, self.eos].masked_fill_(early, NEG_INF)
        return logprobs

    def column(self) -> Tensor:
        """Return the index of the next token, (1,)."""
        return self.written[:1].long()


class BeamState(DecodingState[Beam]):
    """State of a beam search; a hypothesis of n tokens that ends in beam j is the node n · k + j of its source."""

    def __init__(self, rules: Beam, logits: Tensor, groups: int, room: int) -> None:
        super().__init__(rules, logits, groups, room)
        width, keep = rules.width, rules.keep
        self.logprob, self.score = self.new_zeros(groups, width), self.new_zeros(groups, keep)
        self.node = self.new_zeros(groups, keep, dtype=torch.int32)
        self.parents, self.tokens = (self.new_zeros(groups, room, width, dtype=torch.int32) for _ in range(2))
        self.bound, self.penalty = self.rule_buffer[2:3], self.rule_buffer[3:]  # lp(max_length), and lp by length

    @property
    def group_tensors(self) -> list[Tensor]:
        """The tensors by source."""
        return [*super().group_tensors, self.score, self.node, self.logprob, self.parents, self.tokens]

    def rule_values(self, rules: Beam, count: int) -> list[float]:
        """Return the settings with the length penalties."""
        lengths = range(1, self.room + 1)
        return [count, rules.min_length, rules.penalty(rules.max_length), 1.0, *map(rules.penalty, lengths)]

    def reset(self) -> None:
        """Start with one empty prefix a source, and an empty pool."""
        super().reset()
        self.logprob.fill_(NEG_INF)[:, 0] = 0.0
        self.score.fill_(NEG_INF)

    def choose(self, logits: Tensor) -> None:
        """Extend each beam by each token (`weft.decoding.beam_search.extend`)."""
        if decodes_on_triton(logits) and self.row.shape[1] <= NARROW:
            from weft.decoding import static_state_triton

            return static_state_triton.beam(self, logits)
        column, width = self.column(), self.row.shape[1]
        logprob, token, parent, ending = extend(self.log_probs(logits), self.logprob, self.eos, width)
        node = self.written[:, None] * width + torch.arange(width, dtype=torch.int32, device=column.device)
        pool = FinishedPool(self.score, self.node).merge(FinishedPool(ending / self.penalty[column + 1], node))
        self.score.copy_(pool.score)
        self.node.copy_(pool.node)
        self.parents.index_copy_(1, column, parent[:, None].int())
        self.tokens.index_copy_(1, column, token[:, None].int())
        self.logprob.copy_(logprob)
        self.token.copy_(token)
        self.row.copy_(parent + torch.arange(0, self.row.numel(), width, device=column.device)[:, None])
        self.done |= logprob[:, 0] / self.bound <= self.score[:, -1]
        self.written += 1
        return None

    def hypotheses(self, rules: Beam, groups: Sequence[int]) -> list[list[Hypothesis]]:
        """Return the hypotheses in the pool and, if places are left, those cut off at max_length."""
        score, node, logprob, parents, tokens = (_to_numpy(tensor, groups) for tensor in self.group_tensors[3:])
        written, keep = int(self.written[0]), score.shape[1]
        if written == rules.max_length:
            unfinished = np.broadcast_to(np.arange(rules.width) + written * rules.width, logprob.shape)
            score, node = np.hstack([score, logprob / _to_numpy(self.bound)]), np.hstack([node, unfinished])
        order = np.argsort(score == NEG_INF, axis=1, kind="stable")[:, : max(keep, np.isnan(score).sum())]
        paths = iter(_read_paths(parents[:, :written], tokens[:, :written], np.take_along_axis(node, order, 1)))
        entries = [[(score[row, slot], slot < keep, next(paths)) for slot in order[row]] for row in range(len(order))]
        return [[_make_hypothesis(rules, *entry) for entry in row if entry[0] != NEG_INF][:keep] for row in entries]


def _to_numpy(tensor: Tensor, groups: Sequence[int] | None = None) -> np.ndarray:
    array: np.ndarray = tensor.cpu().numpy()
    return array if groups is None else array[list(groups)]


def _read_paths(parents: np.ndarray, tokens: np.ndarray, nodes: np.ndarray) -> list[tuple[int, ...]]:
    """Return the tokens from the root to each of the nodes (A, n), in trees (A, T, k)."""
    _, max_length, width = parents.shape
    parents, tokens = parents.ravel(), tokens.ravel()
    offset = np.repeat(np.arange(len(nodes)) * max_length * width, nodes.shape[1])
    lengths, beam = np.divmod(nodes.ravel(), width)
    table = np.zeros((len(offset), max_length), np.int64)
    for position in reversed(range(max_length)):
        index = offset + position * width + beam
        table[:, position] = tokens[index]
        beam = np.where(position < lengths, parents[index], beam)
    return [tuple(row[:length]) for row, length in zip(table.tolist(), lengths.tolist(), strict=True)]


def _make_hypothesis(rules: Beam, score: float, finished: bool, ids: tuple[int, ...]) -> Hypothesis:
    return Hypothesis(ids, float(score) * rules.penalty(len(ids) + bool(finished)), float(score), bool(finished))


# Maps log-probabilities (A, V) and uniform numbers in [0, 1) (A,) to tokens (A,).
Pick = Callable[[Tensor, Tensor], Tensor]


def argmax_token(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Return the most probable token; a tie goes to the lowest id."""
    return logprobs.argmax(-1)


@dataclass(frozen=True)
class GreedyRules:
    """Settings of greedy search or sampling: `pick` chooses each token."""

    eos: int
    max_length: int
    penalty: Callable[[int], float]
    min_length: int = 0
    forbid: tuple[int, ...] = ()
    copies: int = 1
    renormalize_logits: bool = False  # this and the next two only without a CUDA graph
    finish: bool = False
    constraints: HistoryConstraints = NO_CONSTRAINTS
    pick: Pick = argmax_token
    pick_key: Hashable = None  # the settings of `pick`
    uniform: Tensor | None = None  # (groups, max_length)
    width: ClassVar[int] = 1

    @property
    def key(self) -> Hashable:
        """The settings that fix how tokens are chosen."""
        return self.eos, self.pick_key

    def hypothesis(self, ids: list[int], logprob: float) -> Hypothesis:
        """Return the hypothesis of these ids, which may end in eos."""
        finished = ids[-1] == self.eos
        return Hypothesis(tuple(ids[:-1] if finished else ids), logprob, logprob / self.penalty(len(ids)), finished)


class GreedyState(DecodingState[GreedyRules]):
    """State of greedy search or sampling: a group is one sequence."""

    def __init__(self, rules: GreedyRules, logits: Tensor, groups: int, room: int) -> None:
        super().__init__(rules, logits, groups, room)
        self.pick, self.uniform = rules.pick, self.new_zeros(groups, room, dtype=torch.float32)
        self.tokens, self.logprobs = self.new_zeros(groups, room, dtype=torch.int32), self.new_zeros(groups, room)

    @property
    def group_tensors(self) -> list[Tensor]:
        """The tensors by sequence."""
        return [*super().group_tensors, self.tokens, self.logprobs]

    def set_rules(self, rules: GreedyRules, groups: Tensor) -> None:
        """Write the settings and the uniform numbers of each sequence."""
        super().set_rules(rules, groups)
        if rules.uniform is not None:
            uniform = rules.uniform[groups, : self.room]
            self.uniform[: len(groups), : uniform.shape[1]] = uniform

    def choose(self, logits: Tensor) -> None:
        """Choose and write the next token of each sequence."""
        if self.pick is argmax_token and decodes_on_triton(logits):
            from weft.decoding import static_state_triton

            return static_state_triton.greedy(self, logits)
        column, logprobs = self.column(), self.log_probs(logits)
        token = self.pick(logprobs, self.uniform.index_select(1, column)[:, 0])[:, None]
        self.tokens.index_copy_(1, column, token.int())
        self.logprobs.index_copy_(1, column, logprobs.gather(1, token))
        self.token.copy_(token)
        self.done |= token[:, 0] == self.eos
        self.written += 1
        return None

    def hypotheses(self, rules: GreedyRules, groups: Sequence[int]) -> list[list[Hypothesis]]:
        """Return the hypothesis of each sequence, up to its eos."""
        written = int(self.written[0])
        tokens, logprobs = (_to_numpy(tensor, groups)[:, :written] for tensor in (self.tokens, self.logprobs))
        ends = np.where((tokens == rules.eos).any(1), (tokens == rules.eos).argmax(1) + 1, written)
        totals = np.where(np.arange(written) < ends[:, None], logprobs.astype(np.float64), 0.0).sum(1)
        rows = zip(tokens.tolist(), ends.tolist(), totals.tolist(), strict=True)
        return [[rules.hypothesis(ids[:end], total)] for ids, end, total in rows]
