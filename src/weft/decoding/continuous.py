"""Continuous batching: sequences join and leave a running batch, each with options of its own (Yu et al. 2022, Orca).

A step reads one token of every hypothesis. Sequences whose prompts have been read in the meantime join before the next
step, and those that end leave after it. What is generated for a sequence is what `weft.decoding.generate` gives for it
alone, up to rounding, which depends on the size of a batch.

A model whose state is no `JoinableState` generates one batch after the other: sequences wait until it is empty.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.decoding.beam_search import Beam, BeamRun
from weft.decoding.config import DecodingConfig
from weft.decoding.generate import Hypothesis, best_first, choose_tokens, search_rules, stream
from weft.decoding.logits_processors import ForbiddenTokens, TokenHistory
from weft.decoding.static_state import GreedyRules
from weft.models.base import GenerationState, Generator, JoinableState
from weft.tokens import CHAR_PAD, Tokens

Choice = tuple[list[int], list[int]]  # the tokens of the hypotheses that go on, and the rows that they continue


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate: a prompt, on the CPU, with the options and the number that seeds its samples."""

    prompt: Tokens
    eos: int
    options: DecodingConfig
    source: Tokens | None = None
    forbid: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    row: int = 0
    top_logprobs: int = 0  # how many of the most probable tokens are kept for each step
    unknown_words: tuple[str, ...] = ()  # of the source: what `Tokenizer.unknown_slots` stand for in what is generated

    def stream(self, model: Generator) -> Iterator[int]:
        """Yield the ids of the one sequence as they are chosen, by itself."""
        device = device_of(model)
        prompt, source = self.prompt.to(device), None if self.source is None else self.source.to(device)
        return stream(model, prompt, self.eos, self.options, source, self.forbid, self.row, self.bad_words)


@dataclass(eq=False)
class GeneratedSequence:
    """A sequence that is being generated: its tokens so far, eos included, and their log-probabilities."""

    search: "GreedySearch"
    number: int  # among the candidates of its request
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    done: bool = False  # the caller may set it, where the text has come to its end

    def append(self, token: int, logprob: float, top: list[tuple[int, float]]) -> None:
        """Add a token; the sequence ends with eos, or with its last token."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.top.append(top[: self.search.request.top_logprobs])
        rules = self.search.rules
        self.done = token == rules.eos or len(self.ids) == rules.max_length

    def end_after(self, place: int) -> None:
        """End the sequence with the token at a place; what was generated after it is dropped."""
        for values in (self.ids, self.logprobs, self.top):
            del values[place + 1 :]
        self.done = True

    @property
    def hypothesis(self) -> Hypothesis:
        """The sequence so far, as a search returns it."""
        return self.search.rules.hypothesis(self.ids, sum(self.logprobs))


class Search(ABC):
    """The search of one request: some rows of the batch."""

    request: GenerationRequest
    stopped = False  # whether it is not wanted any more; its rows leave the batch before the next step

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """What searches have in common if their next tokens are chosen together."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of hypotheses that it has in the batch."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to generate."""
        return not self.rows

    @abstractmethod
    def choose(self, members: Sequence[tuple[Any, range]], logits: Tensor) -> "dict[Search, Choice]":
        """Choose the next tokens of searches with the same key, each with its rows of the logits."""

    @abstractmethod
    def wanted(self, rows: range) -> list[int]:
        """Return those of its rows that are still wanted; the others are dropped."""

    @abstractmethod
    def hypotheses(self) -> list[Hypothesis]:
        """Return the candidates, best first."""


class GreedySearch(Search):
    """Greedy search or sampling: independent sequences of one prompt."""

    def __init__(self, request: GenerationRequest, rules: GreedyRules, logits: Tensor) -> None:
        self.request, self.rules, self.prompt = request, rules, request.prompt.ids.tolist()
        self.forbidden = ForbiddenTokens.for_logits(logits, rules.eos, rules.forbid, rules.min_length)
        self.sequences = [GeneratedSequence(self, number) for number in range(rules.copies)]
        self.live = list(self.sequences)
        self.written = 0  # tokens of each sequence that has not ended

    @property
    def rows(self) -> int:
        """The number of sequences that have not ended."""
        return len(self.live)

    @property
    def key(self) -> Hashable:
        """The settings of the choice; where it depends on the number of tokens written, that too."""
        rules, written = self.rules, self.written
        limited = written < rules.min_length or (rules.finish and written + 1 == rules.max_length)
        settings = rules.pick_key, rules.eos, rules.forbid, rules.constraints, rules.renormalize_logits
        return (*settings, (written, rules.min_length, rules.max_length, rules.finish) if limited else None)

    def choose(self, members: "Sequence[tuple[GreedySearch, range]]", logits: Tensor) -> "dict[Search, Choice]":
        """Choose the next token of each sequence."""
        sequences = [sequence for search, _ in members for sequence in search.live]
        rows = [row for _, span in members for row in span]
        logits = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
        rules = self.rules if self.key[-1] else replace(self.rules, finish=False)  # type: ignore[index]
        history = _history(sequences, logits.device) if rules.constraints else None
        uniform = None if rules.uniform is None else _uniform(sequences, logits.device)
        token, logprobs = choose_tokens(rules, logits, self.forbidden, self.written, uniform, history)
        values = logprobs.gather(1, token[:, None])[:, 0].tolist()
        top = _top_tokens(logprobs, max(search.request.top_logprobs for search, _ in members))
        for sequence, chosen, value, best in zip(sequences, token.tolist(), values, top, strict=True):
            sequence.append(chosen, value, best)
        return {search: search._go_on(span) for search, span in members}

    def extend(self, sequence: GeneratedSequence, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add the tokens of some steps to a sequence, up to its end."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            if sequence.done:
                break
            sequence.append(token, logprob, [])
        if sequence.done:
            self.live = [own for own in self.live if own is not sequence]

    def _go_on(self, rows: range) -> Choice:
        """Return the tokens just chosen and the rows of the sequences that have not ended."""
        self.written += 1
        pairs = [(sequence, row) for sequence, row in zip(self.live, rows, strict=True) if not sequence.done]
        self.live = [sequence for sequence, _ in pairs]
        return [sequence.ids[-1] for sequence in self.live], [row for _, row in pairs]

    def wanted(self, rows: range) -> list[int]:
        """Return the rows of sequences that the caller has not ended."""
        pairs = [(sequence, row) for sequence, row in zip(self.live, rows, strict=True) if not sequence.done]
        self.live = [] if self.stopped else [sequence for sequence, _ in pairs]
        return [] if self.stopped else [row for _, row in pairs]

    def hypotheses(self) -> list[Hypothesis]:
        """Return the sequences, finished ones first, by score."""
        return best_first([sequence.hypothesis for sequence in self.sequences])


def _history(sequences: Sequence[GeneratedSequence], device: torch.device) -> TokenHistory:
    """Return what each sequence has read and written; shorter ones begin with -1."""
    texts = [[*sequence.search.prompt, *sequence.ids] for sequence in sequences]
    longest = max(map(len, texts))
    return TokenHistory(torch.tensor([[-1] * (longest - len(ids)) + ids for ids in texts], device=device))


def _uniform(sequences: Sequence[GeneratedSequence], device: torch.device) -> Tensor:
    """Return the number in [0, 1) by which each sequence draws its next token."""
    draws = [sequence.search.rules.uniform for sequence in sequences]
    numbers = [draw[own.number, len(own.ids)] for draw, own in zip(draws, sequences, strict=True) if draw is not None]
    return torch.stack(numbers).to(device)


class BeamSearch(Search):
    """A beam search: its beams are rows that are reordered at each step."""

    def __init__(self, request: GenerationRequest, beam: Beam, logits: Tensor) -> None:
        self.request, self._run = request, BeamRun(beam, request.prompt.to(logits.device), logits)
        self._rows = 1

    @property
    def rows(self) -> int:
        """The number of beams; before the first step there is one."""
        return self._rows

    @property
    def key(self) -> Hashable:
        """Nothing is shared: lengths differ, and with them the penalties."""
        return id(self)

    def choose(self, members: "Sequence[tuple[BeamSearch, range]]", logits: Tensor) -> "dict[Search, Choice]":
        """Extend the beams."""
        ((_, rows),) = members
        beams = self._run.advance(logits[rows.start : rows.stop])
        tokens = [] if beams is None else beams.token.flatten().tolist()
        parents = [] if beams is None else beams.row.flatten().tolist()
        self._rows = len(tokens)
        return {self: (tokens, [rows.start + parent for parent in parents])}

    def wanted(self, rows: range) -> list[int]:
        """Return all rows, or none."""
        self._rows = 0 if self.stopped else len(rows)
        return [] if self.stopped else list(rows)

    def hypotheses(self) -> list[Hypothesis]:
        """Return the best hypotheses."""
        return self._run.hypotheses()[0]


def device_of(model: object) -> torch.device:
    """Return the device of a model: that of its parameters or, of a model that counts, of its buffers."""
    if not isinstance(model, nn.Module):
        return torch.device("cpu")
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))


class ContinuousBatch:
    """A running batch of one model."""

    def __init__(self, model: Generator) -> None:
        self.model, self._device = model, device_of(model)
        self.searches: list[Search] = []
        self.generated = 0  # tokens of all hypotheses
        self._state: GenerationState | None = None
        self._tokens: list[int] = []
        self._joins = True

    @property
    def rows(self) -> int:
        """The number of hypotheses in the batch."""
        return len(self._tokens)

    @property
    def can_join(self) -> bool:
        """Whether sequences can join now."""
        return self._joins or not self.searches

    @torch.no_grad()
    def join(self, requests: Sequence[GenerationRequest]) -> list[Search]:
        """Read the prompts of requests, choose their first tokens, and let them join; return their searches."""
        prompt = concatenate([request.prompt for request in requests]).to(self._device)
        sources = [request.source for request in requests if request.source is not None]
        logits, state = self.model.start(prompt, concatenate(sources).to(self._device) if sources else None)
        searches, rows = _begin(requests, logits)
        self.generated += len(rows)
        logits, state = logits[rows], state.select(rows)
        tokens, kept = _choose(searches, logits)
        live = [search for search in searches if not search.done]
        if not live:
            return searches
        state = state.select(torch.tensor(kept, device=logits.device))
        self._joins = isinstance(state, JoinableState)
        if self._state is None:
            self._state = state
        else:
            assert isinstance(self._state, JoinableState)
            self._state = self._state.join(state)
        self.searches += live
        self._tokens += tokens
        return searches

    @torch.no_grad()
    def step(self) -> list[Search]:
        """Generate the next token of every sequence; return the searches of this step, those that ended included."""
        self._drop_stopped()
        if not self.searches or self._state is None:
            return []
        self.generated += self.rows
        tokens = torch.tensor(self._tokens, device=self._device)
        logits, state = self.model.step(tokens, self._state)
        searches = self.searches
        self._tokens, kept = _choose(searches, logits)
        self.searches = [search for search in searches if not search.done]
        self._state = state.select(torch.tensor(kept, device=logits.device)) if kept else None
        return searches

    def clear(self) -> None:
        """Drop all sequences."""
        self.searches, self._tokens, self._state = [], [], None

    def _drop_stopped(self) -> None:
        """Let the rows leave that are not wanted any more."""
        spans = list(_spans(self.searches))
        kept = [row for search, rows in spans for row in search.wanted(rows)]
        if len(kept) == self.rows or self._state is None:
            return
        self.searches = [search for search in self.searches if not search.done]
        self._tokens = [self._tokens[row] for row in kept]
        self._state = self._state.select(torch.tensor(kept, device=self._device)) if kept else None


def _spans(searches: Iterable[Search]) -> Iterable[tuple[Search, range]]:
    """Yield each search with its rows in the batch."""
    start = 0
    for search in searches:
        yield search, range(start, start + search.rows)
        start += search.rows


def _begin(requests: Sequence[GenerationRequest], logits: Tensor) -> tuple[list[Search], Tensor]:
    """Return the searches of requests, and for each of their first rows the number of its request."""
    searches = [_make_search(request, logits) for request in requests]
    rows = [number for number, search in enumerate(searches) for _ in range(search.rows)]
    return searches, torch.tensor(rows, device=logits.device)


def _make_search(request: GenerationRequest, logits: Tensor) -> Search:
    rules = search_rules(
        request.eos, request.options, request.forbid, request.bad_words, [request.row], torch.device("cpu")
    )
    if isinstance(rules, Beam):
        return BeamSearch(request, rules, logits)
    return GreedySearch(request, rules, logits)


def _choose(searches: Sequence[Search], logits: Tensor) -> Choice:
    """Choose the next tokens of all searches, in their order; those with the same settings at once."""
    groups: dict[Hashable, list[tuple[Search, range]]] = {}
    for search, rows in _spans(searches):
        groups.setdefault(search.key, []).append((search, rows))
    choices: dict[Search, Choice] = {}
    for members in groups.values():
        choices |= members[0][0].choose(members, logits)
    tokens = [token for search in searches for token in choices[search][0]]
    return tokens, [row for search in searches for row in choices[search][1]]


def _top_tokens(logprobs: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return the most probable tokens of each row, with their log-probabilities."""
    if not count:
        return [[]] * len(logprobs)
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]))
    return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]


def concatenate(sequences: Sequence[Tokens]) -> Tokens:
    """Return the sequences of several batches as one."""
    if len(sequences) == 1:
        return sequences[0]
    ids = torch.cat([tokens.ids for tokens in sequences])
    joined = Tokens.flat(ids, torch.cat([tokens.lengths for tokens in sequences]))
    if any(tokens.chars is None for tokens in sequences):
        return joined
    widest = max(tokens.chars.shape[1] for tokens in sequences if tokens.chars is not None)
    chars = [F.pad(t.chars, (0, widest - t.chars.shape[1]), value=CHAR_PAD) for t in sequences if t.chars is not None]
    return replace(joined, chars=torch.cat(chars))
