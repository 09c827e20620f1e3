"""A running batch on CUDA whose steps are replays of a captured graph.

The state of all hypotheses has fixed addresses (`weft.models.base.StatePool`), and so have the settings by which each
row's tokens are chosen: rows that search greedily and rows that sample, each with its own temperature, top-k, top-p
and limits of length, share a graph. A few steps are replayed at a time, and the host reads their tokens while the
device computes the next few: so it neither waits nor lets the device wait. What was computed for a row after its end is
ignored. Beam searches, and what depends on all tokens so far, are for `weft.decoding.continuous.ContinuousBatch`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.decoding.continuous import (
    ContinuousBatch,
    GeneratedSequence,
    GenerationRequest,
    GreedySearch,
    Search,
    concatenate,
    device_of,
)
from weft.decoding.cuda_graph import capture_graph
from weft.decoding.generate import inverse_cdf, search_rules
from weft.decoding.logits_processors import NEG_INF, ForbiddenTokens, keep_top
from weft.decoding.static_state import GreedyRules
from weft.models.base import Generator, Poolable, StatePool
from weft.nn.kernels.dispatch import decodes_on_triton
from weft.tokens import to_device

STEPS = 8  # steps that are replayed at a time
MIN_ROWS, MIN_TOKENS, MIN_SOURCE = 4, 128, 32  # what memory is allocated for at first
GREEDY, SAMPLED, TRUNCATED = 0, 1, 2  # how tokens are chosen: what a later one serves, includes the ones before


@dataclass(frozen=True)
class RowSettings:
    """The settings of each row's search and its progress, at fixed addresses."""

    token: Tensor  # (R,) int64: the last token, the model's next input
    written: Tensor  # (R,) int32: tokens so far
    min_length: Tensor  # (R,) int32
    max_length: Tensor  # (R,) int32
    temperature: Tensor  # (R,); 0: greedy
    top_k: Tensor  # (R,) int32
    top_p: Tensor  # (R,); above 1: all tokens
    uniform: Tensor  # (R, T): the number in [0, 1) that each token is drawn by

    @classmethod
    def make(cls, rows: int, tokens: int, device: torch.device) -> "RowSettings":
        """Allocate the settings of so many rows, none of which is used."""
        integers = [torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(4)]
        numbers = [torch.zeros(rows, device=device) for _ in range(2)]
        token, uniform = torch.zeros(rows, dtype=torch.long, device=device), torch.zeros(rows, tokens, device=device)
        written, least, most, top_k = integers
        return cls(token, written, least, most, numbers[0], top_k, numbers[1], uniform)

    def first_rows(self, rows: int) -> "RowSettings":
        """Return the settings of the first rows; the memory is the same."""
        return RowSettings(*(getattr(self, field.name)[:rows] for field in fields(self)))

    def copy_from(self, other: "RowSettings") -> None:
        """Copy the settings of fewer rows into the first ones."""
        for field in fields(self):
            source = getattr(other, field.name)
            getattr(self, field.name)[tuple(slice(size) for size in source.shape)] = source

    def put(self, rows: Sequence[int], sequences: Sequence[GeneratedSequence]) -> None:
        """Write the settings of sequences that begin, one for each row."""
        device, rules = self.token.device, [sequence.search.rules for sequence in sequences]
        last = [int(sequence.search.request.prompt.ids[-1]) for sequence in sequences]
        integers = [[own.min_length, own.max_length, _top_k(own)] for own in rules]
        row, token, *lengths = to_device(torch.from_numpy(np.column_stack([rows, last, integers]).T.copy()), device)
        self.token[row], self.written[row] = token, 0
        for setting, values in zip((self.min_length, self.max_length, self.top_k), lengths, strict=True):
            setting[row] = values.int()
        numbers = np.array([[_temperature(own), _top_p(own)] for own in rules], np.float32)
        self.temperature[row], self.top_p[row] = to_device(torch.from_numpy(numbers.T.copy()), device)
        for number, sequence, own in zip(rows, sequences, rules, strict=True):
            if own.uniform is not None:
                uniform = own.uniform[sequence.number]
                self.uniform[number, : len(uniform)] = to_device(uniform, device)


def _sampling(rules: GreedyRules) -> tuple[float, int | None, float | None] | None:
    return rules.pick_key  # type: ignore[return-value]


def _temperature(rules: GreedyRules) -> float:
    sampling = _sampling(rules)
    return 0.0 if sampling is None else max(sampling[0], torch.finfo(torch.float32).tiny)


def _top_k(rules: GreedyRules) -> int:
    sampling = _sampling(rules)
    return 0 if sampling is None or sampling[1] is None else sampling[1]


def _top_p(rules: GreedyRules) -> float:
    sampling = _sampling(rules)
    return 2.0 if sampling is None or sampling[2] is None or sampling[2] >= 1 else sampling[2]


def choice_of(rules: GreedyRules) -> int:
    """Return the least kind of choice that serves a search."""
    if _sampling(rules) is None:
        return GREEDY
    return TRUNCATED if _top_k(rules) or _top_p(rules) < 1 else SAMPLED


class StaticBatch:
    """The rows of a running batch, what they have generated in the last steps, and the graphs of a step."""

    def __init__(self, model: Poolable, eos: int, forbid: tuple[int, ...], rows: int, tokens: int, source: int) -> None:
        self.model, self.eos, self.forbid = model, eos, forbid
        self.rows, self.tokens, self.source = rows, tokens, source
        self.pool: StatePool = model.make_pool(rows, tokens, source)
        self.device = self.pool.active.device
        self.settings = RowSettings.make(rows, tokens, self.device)
        # Of the last steps, the tokens, -1 of a row that was not active, and their log-probabilities.
        self.output = torch.full((STEPS, rows), -1, dtype=torch.int32, device=self.device)
        self.logprobs = torch.zeros(STEPS, rows, device=self.device)
        self.forbidden = torch.zeros(model.target_vocab, dtype=torch.bool, device=self.device)
        self.forbidden[list(forbid)] = True
        self.tick = torch.zeros(1, dtype=torch.long, device=self.device)  # steps since `output` was read
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def copy_from(self, other: "StaticBatch") -> None:
        """Copy the rows of a smaller batch."""
        self.pool.copy_from(other.pool)
        self.settings.copy_from(other.settings)

    def set_active(self, rows: Sequence[int], active: bool) -> None:
        """Let rows go on, or not."""
        if rows:
            self.pool.active[to_device(torch.from_numpy(np.array(rows)), self.device)] = int(active)

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run(self, rows: int, choice: int) -> None:
        """Generate the next `STEPS` tokens of the first rows, on CUDA without waiting for them."""
        self.tick.zero_()
        for _ in range(STEPS):
            if self.device.type == "cuda":
                self._graph(rows, choice).replay()
            else:
                self._step(rows, choice)

    def _graph(self, rows: int, choice: int) -> torch.cuda.CUDAGraph:
        key = rows, choice
        if key not in self._graphs:
            with torch.inference_mode(False), torch.no_grad():
                other = StaticBatch(self.model, self.eos, self.forbid, rows, self.tokens, self.source)
                other._step(rows, choice)  # compile and load before the capture, in other memory
                self._graphs[key] = capture_graph(lambda: self._step(rows, choice))
        return self._graphs[key]

    def _step(self, rows: int, choice: int) -> None:
        """Generate the next token of each of the first rows that is active."""
        logits, _ = self.model.step(self.settings.token[:rows], self.pool.first_rows(rows))
        self.choose(logits, rows, choice)

    def choose(self, logits: Tensor, rows: int, choice: int) -> None:
        """Choose and write the next token of each of the first rows; rows that are not active get -1."""
        if choice == GREEDY and decodes_on_triton(logits):
            from weft.decoding import static_state_triton

            return static_state_triton.running(self, rows, logits)
        own, active = self.settings.first_rows(rows), self.pool.active[:rows]
        logprobs = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        logprobs.masked_fill_(self.forbidden, NEG_INF)
        logprobs[:, self.eos].masked_fill_(own.written < own.min_length, NEG_INF)
        token = logprobs.argmax(-1)
        if choice != GREEDY:
            token = torch.where(own.temperature > 0, _draw(logprobs, own, choice == TRUNCATED), token)
        output = torch.where(active > 0, token, -1).int()
        self.output[:, :rows].index_copy_(0, self.tick, output[None])
        self.logprobs[:, :rows].index_copy_(0, self.tick, logprobs.gather(1, token[:, None]).t().float())
        own.token.copy_(token)
        own.written.add_(active)
        active.mul_((token != self.eos) & (own.written < own.max_length))
        self.tick.add_(1)
        return None


def _draw(logprobs: Tensor, own: RowSettings, truncates: bool) -> Tensor:
    """Draw a token for each row, by its own settings: what `weft.decoding.generate` draws."""
    at = own.written.long().clamp(max=own.uniform.shape[1] - 1)
    uniform = own.uniform.gather(1, at[:, None])[:, 0]
    temperature = torch.where(own.temperature > 0, own.temperature, 1.0)
    scores = (logprobs - logprobs.amax(-1, keepdim=True)) / temperature[:, None]
    if truncates:
        scores = keep_top(scores, own.top_k, own.top_p)
    return inverse_cdf(scores.softmax(-1), uniform)


class CapturedSearch(GreedySearch):
    """Greedy search or sampling in rows of a captured batch."""

    def __init__(self, request: GenerationRequest, rules: GreedyRules) -> None:
        self.request, self.rules = request, rules
        self.sequences = [GeneratedSequence(self, number) for number in range(rules.copies)]
        self.live = list(self.sequences)


class _Steps(NamedTuple):
    """Steps that the device computes, or has computed: whose rows they are, and where their tokens will be."""

    owners: list[GeneratedSequence | None]
    tokens: Tensor
    logprobs: Tensor
    event: Any

    def results(self) -> list[tuple[GeneratedSequence, list[int], list[float]]]:
        """Wait for the device; return the tokens of each sequence, with their log-probabilities."""
        if self.event is not None:
            self.event.synchronize()
        tokens, logprobs = self.tokens.t().tolist(), self.logprobs.t().tolist()
        rows = zip(self.owners, tokens, logprobs, strict=False)  # after the last owner there may be free rows
        return [(owner, own, values) for owner, own, values in rows if owner is not None]


class CapturedBatch:
    """A running batch with the interface of `ContinuousBatch`: searches in graphs where that is possible."""

    def __init__(self, model: Poolable) -> None:
        self.model, self.others = model, ContinuousBatch(model)
        self._generated = 0
        self.clear()

    def clear(self) -> None:
        """Drop all sequences."""
        self.others.clear()
        self._batch: StaticBatch | None = None
        self._owners: list[GeneratedSequence | None] = []  # of each row
        self._left: list[int] = []  # rows that may be active on the device, though nobody wants them any more
        self._steps: _Steps | None = None  # those that the device computes
        self._buffers: list[tuple[Tensor, Tensor]] = []

    @property
    def searches(self) -> list[Search]:
        """The searches that are not done."""
        own = dict.fromkeys(sequence.search for sequence in self._owners if sequence is not None)
        return [*own, *self.others.searches]

    @property
    def generated(self) -> int:
        """The number of tokens generated."""
        return self._generated + self.others.generated

    @property
    def rows(self) -> int:
        """The number of hypotheses in the batch."""
        return sum(owner is not None for owner in self._owners) + self.others.rows

    @property
    def can_join(self) -> bool:
        """Whether sequences can join now."""
        return self.others.can_join

    @torch.no_grad()
    def join(self, requests: Sequence[GenerationRequest]) -> list[Search]:
        """Let requests join; return their searches. Those in graphs have no token yet."""
        searches: list[Search | None] = [None] * len(requests)
        in_graph = [self._is_captured(request) for request in requests]
        for chosen, join in ((True, self._join), (False, self.others.join)):
            numbers = [number for number, captured in enumerate(in_graph) if captured == chosen]
            if numbers:
                for number, search in zip(numbers, join([requests[number] for number in numbers]), strict=True):
                    searches[number] = search
        return [search for search in searches if search is not None]

    def _is_captured(self, request: GenerationRequest) -> bool:
        """Return whether a search can be in the graphs; all of them have the same eos, and forbid the same ids."""
        options, batch, most = request.options, self._batch, self.model.max_positions
        is_plain = options.graph_compatible and options.beam == 1 and not request.top_logprobs and not request.bad_words
        fits = most is None or _num_tokens(request) <= most
        return is_plain and fits and (batch is None or (batch.eos, batch.forbid) == (request.eos, request.forbid))

    def _join(self, requests: Sequence[GenerationRequest]) -> list[Search]:
        searches = [CapturedSearch(request, self._rules(request)) for request in requests]
        numbered = [(number, own) for number, search in enumerate(searches) for own in search.sequences]
        batch, rows = self._make_room(requests, len(numbered))
        sources = [request.source for request in requests if request.source is not None]
        prompt, source = (
            concatenate([request.prompt for request in requests]),
            concatenate(sources) if sources else None,
        )
        state = self.model.prefill(prompt.to(batch.device), None if source is None else source.to(batch.device))
        hypotheses = [number for number, _ in numbered]
        tokens = (prompt.lengths - 1)[hypotheses].tolist()
        source_tokens = [0] * len(rows) if source is None else source.lengths[hypotheses].tolist()
        batch.pool.put(rows, state, hypotheses, tokens, source_tokens)
        batch.settings.put(rows, [sequence for _, sequence in numbered])
        batch.set_active(rows, True)
        for row, (_, sequence) in zip(rows, numbered, strict=True):
            self._owners[row] = sequence
        return list(searches)

    def _rules(self, request: GenerationRequest) -> GreedyRules:
        """Return the settings of a search, checked."""
        options, cpu = request.options, torch.device("cpu")
        rules = search_rules(request.eos, options, request.forbid, (), [request.row], cpu)
        assert isinstance(rules, GreedyRules)
        ForbiddenTokens.for_logits(torch.empty(0, self.model.target_vocab), rules.eos, rules.forbid, rules.min_length)
        return rules

    def _make_room(self, requests: Sequence[GenerationRequest], count: int) -> tuple[StaticBatch, list[int]]:
        """Return the batch, larger than before if need be, and `count` free rows."""
        free = [row for row, owner in enumerate(self._owners) if owner is None]
        missing = max(count - len(free), 0)
        free += range(len(self._owners), len(self._owners) + missing)
        self._owners += [None] * missing
        sources = [len(request.source.ids) for request in requests if request.source is not None]
        self._grow(requests[0], len(self._owners), max(map(_num_tokens, requests)), max(sources, default=0))
        assert self._batch is not None
        self._batch.set_active(self._left, False)
        self._left = []
        return self._batch, free[:count]

    def _grow(self, request: GenerationRequest, rows: int, tokens: int, source: int) -> None:
        """Make the batch at least so large."""
        batch, most = self._batch, self.model.max_positions
        if batch is not None and rows <= batch.rows and tokens <= batch.tokens and source <= batch.source:
            return
        if batch is not None:
            rows, tokens, source = max(rows, batch.rows), max(tokens, batch.tokens), max(source, batch.source)
        tokens = max(_power_of_2(tokens), MIN_TOKENS)
        tokens = tokens if most is None else min(tokens, most)
        source = max(_power_of_2(source), MIN_SOURCE) if source else 0
        with torch.inference_mode(False), torch.no_grad():  # so that the tensors serve in any mode
            larger = StaticBatch(self.model, request.eos, request.forbid, max(_prefix(rows), MIN_ROWS), tokens, source)
            if batch is not None:
                batch.wait()  # until its graphs are not running any more
                larger.copy_from(batch)
        self._batch, self._buffers = larger, []

    @torch.no_grad()
    def step(self) -> list[Search]:
        """Let the device begin with the next tokens; read those that it has computed; return the searches of these."""
        searches: list[Search] = self.others.step()
        self._leave()
        steps, self._steps = self._steps, self._launch()
        for sequence, tokens, logprobs in () if steps is None else steps.results():
            if not sequence.done:
                before = len(sequence.ids)
                sequence.search.extend(sequence, tokens, logprobs)
                self._generated += len(sequence.ids) - before
        self._owners = [None if owner is None or owner.done else owner for owner in self._owners]
        return searches

    def _leave(self) -> None:
        """Let the sequences leave that the caller has ended."""
        for row, owner in enumerate(self._owners):
            if owner is not None and (owner.done or owner.search.stopped):
                owner.done = True
                owner.search.live = [sequence for sequence in owner.search.sequences if not sequence.done]
                self._owners[row] = None
                self._left.append(row)

    def _launch(self) -> _Steps | None:
        """Let the device compute the next tokens of all rows that are in use."""
        used = [(row, owner) for row, owner in enumerate(self._owners) if owner is not None]
        if not used or self._batch is None:
            return None
        batch = self._batch
        batch.set_active(self._left, False)
        self._left = []
        rows = min(_prefix(used[-1][0] + 1), batch.rows)
        batch.run(rows, max(choice_of(owner.search.rules) for _, owner in used))
        return _Steps(self._owners[:rows], *self._read(batch, rows))

    def _read(self, batch: StaticBatch, rows: int) -> tuple[Tensor, Tensor, Any]:
        """Begin to copy the tokens to the host; return where they will be, and the event by then they are."""
        tokens, logprobs = batch.output[:, :rows], batch.logprobs[:, :rows]
        if batch.device.type != "cuda":
            return tokens.clone(), logprobs.clone(), None
        if len(self._buffers) < 2:  # those of the steps before may not have been read
            own = [torch.empty_like(tensor, device="cpu").pin_memory() for tensor in (batch.output, batch.logprobs)]
            self._buffers.append((own[0], own[1]))
        self._buffers.reverse()
        token_buffer, logprob_buffer = (buffer[:, :rows] for buffer in self._buffers[0])
        token_buffer.copy_(tokens, non_blocking=True)
        logprob_buffer.copy_(logprobs, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return token_buffer, logprob_buffer, event


def make_running_batch(model: Generator) -> "CapturedBatch | ContinuousBatch":
    """Return the running batch of a model: on CUDA, where it can be captured, in graphs."""
    if device_of(model).type == "cuda" and isinstance(model, Poolable) and model.supports_capture:
        return CapturedBatch(model)
    return ContinuousBatch(model)


def _num_tokens(request: GenerationRequest) -> int:
    """Return how many tokens of a hypothesis its cache holds at most: the last one that is generated is not read."""
    return len(request.prompt.ids) + request.options.max_length - 1


def _power_of_2(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def _prefix(rows: int) -> int:
    """Return the least power of 4 that is not below: so many rows share a graph."""
    power = 1
    while power < rows:
        power *= 4
    return power
