"""What a model is, and what it can do.

A model sees `Tokens` and returns tensors: no text, label, loss, optimiser, file or HTTP. What it can do depends on its
configuration, so a class names its roles for a configuration, and a task asks for roles before any data is read.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from weft.config.schema import Named
from weft.data.batching.packed import PackedItems
from weft.errors import RoleError
from weft.nn.layers.losses import cross_entropy_sum
from weft.tokens import Tokens

# A word is seen from what stands before it, after it, or both; `masked`: its own place, too, where a mask hides it.
Direction = Literal["forward", "backward", "both", "masked"]


class Role(Enum):
    """What a model can do; the value completes "a model that ..."."""

    ENCODER = "encodes"  # encode(tokens, layers=(-1,)) -> (L, N, D); summary(tokens) -> (B, D)
    LANGUAGE_MODEL = (
        "scores"  # logits(tokens, at=None, direction) -> (N or len(at), V): position i never sees its target
    )
    MASKED_LM = "fills"  # logits at i are for position i, seen from both sides; fill_loss(tokens, at, targets)
    SEQ2SEQ = "takes a source"  # the methods take a source: Tokens
    GENERATOR = "generates"  # start, step
    SELF_FITTED = "learns by itself"  # fit, with what it needs for it


class State(Protocol):
    """What a generating model remembers of its hypotheses. Search never looks inside."""

    def select(self, rows: Tensor) -> "State":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]; rows may repeat or be left out."""
        ...


class Generator(Protocol):
    """The contract that search stands on."""

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, State]:
        """Read the prompts; return the logits (B, V) of what follows each, and the state."""
        ...

    def step(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        """Read one more token a hypothesis, ids (B,); return the logits (B, V) of the next, and the state."""
        ...


class FixedState(State, Protocol):
    """A state in memory that stays where it is: `step` writes into it and returns it, so that a CUDA graph can hold it.

    Its `select` is for rows that continue hypotheses of their own sequence.
    """

    @property
    def room(self) -> int:
        """How many tokens of a hypothesis it holds, those of the prompt among them."""
        ...

    def take(self, state: State, rows: Tensor) -> None:
        """Become the state whose hypothesis b continues rows[b] of another one, with sources of the same sizes."""
        ...


@runtime_checkable
class Capturable(Generator, Protocol):
    """A generator whose steps can all be the same work on the same memory: what a CUDA graph is captured of."""

    @property
    def steady(self) -> bool:
        """Whether `prime` is the same work, too, for all sources of the same sizes and prompts of one token."""
        ...

    @property
    def reads(self) -> int | None:
        """How long a text it can read; None: any."""
        ...

    def prime(self, prompt: Tokens, source: Tokens | None = None) -> State:
        """Read all of the prompts but their last tokens: `start` is this, and a step with those."""
        ...

    def fixed(self, state: State, rows: int, room: int) -> FixedState:
        """Make a state to take `state`, for so many hypotheses of so many tokens, or fewer where that is too many."""
        ...


@dataclass(frozen=True)
class Budget:
    """What a fitted model may spend: passes over the data or seconds, and on what terms."""

    passes: int
    seconds: float | None
    lr: float
    seed: int
    done: int = 0  # passes that were made before, by a run that is gone on with
    threads: int = 1
    folder: Path | None = None  # where large files may lie meanwhile
    eos: int | None = None  # what ends each document: the data does not hold it
    elapsed: float = 0.0  # of the seconds, what was spent before


@dataclass(frozen=True)
class Pass:
    """How far a fit has come; where `whole`, a pass is complete, and what there is may be kept."""

    done: float  # passes, and parts of them
    loss: float  # since the last one; not a number where there is none
    tokens: int  # read since the last one
    whole: bool = False


@runtime_checkable
class Fitted(Protocol):
    """A model that learns from its data by counting, or by updates of its own: no gradient, no trainer."""

    def fit(self, data: PackedItems, budget: Budget) -> Iterator[Pass]:
        """Learn, and say now and then how far it has come."""
        ...


class Model(nn.Module):
    """The root of all models, weft's and users' own."""

    Config: ClassVar[type[Named]]
    data_sized_buffers: ClassVar[bool] = False  # whether the sizes of its buffers follow from the data it was fitted to
    supports_compile: ClassVar[bool] = False  # whether torch.compile makes one graph of it, and so a faster training
    supports_low_precision: ClassVar[bool] = (
        False  # whether it can answer in bf16 and in int8 (weft.nn.layers.quantization)
    )
    width: int  # of one that encodes: the D of `encode` and `summary`

    def __init__(self, config: Named, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.vocab = vocab
        self.target_vocab = target_vocab or vocab

    def keep(self, needs: Collection[Role]) -> None:
        """Drop what only other roles than these use, such as an output layer where nothing is scored."""

    def drop_pooler(self) -> None:
        """Drop what only `summary` uses: the task does not ask for it."""

    def layer_groups(self) -> list[list[nn.Module]]:
        """Say what stands on what: the embeddings, then what each layer has; here the whole is one."""
        return [[self]]

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Say what a model of this configuration can do."""
        raise RoleError(f"{cls.__name__} names no roles; define roles(config)")

    @classmethod
    def directions(cls, config: Named) -> tuple[Direction, ...]:
        """Say from where a model of this configuration that scores or fills sees a word."""
        return ("forward",)

    @classmethod
    def uses_chars(cls, config: Named) -> bool:
        """Say whether a model of this configuration reads `Tokens.chars`: a task then spells the tokens out for it."""
        return False

    def set_char_table(self, table: Tensor) -> None:
        """Take how each token of the vocabulary is spelt, (V, C), where `spells` and generating needs it."""

    @property
    def mixable_layers(self) -> tuple[int, ...]:
        """The layers of `encode` that are of one width, for a task to mix; here the last alone."""
        return (-1,)

    def is_consistent(self) -> bool:
        """Say whether the buffers of a grown model fit together: they are taken as they are in a file."""
        return True

    def logits_each(self, tokens: Tokens, directions: Sequence[Direction]) -> list[Tensor]:
        """Score in each of several directions; a model overrides it where these have work in common."""
        body: Any = self
        return [body.logits(tokens, direction=direction) for direction in directions]

    def loss_each(self, tokens: Tokens, targets: Sequence[Tensor], directions: Sequence[Direction]) -> list[Tensor]:
        """Sum the cross-entropy of targets (N,) in each direction; a model overrides it where it can do so at once."""
        scored = self.logits_each(tokens, directions)
        return [cross_entropy_sum(logits, wanted) for logits, wanted in zip(scored, targets, strict=True)]

    def fill_loss(self, tokens: Tokens, at: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sum the cross-entropy of targets (M,) at the flat positions `at`, of a model that fills.

        The summary (B, D) comes with it where it takes no second reading.
        """
        body: Any = self
        (direction,) = self.directions(self.config)
        return cross_entropy_sum(body.logits(tokens, at=at, direction=direction), targets), None

    def log_prob(self, tokens: Tokens, targets: Tensor, direction: Direction = "forward") -> Tensor:
        """Return the log-probability (N,) of each target, of a model that scores or fills; in float32 at least."""
        body: Any = self
        logits = body.logits(tokens, direction=direction)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found: Tensor = logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)
        return found

    def flops(self, tokens: Tokens, source: Tokens | None = None) -> int:
        """Count the useful operations of a forward pass over these sequences: a multiply-add is two, padding is none.

        They follow from lengths alone, and are those of products. By default each matrix meets each token once: the
        tokens of both sides, or, where a part goes by the name `encoder`, that part the source and the rest the target.
        A model overrides it where this is not so, such as where pairs of tokens meet (attention).
        """
        matrices, encoder = matrix_numbers(self), getattr(self, "encoder", None)
        read, given = int(tokens.lengths.sum()), 0 if source is None else int(source.lengths.sum())
        if source is None or not isinstance(encoder, nn.Module):
            return 2 * matrices * (read + given)
        inside = matrix_numbers(encoder)
        return 2 * (inside * given + (matrices - inside) * read)


_counted: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # to look through a large model takes 1 ms a time


def matrix_numbers(module: nn.Module) -> int:
    """Count the numbers in matrices and kernels that multiply: each once, a table that is only looked up not at all.

    A table that is tied to an output multiplies there, so it counts. The count is made once a module and kept: call it
    when the module is complete.
    """
    if module not in _counted:
        parts = (part for part in module.modules() if not isinstance(part, nn.Embedding | nn.EmbeddingBag))
        own = {own for part in parts for own in part.parameters(recurse=False) if own.ndim >= 2}
        _counted[module] = sum(one.numel() for one in own)
    return _counted[module]


def check_roles(task: str, needs: Iterable[Role], model: str, roles: Iterable[Role]) -> None:
    """Refuse a model that cannot do what the task needs; called before any data is read."""
    missing = set(needs) - set(roles)
    if missing:
        raise RoleError(
            f"model.name: task {task!r} needs a model that {_list(needs)}; {model!r}, as configured, "
            f"{_list(roles) or 'does nothing'}: it lacks {_list(missing)!r}"
        )


def _list(roles: Iterable[Role]) -> str:
    asked = set(roles)
    return " and ".join(role.value for role in Role if role in asked)
