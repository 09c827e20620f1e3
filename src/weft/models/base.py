"""What a model is, and what it can do.

A model sees `Tokens` and returns tensors: no text, label, loss, optimiser, file or HTTP. What it can do depends on its
configuration, so a class names its roles for a configuration, and a task asks for roles before any data is read.
"""

from collections.abc import Collection, Iterable
from enum import Enum
from typing import ClassVar, Protocol

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


class Model(nn.Module):
    """The root of all models, weft's and users' own."""

    Config: ClassVar[type[Named]]
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
