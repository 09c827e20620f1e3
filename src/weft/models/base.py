"""The base class of all models, their roles, and the protocols for generation and for models with their own fit.

A model takes `Tokens` and returns tensors: no text, label, loss, optimizer, file or HTTP. What it can do depends on its
configuration, so a class returns its roles for a configuration, and a task checks them before any data is read.
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
from weft.data.batching.packed_items import PackedItems
from weft.errors import ConfigError, RoleError
from weft.nn.layers.losses import cross_entropy_sum
from weft.tokens import Tokens

# The context that predicts a token: left, right, or both; `masked`: both, and its own position holds a mask token.
LMDirection = Literal["forward", "backward", "both", "masked"]


class Role(Enum):
    """A capability of a model; the value completes "a model that ..." in messages."""

    ENCODER = "encodes"  # encode(tokens, layers=(-1,)) -> (L, N, D); pooled_output(tokens) -> (B, D); of sources alone
    LANGUAGE_MODEL = "scores"  # logits(tokens, at=None, direction) -> (N or len(at), V), never given the target
    # The logits at i are for position i, conditioned on both sides; masked_lm_loss(tokens, at, targets).
    MASKED_LM = "fills"
    SEQ2SEQ = "takes a source"  # the methods take a second argument, source: Tokens
    GENERATOR = "generates"  # start, step
    SELF_FITTED = "learns by itself"  # fit(data, budget): no trainer


class GenerationState(Protocol):
    """The decoding state of a batch of hypotheses. It is opaque to the search."""

    def select(self, rows: Tensor) -> "GenerationState":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]; rows may repeat or be missing."""
        ...


@runtime_checkable
class JoinableState(GenerationState, Protocol):
    """A decoding state that other hypotheses can join while it is used (`weft.decoding.continuous`)."""

    def join(self, other: Any) -> "JoinableState":
        """Return the state of these hypotheses and, after them, those of another state of the same model."""
        ...


class Generator(Protocol):
    """The interface that greedy search, beam search and sampling call."""

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, GenerationState]:
        """Return the logits (B, V) of the token after each prompt, and the decoding state."""
        ...

    def step(self, ids: Tensor, state: GenerationState) -> tuple[Tensor, GenerationState]:
        """Append one token to each hypothesis, ids (B,); return the logits (B, V) of the next one, and the state."""
        ...


class StaticState(GenerationState, Protocol):
    """A decoding state at fixed addresses: `step` writes into it and returns it, so that a CUDA graph can replay it.

    Its `select` takes only rows that continue hypotheses of the same sequence.
    """

    @property
    def capacity(self) -> int:
        """The number of tokens that fit for a hypothesis, the prompt included."""
        ...

    def copy_from(self, state: GenerationState, rows: Tensor) -> None:
        """Copy `state` in place: hypothesis b continues its hypothesis rows[b]; source sizes must be equal."""
        ...


@runtime_checkable
class Capturable(Generator, Protocol):
    """A generator whose steps launch the same kernels on the same memory, so that a CUDA graph can be captured."""

    supports_capture: bool  # whether that holds as it is configured

    @property
    def prefill_capturable(self) -> bool:
        """Return whether `prefill` can be captured too: same kernels for sources of one size, one-token prompts."""
        ...

    @property
    def max_positions(self) -> int | None:
        """The maximum number of positions; None: unlimited."""
        ...

    def prefill(self, prompt: Tokens, source: Tokens | None = None) -> GenerationState:
        """Return the state after all prompt tokens but the last: `start` is this and a step with the last ones."""
        ...

    def make_static(self, state: GenerationState, rows: int, capacity: int) -> StaticState:
        """Return a static state for copies of this one: `rows` hypotheses of `capacity` tokens at most."""
        ...


class StatePool(GenerationState, Protocol):
    """Decoding states of a running batch at fixed addresses: a row belongs to one hypothesis, or to none.

    A step writes into it and returns it; a row that is not active stays as it is, and its logits mean nothing.
    """

    @property
    def active(self) -> Tensor:
        """(R,) int32: 1 where a hypothesis goes on."""
        ...

    def first_rows(self, rows: int) -> "StatePool":
        """Return the pool of the first rows; the memory is the same."""
        ...

    def put(
        self,
        rows: Sequence[int],
        state: Any,
        hypotheses: Sequence[int],
        tokens: Sequence[int],
        source_tokens: Sequence[int],
    ) -> None:
        """Copy hypotheses of a state, each with so many tokens and tokens of its source, into rows."""
        ...

    def copy_from(self, pool: Any) -> None:
        """Copy the rows of a smaller pool into the first rows."""
        ...


@runtime_checkable
class Poolable(Capturable, Protocol):
    """A generator whose running batch can be captured: hypotheses join and leave it, each with a row of its own."""

    target_vocab: int

    def make_pool(self, rows: int, tokens: int, source_tokens: int) -> StatePool:
        """Return an empty pool for so many hypotheses, of so many tokens each, and as many of its source."""
        ...


@dataclass(frozen=True)
class FitBudget:
    """The budget and settings of a model's own fit: passes over the data or seconds, learning rate, seed, threads."""

    passes: int
    seconds: float | None
    lr: float
    seed: int
    done: int = 0  # passes made before the run was resumed
    threads: int = 1
    folder: Path | None = None  # for large temporary files
    eos: int | None = None  # the token that ends each document; the data does not contain it
    elapsed: float = 0.0  # seconds spent before the run was resumed


@dataclass(frozen=True)
class FitProgress:
    """The progress of a fit; where `whole`, a pass is complete and the model may be saved."""

    done: float  # passes, with the fraction of the current one
    loss: float  # mean since the last report; NaN where there is none
    tokens: int  # read since the last report
    whole: bool = False


@runtime_checkable
class SelfFitted(Protocol):
    """A model with its own fit, by counting or by its own updates: no autograd, no trainer."""

    def fit(self, data: PackedItems, budget: FitBudget) -> Iterator[FitProgress]:
        """Fit the model to the data; yield progress reports."""
        ...


class Model(nn.Module):
    """The base class of all models, weft's and users' own."""

    Config: ClassVar[type[Named]]
    data_sized_buffers: ClassVar[bool] = False  # whether buffer sizes depend on the training data
    supports_compile: bool = False  # whether torch.compile captures it as one graph: faster training
    supports_capture: bool = True  # of a `Capturable`: whether its generation can be captured in CUDA graphs
    keeps_embedding_std: ClassVar[bool] = False  # whether word vectors are scaled to the std of its own embeddings
    supports_low_precision: ClassVar[bool] = False  # whether it runs in bf16 and int8 (weft.nn.layers.quantization)
    width: int  # of an encoder: the D of `encode` and `pooled_output`

    def __init__(self, config: Named, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.vocab = vocab
        self.target_vocab = target_vocab or vocab

    def prune_unused(self, needs: Collection[Role]) -> None:
        """Drop the modules that none of these roles uses, such as the output projection of a pure encoder."""

    def drop_pooler(self) -> None:
        """Drop the modules that only `pooled_output` uses: the task does not need it."""

    def final_states(self, states: Tensor, tokens: Tokens) -> Tensor:
        """Return of the last layer's states (N, D) those that have read a whole sequence, (B, D): the last tokens'.

        A model whose last token has not read all of it, or does not stand for the text, overrides it.
        """
        last = (tokens.starts[1:].long() - 1).clamp(min=0)  # empty sequences may pad a batch
        return states.index_select(0, last)

    def layer_groups(self) -> list[list[nn.Module]]:
        """Return the layer groups, bottom to top: the embeddings, then each layer; by default one group."""
        return [[self]]

    def word_embeddings(self) -> dict[str, list[nn.Embedding]]:
        """Return the embedding tables that start from the file of each recipe key, `vectors` or `target_vectors`.

        By default `vectors` is for `self.embed`, where that is an embedding.
        """
        embed = getattr(self, "embed", None)
        return {"vectors": [embed]} if isinstance(embed, nn.Embedding) else {}

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Return the roles of a model of this configuration."""
        raise RoleError(f"{cls.__name__} names no roles; define roles(config)")

    @classmethod
    def directions(cls, config: Named) -> tuple[LMDirection, ...]:
        """Return the directions in which a language model or masked LM of this configuration predicts."""
        return ("forward",)

    @classmethod
    def uses_chars(cls, config: Named) -> bool:
        """Return whether a model of this configuration reads `Tokens.chars`, which a task then adds to its batches."""
        return False

    def set_char_table(self, table: Tensor) -> None:
        """Set the characters of each vocabulary token, (V, C): a model that `uses_chars` needs them to generate."""

    @property
    def mixable_layers(self) -> tuple[int, ...]:
        """The layers of `encode` of equal width, which a task can mix (scalar mix); by default the last alone."""
        return (-1,)

    def is_consistent(self) -> bool:
        """Return whether data-sized buffers loaded from a file are consistent with each other."""
        return True

    def logits_each(self, tokens: Tokens, directions: Sequence[LMDirection]) -> list[Tensor]:
        """Return the logits (N, V) of each direction; a model overrides it where directions share computation."""
        body: Any = self
        return [body.logits(tokens, direction=direction) for direction in directions]

    def loss_each(self, tokens: Tokens, targets: Sequence[Tensor], directions: Sequence[LMDirection]) -> list[Tensor]:
        """Return the summed cross-entropy of targets (N,) in each direction; a model may override it, fused."""
        each = zip(self.logits_each(tokens, directions), targets, strict=True)
        return [cross_entropy_sum(logits, target) for logits, target in each]

    def masked_lm_loss(self, tokens: Tokens, at: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the summed cross-entropy of targets (M,) at the flat positions `at`, of a masked LM.

        The pooled output (B, D) comes with it where it needs no second forward pass.
        """
        body: Any = self
        (direction,) = self.directions(self.config)
        return cross_entropy_sum(body.logits(tokens, at=at, direction=direction), targets), None

    def log_prob(self, tokens: Tokens, targets: Tensor, direction: LMDirection = "forward") -> Tensor:
        """Return the log-probability (N,) of each target, of a language model or masked LM; in float32 at least."""
        body: Any = self
        logits = body.logits(tokens, direction=direction)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_probs: Tensor = logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)
        return log_probs

    def flops(self, tokens: Tokens, source: Tokens | None = None) -> int:
        """Return the useful FLOPs of a forward pass over these sequences: a multiply-add is two, padding is none.

        Only matrix products count, and they follow from the lengths alone. By default each matrix multiplies each token
        once: the tokens of both sides, or, with a submodule `encoder`, that one the source and the rest the target.
        A model overrides it where this does not hold, such as for attention, which is quadratic in the length.
        """
        size, encoder = num_matrix_parameters(self), getattr(self, "encoder", None)
        target_length, source_length = int(tokens.lengths.sum()), 0 if source is None else int(source.lengths.sum())
        if source is None or not isinstance(encoder, nn.Module):
            return 2 * size * (target_length + source_length)
        encoder_size = num_matrix_parameters(encoder)
        return 2 * (encoder_size * source_length + (size - encoder_size) * target_length)


_matrix_sizes: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # traversing a large model takes 1 ms


def num_matrix_parameters(module: nn.Module) -> int:
    """Return the number of elements in weight matrices and convolution kernels, each once, embeddings excluded.

    An embedding that is tied to the output projection is multiplied there, so it counts. The result is cached for each
    module: call it when the module is complete.
    """
    if module not in _matrix_sizes:
        layers = (layer for layer in module.modules() if not isinstance(layer, nn.Embedding | nn.EmbeddingBag))
        weights = {weight for layer in layers for weight in layer.parameters(recurse=False) if weight.ndim >= 2}
        _matrix_sizes[module] = sum(weight.numel() for weight in weights)
    return _matrix_sizes[module]


def check_roles(task: str, needs: Iterable[Role], model: str, roles: Iterable[Role]) -> None:
    """Raise RoleError if the model lacks a role that the task needs; called before any data is read."""
    missing = set(needs) - set(roles)
    if missing:
        raise RoleError(
            f"model.name: task {task!r} needs a model that {_join_roles(needs)}; {model!r}, as configured, "
            f"{_join_roles(roles) or 'does nothing'}: it lacks {_join_roles(missing)!r}"
        )


def check_copying(copy: bool, target_vocab: int | None) -> None:
    """Raise ConfigError if a model is to copy tokens of the source into a target with a vocabulary of its own."""
    if copy and target_vocab is not None:
        raise ConfigError(
            "model.copying: copies tokens of the source, so source and target must have one vocabulary; leave "
            "tokenizer.target out"
        )


def _join_roles(roles: Iterable[Role]) -> str:
    given = set(roles)
    return " and ".join(role.value for role in Role if role in given)
