"""A search whose turns are all the same work on the same memory; on CUDA a turn is one replay of a captured graph.

A turn is the model's step and the board's choice (`weft.decoding.static_state`), in memory for a number of groups and a
number of tokens. It is made once and kept with its model for the searches that come. Texts are filled up to one of few
sizes, so that it serves many batches, and where the model allows it, reading them is a graph as well. The host runs
ahead of the device: it asks now and then which groups are done, and reads the answer when the next question is on its
way. Groups that are done leave where the rest fits a smaller turn; a text that outgrows its memory moves to a larger
one.
"""

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.decoding.beam_search import Hypothesis
from weft.decoding.static_state import DecodingState, R
from weft.models.base import Capturable, FixedState, State
from weft.nn.attention.capture import watched
from weft.tokens import Tokens

ROOM = 64  # tokens at first; doubled where a text grows beyond them
HELD = 16384  # tokens of all texts that there may be room for at first, if so many may be written
EVERY = 2  # turns between two questions
FEW = 64  # rows that take no less time when they are fewer
KEPT = 8  # turns that wait for the next search

Read = tuple[Tokens, Tokens | None]  # prompts and sources
Start = Callable[[], State]


def capturable(model: object, prompt: Tokens) -> TypeGuard[Capturable]:
    """Say whether a search can be captured: on CUDA, where nobody looks into the model and it drops nothing."""
    return (
        prompt.device.type == "cuda"
        and isinstance(model, nn.Module)
        and isinstance(model, Capturable)
        and not (model.training or watched() or torch.is_autocast_enabled("cuda"))
    )


@torch.no_grad()
def search(
    model: Capturable, kind: type[DecodingState[R]], rules: R, prompt: Tokens, source: Tokens | None = None
) -> list[list[Hypothesis]]:
    """Return the hypotheses of each group, `rules.copies` groups a prompt, best first."""
    texts = Texts.of(prompt, source, model.reads)
    active, columns, written = list(range(len(prompt) * rules.copies)), prompt.longest - 1, 0
    found = dict[int, list[Hypothesis]]()
    read = texts.filled(prompt, source)
    groups, more = texts.prompts * rules.copies, rules.max_length
    turn = _turn(model, kind, rules, texts, groups, columns, more, lambda: model.prime(*read))
    turn.open(model, rules, read, len(active))
    while True:
        ran, done = turn.run(model, min(rules.max_length - written, turn.state.room - columns))
        written, columns = written + ran, columns + ran
        stay = [group for group in range(len(active)) if not done[group] and written < rules.max_length]
        leave = sorted({*range(len(active))} - {*stay})
        if leave:
            found.update(zip((active[group] for group in leave), turn.board.found(rules, leave), strict=True))
        if not stay:
            _keep(model, turn)
            return [found[group] for group in sorted(found)]
        active, more, before = [active[group] for group in stay], rules.max_length - written, turn
        turn = _turn(model, kind, rules, texts, rounded(len(stay)), columns, more, lambda: before.state)  # noqa: B023
        turn.follow(rules, before, *(torch.tensor(some, device=prompt.device) for some in (stay, active)))
        _keep(model, before)


def rounded(count: int) -> int:
    """Round up to 2ⁿ or 3 · 2ⁿ, so that few sizes serve all counts."""
    whole = 1 << max(count - 1, 0).bit_length()
    return whole // 4 * 3 if count <= whole // 4 * 3 else whole


@dataclass(frozen=True)
class Texts:
    """The sizes that prompts and sources are filled up to."""

    prompts: int
    rows: int  # with those that fill up the sources
    tokens: int  # of all sources
    longest: int  # of the sources
    short: bool  # all prompts are one token
    device: torch.device

    @classmethod
    def of(cls, prompt: Tokens, source: Tokens | None, reads: int | None) -> "Texts":
        """Round the sizes of these up; no source becomes longer than what the model reads."""
        prompts, short = rounded(len(prompt)), prompt.longest == 1
        if source is None:
            return cls(prompts, prompts, 0, 0, short, prompt.device)
        tokens, longest = 64 * rounded(-(-len(source.ids) // 64)), 32 * rounded(-(-source.longest // 32))
        longest = max(source.longest, 1, longest if reads is None else min(longest, reads))
        return cls(prompts, prompts + -(-tokens // longest), tokens, longest, short, prompt.device)

    def filled(self, prompt: Tokens, source: Tokens | None) -> Read:
        """Fill up prompts by such as are one token, and sources by such as mean nothing."""
        more = self.rows - len(prompt)
        prompt = Tokens.flat(F.pad(prompt.ids, (0, more)), F.pad(prompt.lengths, (0, more), value=1))
        if source is None:
            return prompt, None
        fillers = -(-(self.tokens - len(source.ids)) // self.longest)
        return prompt, source.filled(self.tokens, self.longest, fillers, self.rows)


class GraphStep(Generic[R]):
    """The state and the board of a search, and on CUDA the graph that takes both one token on."""

    def __init__(
        self, key: tuple[Hashable, ...], model: Capturable, state: FixedState, board: DecodingState[R]
    ) -> None:
        self.key, self.state, self.board = key, state, board
        self.groups, self.width = board.row.shape
        self.few = self.groups // 2 if self.groups * self.width > FEW else 0  # that would fit a smaller turn
        self.opening: GraphPrefill | None = None
        self.graph = _captured(lambda: self._once(model)) if board.row.is_cuda else None
        if self.graph is not None:
            self._answers = [torch.zeros(self.groups, dtype=torch.bool).pin_memory() for _ in range(2)]

    def _once(self, model: Capturable) -> None:
        logits, _ = model.step(self.board.token.flatten(), self.state.select(self.board.row.flatten()))
        self.board.choose(logits)

    def open(self, model: Capturable, rules: R, texts: Read, count: int) -> None:
        """Start a search in so many groups, after these prompts."""
        self.board.tell(rules, torch.arange(count, device=texts[0].device))
        if self.graph is None or not model.steady or texts[0].longest > 1:
            return self._read(model, rules.copies, *texts)
        if self.opening is None:
            with torch.inference_mode(False), torch.no_grad():
                self.opening = GraphPrefill(texts, lambda held: self._read(model, rules.copies, *held))
        return self.opening(texts)

    def _read(self, model: Capturable, copies: int, prompt: Tokens, source: Tokens | None) -> None:
        owner = torch.arange(self.groups * self.width, device=prompt.device) // (self.width * copies)
        self.state.take(model.prime(prompt, source), owner)
        self.board.reset()
        self.board.token.copy_(prompt.ids[prompt.starts[1:].long() - 1][owner].view_as(self.board.token))

    def follow(self, rules: R, before: "GraphStep[R]", groups: Tensor, numbers: Tensor) -> None:
        """Go on with these groups of another turn, which have these numbers in the search."""
        self.board.tell(rules, numbers)
        self.board.reset()
        self.board.take(before.board, groups)
        padded = torch.cat([groups, groups[:1].expand(self.groups - len(groups))])
        self.state.take(before.state, before.board.row[padded].flatten())

    def run(self, model: Capturable, turns: int) -> tuple[int, list[bool]]:
        """Take so many turns, or fewer where few groups are left; return how many, and which groups are done."""
        before, ran = None, 0
        for ran in range(1, turns + 1):
            self.graph.replay() if self.graph is not None else self._once(model)
            if ran % EVERY == 0:
                now = self._ask(ran // EVERY % 2)
                if before is not None and before() <= self.few:
                    break
                before = now
        return ran, self.board.done.tolist()

    def _ask(self, slot: int) -> Callable[[], int]:
        """Ask how many groups are left; the answer waits until the device has come so far."""
        if self.graph is None:
            left = self.groups - int(self.board.done.sum())
            return lambda: left
        answer, event = self._answers[slot], torch.cuda.Event()
        answer.copy_(self.board.done, non_blocking=True)
        event.record()

        def wait() -> int:
            event.synchronize()
            return self.groups - int(answer.sum())

        return wait


class GraphPrefill:
    """What reads texts, in a graph, and the memory from which it reads them."""

    def __init__(self, texts: Read, read: Callable[[Read], None]) -> None:
        prompt, source = texts
        self.held = _copied(prompt), None if source is None else _copied(source)
        read(self.held)  # what is compiled or loaded at the first call is so before the capture
        self.graph = _captured(lambda: read(self.held))

    def __call__(self, texts: Read) -> None:
        """Read these."""
        for mine, theirs in zip(self.held, texts, strict=True):
            if mine is not None and theirs is not None:
                mine.ids.copy_(theirs.ids)
                mine.starts.copy_(theirs.starts)
        self.graph.replay()


def _copied(tokens: Tokens) -> Tokens:
    return replace(tokens, ids=tokens.ids.clone(), starts=tokens.starts.clone())


def _captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with _capturing, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph


_kept: WeakKeyDictionary[Any, list[GraphStep[Any]]] = WeakKeyDictionary()
_inside: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # parameters and parts of parts: slow to go through
_lock = threading.Lock()
_capturing = threading.Lock()  # all captures have one stream


def _turn(
    model: Capturable,
    kind: type[DecodingState[R]],
    rules: R,
    texts: Texts,
    groups: int,
    columns: int,
    more: int,
    state: Start,
) -> GraphStep[R]:
    """Find a turn for so many groups, for texts of so many columns and `more` to come, or make one for `state()`."""
    room, weights = ROOM, _weights(model)
    while room < columns + min(more, max(ROOM, HELD // (groups * rules.width) // ROOM * ROOM)):
        room *= 2
    key: tuple[Hashable, ...] = (weights, kind.__name__, rules.key, texts, groups, room)
    with _lock:
        kept = _kept[model] = [turn for turn in _kept.get(model, ()) if turn.key[0] == weights]
        for turn in kept:
            if turn.key == key and turn.state.room > columns:
                kept.remove(turn)
                return turn
    _inside.pop(model, None)  # a part may have been replaced
    key = (_weights(model), *key[1:])
    with torch.inference_mode(False), torch.no_grad():  # what is made here serves in any mode
        fixed = model.fixed(state(), groups * rules.width, room)
        ids = torch.zeros(groups * rules.width, dtype=torch.long, device=texts.device)
        logits, _ = model.step(ids, fixed)  # what is compiled or loaded at the first call is so before the capture
        board = kind(rules, logits, groups, fixed.room)
        board.choose(logits)
        return GraphStep(key, model, fixed, board)


def _keep(model: Capturable, turn: GraphStep[Any]) -> None:
    """Let a turn wait for the next search; those that have waited longest go."""
    with _lock:
        kept = _kept.setdefault(model, [])
        kept.append(turn)
        del kept[:-KEPT]


def _weights(model: object) -> tuple[int, ...]:
    """Say which parts a model has and where its numbers are: a graph that has read others is of no more use."""
    if not isinstance(model, nn.Module):
        return ()
    inside = _inside.get(model)
    if inside is None:
        inside = _inside[model] = [(part._parameters, part._modules) for part in model.modules()]
    own, parts = zip(*inside, strict=True)
    found = [id(part) for some in parts for part in some.values()]
    return (*found, *(one.data_ptr() for some in own for one in some.values() if one is not None))
