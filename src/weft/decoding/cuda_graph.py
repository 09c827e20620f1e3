"""Decoding with CUDA graphs: a step of a search is one replay of a captured graph.

A step is the model's step and the choice of tokens (`weft.decoding.static_state`), in static memory for a number of
groups and of tokens. It is captured once and cached with its model for later searches. Inputs are padded to one of few
sizes, so that a graph serves many batches; if the model allows it, the prefill is a graph as well. The host runs ahead
of the device: every few steps it copies the flags of groups that are done, and reads them when the next copy is queued.
Groups that are done are removed if the rest fits a smaller graph; a text that outgrows its memory moves to a larger
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
from weft.models.base import Capturable, GenerationState, StaticState
from weft.nn.attention.capture import watched
from weft.tokens import Tokens

INITIAL_CAPACITY = 64  # tokens a sequence at first; doubled if a text grows beyond them
MAX_INITIAL_TOKENS = 16384  # tokens of all sequences that memory is allocated for at first, at most
POLL_INTERVAL = 2  # steps between two polls of the device
MIN_ROWS = 64  # rows below which fewer take no less time
CACHE_SIZE = 8  # graphs cached a model

Inputs = tuple[Tokens, Tokens | None]  # prompts and sources
MakeState = Callable[[], GenerationState]


def capturable(model: object, prompt: Tokens) -> TypeGuard[Capturable]:
    """Return whether a search can be captured: on CUDA, without captured attention, dropout or autocast."""
    return (
        prompt.device.type == "cuda"
        and isinstance(model, nn.Module)
        and isinstance(model, Capturable)
        and model.supports_capture
        and not (model.training or watched() or torch.is_autocast_enabled("cuda"))
    )


@torch.no_grad()
def search(
    model: Capturable, kind: type[DecodingState[R]], rules: R, prompt: Tokens, source: Tokens | None = None
) -> list[list[Hypothesis]]:
    """Return the hypotheses of each group, `rules.copies` groups a prompt, best first."""
    sizes = PaddedSizes.of(prompt, source, model.max_positions)
    active, columns, written = list(range(len(prompt) * rules.copies)), prompt.longest - 1, 0
    hypotheses = dict[int, list[Hypothesis]]()
    inputs = sizes.pad(prompt, source)
    groups, remaining = sizes.prompts * rules.copies, rules.max_length
    step = _get_step(model, kind, rules, sizes, groups, columns, remaining, lambda: model.prefill(*inputs))
    step.start(model, rules, inputs, len(active))
    while True:
        steps, done = step.run(model, min(rules.max_length - written, step.state.capacity - columns))
        written, columns = written + steps, columns + steps
        staying = [group for group in range(len(active)) if not done[group] and written < rules.max_length]
        leaving = sorted({*range(len(active))} - {*staying})
        if leaving:
            ended = step.decoding.hypotheses(rules, leaving)
            hypotheses.update(zip((active[group] for group in leaving), ended, strict=True))
        if not staying:
            _release(model, step)
            return [hypotheses[group] for group in sorted(hypotheses)]
        active, remaining, previous = [active[group] for group in staying], rules.max_length - written, step
        groups = round_up_size(len(staying))
        step = _get_step(model, kind, rules, sizes, groups, columns, remaining, lambda: previous.state)  # noqa: B023
        step.continue_from(rules, previous, *(torch.tensor(part, device=prompt.device) for part in (staying, active)))
        _release(model, previous)


def round_up_size(count: int) -> int:
    """Round up to 2ⁿ or 3 · 2ⁿ, so that few sizes serve all counts."""
    power = 1 << max(count - 1, 0).bit_length()
    return power // 4 * 3 if count <= power // 4 * 3 else power


@dataclass(frozen=True)
class PaddedSizes:
    """The sizes that prompts and sources are padded to."""

    prompts: int
    rows: int  # with those that pad the sources
    tokens: int  # of all sources
    longest: int  # of the sources
    short: bool  # all prompts are one token
    device: torch.device

    @classmethod
    def of(cls, prompt: Tokens, source: Tokens | None, max_positions: int | None) -> "PaddedSizes":
        """Round the sizes of these up; no source becomes longer than the model's maximum."""
        prompts, short = round_up_size(len(prompt)), prompt.longest == 1
        if source is None:
            return cls(prompts, prompts, 0, 0, short, prompt.device)
        tokens, longest = 64 * round_up_size(-(-len(source.ids) // 64)), 32 * round_up_size(-(-source.longest // 32))
        longest = max(source.longest, 1, longest if max_positions is None else min(longest, max_positions))
        return cls(prompts, prompts + -(-tokens // longest), tokens, longest, short, prompt.device)

    def pad(self, prompt: Tokens, source: Tokens | None) -> Inputs:
        """Pad with prompts of one token and with sources that are ignored."""
        padding = self.rows - len(prompt)
        prompt = Tokens.flat(F.pad(prompt.ids, (0, padding)), F.pad(prompt.lengths, (0, padding), value=1))
        if source is None:
            return prompt, None
        padding_rows = -(-(self.tokens - len(source.ids)) // self.longest)
        return prompt, source.padded_to(self.tokens, self.longest, padding_rows, self.rows)


class GraphStep(Generic[R]):
    """Model state and decoding state of a search, and on CUDA the graph of one step."""

    def __init__(
        self, key: tuple[Hashable, ...], model: Capturable, state: StaticState, decoding: DecodingState[R]
    ) -> None:
        self.key, self.state, self.decoding = key, state, decoding
        self.groups, self.width = decoding.row.shape
        # The number of groups that fit a smaller graph.
        self.shrink_at = self.groups // 2 if self.groups * self.width > MIN_ROWS else 0
        self.prefill: GraphPrefill | None = None
        self.graph = capture_graph(lambda: self._step(model)) if decoding.row.is_cuda else None
        if self.graph is not None:
            self._done_buffers = [torch.zeros(self.groups, dtype=torch.bool).pin_memory() for _ in range(2)]

    def _step(self, model: Capturable) -> None:
        logits, _ = model.step(self.decoding.token.flatten(), self.state.select(self.decoding.row.flatten()))
        self.decoding.choose(logits)

    def start(self, model: Capturable, rules: R, inputs: Inputs, count: int) -> None:
        """Start a search in `count` groups: run the prefill."""
        self.decoding.set_rules(rules, torch.arange(count, device=inputs[0].device))
        if self.graph is None or not model.prefill_capturable or inputs[0].longest > 1:
            return self._prefill(model, rules.copies, *inputs)
        if self.prefill is None:
            with torch.inference_mode(False), torch.no_grad():
                self.prefill = GraphPrefill(
                    inputs, lambda static_inputs: self._prefill(model, rules.copies, *static_inputs)
                )
        return self.prefill(inputs)

    def _prefill(self, model: Capturable, copies: int, prompt: Tokens, source: Tokens | None) -> None:
        owner = torch.arange(self.groups * self.width, device=prompt.device) // (self.width * copies)
        self.state.copy_from(model.prefill(prompt, source), owner)
        self.decoding.reset()
        self.decoding.token.copy_(prompt.ids[prompt.starts[1:].long() - 1][owner].view_as(self.decoding.token))

    def continue_from(self, rules: R, previous: "GraphStep[R]", groups: Tensor, numbers: Tensor) -> None:
        """Continue these groups of another step, which have these numbers in the search."""
        self.decoding.set_rules(rules, numbers)
        self.decoding.reset()
        self.decoding.copy_from(previous.decoding, groups)
        padded = torch.cat([groups, groups[:1].expand(self.groups - len(groups))])
        self.state.copy_from(previous.state, previous.decoding.row[padded].flatten())

    def run(self, model: Capturable, max_steps: int) -> tuple[int, list[bool]]:
        """Run `max_steps` steps, or fewer if few groups are left; return how many, and which groups are done."""
        previous, steps = None, 0
        for steps in range(1, max_steps + 1):
            self.graph.replay() if self.graph is not None else self._step(model)
            if steps % POLL_INTERVAL == 0:
                current = self._poll_active(steps // POLL_INTERVAL % 2)
                if previous is not None and previous() <= self.shrink_at:
                    break
                previous = current
        return steps, self.decoding.done.tolist()

    def _poll_active(self, slot: int) -> Callable[[], int]:
        """Return a function that waits for the device and returns how many groups are active at this step."""
        if self.graph is None:
            active = self.groups - int(self.decoding.done.sum())
            return lambda: active
        done, event = self._done_buffers[slot], torch.cuda.Event()
        done.copy_(self.decoding.done, non_blocking=True)
        event.record()

        def wait() -> int:
            event.synchronize()
            return self.groups - int(done.sum())

        return wait


class GraphPrefill:
    """The graph of a prefill, and its static inputs."""

    def __init__(self, inputs: Inputs, prefill: Callable[[Inputs], None]) -> None:
        prompt, source = inputs
        self.inputs = _clone_tokens(prompt), None if source is None else _clone_tokens(source)
        prefill(self.inputs)  # warm-up: compile and load before the capture
        self.graph = capture_graph(lambda: prefill(self.inputs))

    def __call__(self, inputs: Inputs) -> None:
        """Copy the inputs and replay the graph."""
        for static, new in zip(self.inputs, inputs, strict=True):
            if static is not None and new is not None:
                static.ids.copy_(new.ids)
                static.starts.copy_(new.starts)
        self.graph.replay()


def _clone_tokens(tokens: Tokens) -> Tokens:
    return replace(tokens, ids=tokens.ids.clone(), starts=tokens.starts.clone())


def capture_graph(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return the graph of what a function launches; it is not run."""
    graph = torch.cuda.CUDAGraph()
    with _capture_lock, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        function()
    return graph


_graph_cache: WeakKeyDictionary[Any, list[GraphStep[Any]]] = WeakKeyDictionary()
_module_parts: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # parameters and submodules: slow to collect
_cache_lock = threading.Lock()
_capture_lock = threading.Lock()  # all captures share one stream


def _get_step(
    model: Capturable,
    kind: type[DecodingState[R]],
    rules: R,
    sizes: PaddedSizes,
    groups: int,
    columns: int,
    remaining: int,
    make_state: MakeState,
) -> GraphStep[R]:
    """Return a cached step for `groups` sequences of `columns` tokens and `remaining` to come, or make a new one."""
    capacity, weights = INITIAL_CAPACITY, _weight_addresses(model)
    while capacity < columns + min(
        remaining,
        max(INITIAL_CAPACITY, MAX_INITIAL_TOKENS // (groups * rules.width) // INITIAL_CAPACITY * INITIAL_CAPACITY),
    ):
        capacity *= 2
    key: tuple[Hashable, ...] = (weights, kind.__name__, rules.key, sizes, groups, capacity)
    with _cache_lock:
        cached = _graph_cache[model] = [step for step in _graph_cache.get(model, ()) if step.key[0] == weights]
        for step in cached:
            if step.key == key and step.state.capacity > columns:
                cached.remove(step)
                return step
    _module_parts.pop(model, None)  # a submodule may have been replaced
    key = (_weight_addresses(model), *key[1:])
    with torch.inference_mode(False), torch.no_grad():  # so that the tensors serve in any mode
        static = model.make_static(make_state(), groups * rules.width, capacity)
        ids = torch.zeros(groups * rules.width, dtype=torch.long, device=sizes.device)
        logits, _ = model.step(ids, static)  # warm-up: compile and load before the capture
        decoding = kind(rules, logits, groups, static.capacity)
        decoding.choose(logits)
        return GraphStep(key, model, static, decoding)


def _release(model: Capturable, step: GraphStep[Any]) -> None:
    """Put a step back into the cache; the oldest are dropped."""
    with _cache_lock:
        cached = _graph_cache.setdefault(model, [])
        cached.append(step)
        del cached[:-CACHE_SIZE]


def _weight_addresses(model: object) -> tuple[int, ...]:
    """Return the ids of a model's submodules and the addresses of its parameters: a graph is valid for these alone."""
    if not isinstance(model, nn.Module):
        return ()
    parts = _module_parts.get(model)
    if parts is None:
        parts = _module_parts[model] = [(module._parameters, module._modules) for module in model.modules()]
    parameters, modules = zip(*parts, strict=True)
    module_ids = [id(module) for named in modules for module in named.values()]
    return (
        *module_ids,
        *(parameter.data_ptr() for named in parameters for parameter in named.values() if parameter is not None),
    )
