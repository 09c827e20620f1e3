"""What a model is, and what it can do.

A model sees `Tokens` and returns tensors: no text, label, loss, optimiser, file or HTTP. What it can do depends on its
configuration, so a class names its roles for a configuration, and a task asks for roles before any data is read.
"""

from collections.abc import Collection, Iterable
from enum import Enum
from typing import ClassVar, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from weft.config import Named
from weft.errors import RoleError
from weft.tokens import Tokens


class Role(Enum):
    """What a model can do; the value completes "a model that ..."."""

    ENCODER = "encodes"  # encode(tokens, layers=(-1,)) -> (L, N, D); summary(tokens) -> (B, D)
    SCORER = "scores"  # logits(tokens, at=None) -> (N or len(at), V): position i never sees its target
    FILLER = "fills"  # logits at i are for position i, seen from both sides
    CONDITIONAL = "takes a source"  # the methods take a source: Tokens
    GENERATOR = "generates"  # start, step


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


class Model(nn.Module):
    """The root of all models, weft's and users' own."""

    Config: ClassVar[type[Named]]
    compiles: ClassVar[bool] = False  # whether torch.compile makes one graph of it, and so a faster training
    lowers: ClassVar[bool] = False  # whether it can answer in bf16 and in int8 (weft.nn.quantized)
    width: int  # of one that encodes: the D of `encode` and `summary`

    def __init__(self, config: Named, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.vocab = vocab
        self.target_vocab = target_vocab or vocab

    def keep(self, needs: Collection[Role]) -> None:
        """Drop what only other roles than these use, such as an output layer where nothing is scored."""

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Say what a model of this configuration can do."""
        raise RoleError(f"{cls.__name__} names no roles; define roles(config)")

    @classmethod
    def spells(cls, config: Named) -> bool:
        """Say whether a model of this configuration reads `Tokens.chars`: a task then spells the tokens out for it."""
        return False

    def operations(self, tokens: Tokens, source: Tokens | None = None) -> int:
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
