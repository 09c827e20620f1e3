"""BERT: a Transformer's encoder, which reads a text from both its sides at once (Devlin et al. 2019).

    h_0 = Dropout(LayerNorm(E w + S s + P i))                 words, segments, positions (figure 2)
    h_l = block(h_{l-1})                                      self-attention, then FFN with GELU, post-norm
    summary = tanh(W h_L[CLS] + b)                            the "pooler", learnt by next-sentence prediction
    p(w_i | text with w_i masked) = softmax(E LayerNorm(gelu(W h_L[i] + b)) + c)                      (section 3.1)

The family, by configuration (presets): RoBERTa (Liu et al. 2019) has one segment, and positions that begin at 2.
DistilBERT (Sanh et al. 2019) has no segments and half the layers. ALBERT (Lan et al. 2020) has one layer, used again
and again (`shared`), on narrow embeddings (`embedding`); ELECTRA (Clark et al. 2020) has narrow embeddings. What they
make of the first token before they classify differs in its activation (`pooler`).

All matrices start from N(0, 0.02), biases from nought. Departure: no weights of attention are dropped out
(`weft.nn.attention.multihead` says why), where the papers' code drops a tenth of them.
"""

from collections.abc import Collection, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from weft.config.schema import Named
from weft.errors import RoleError
from weft.models.attention_config import StackConfig
from weft.models.base import Direction, Model, Role
from weft.nn.attention.multihead import AttentionLayout, MultiHeadAttention
from weft.nn.attention.positions import Learned, check_position, positions_of
from weft.nn.layers.losses import read_out_sum
from weft.nn.transformer.blocks import ACTIVATIONS, Activation, BlockConfig, Blocks
from weft.nn.transformer.output import OutputProjection
from weft.tokens import Tokens

_SPREAD = 0.02  # the standard deviation that weights start with
POOLERS = {"tanh": torch.tanh, "relu": ACTIVATIONS["relu"], "gelu": ACTIVATIONS["gelu"]}


class BERTConfig(StackConfig):
    """The sizes of BERT-base by default."""

    place: ClassVar[str] = "encoder"

    activation: Activation = "gelu"
    longest: int = Field(512, ge=1)  # how many positions are learned
    offset: int = Field(0, ge=0)  # the first of them that a text has
    segments: int = Field(2, ge=0)  # kinds of text in a sequence that are told apart; below 2 they are not
    embedding: int | None = Field(None, ge=1)  # of words, where it is another width: a projection follows
    shared: bool = False  # one layer, used again and again
    pooler: Literal["tanh", "relu", "gelu", "none"] = "tanh"  # what the summary makes of the first token
    eps: float = Field(1e-12, ge=0)  # of the norms

    @model_validator(mode="after")
    def _fits(self) -> "BERTConfig":
        if self.shared and self.heads_off:
            raise ValueError("model.heads_off: layers that share their weights have the same heads; leave it out")
        if self.offset >= self.longest:
            raise ValueError(f"model.offset must be below model.longest: got {self.offset} and {self.longest}")
        return self


class BERT(Model):
    """Embeddings, blocks, and what a summary and filling need on top."""

    Config: ClassVar[type[Named]] = BERTConfig
    supports_compile: ClassVar[bool] = True
    supports_low_precision: ClassVar[bool] = True
    config: BERTConfig
    pool: nn.Linear | None
    transform: nn.Linear | None
    transform_norm: nn.LayerNorm | None
    output: OutputProjection | None

    def __init__(self, config: BERTConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        self.width = width = config.width
        narrow = config.embedding or width
        self.embed = nn.Embedding(vocab, narrow)
        self.positions = Learned(config.longest, narrow)
        self.segments = nn.Embedding(config.segments, narrow) if config.segments else None
        self.norm, self.dropout = nn.LayerNorm(narrow, config.eps), nn.Dropout(config.dropout)
        self.project = nn.Linear(narrow, width) if config.embedding else None
        self.encoder = Blocks(_shape(config), config.layers, "encoder", shared=config.shared)
        self.pool = None if config.pooler == "none" else nn.Linear(width, width)
        self.transform, self.transform_norm = nn.Linear(width, narrow), nn.LayerNorm(narrow, config.eps)
        self.activation = ACTIVATIONS[config.activation]
        self.output = OutputProjection(narrow, vocab, bias=True)
        self._start_weights()
        if config.tie:
            self.output.weight = self.embed.weight
        self._looks = tuple(part for part in self.modules() if isinstance(part, MultiHeadAttention))

    def _start_weights(self) -> None:
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=_SPREAD)
            if isinstance(part, nn.Linear):
                nn.init.zeros_(part.bias)

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Say what it can do: encode and fill."""
        return frozenset({Role.ENCODER, Role.MASKED_LM})

    @classmethod
    def directions(cls, config: Named) -> tuple[Direction, ...]:
        """A word is told from all of the text, and hidden by a mask alone."""
        return ("masked",)

    @property
    def mixable_layers(self) -> tuple[int, ...]:
        """Every layer, the embeddings too."""
        return tuple(range(self.config.layers + 1))

    @property
    def reads(self) -> int:
        """How many positions were learned."""
        return self.config.longest - self.config.offset

    def keep(self, needs: Collection[Role]) -> None:
        """Drop what fills where nothing is filled."""
        if Role.MASKED_LM not in needs:
            self.transform = self.transform_norm = self.output = None

    def drop_pooler(self) -> None:
        """Drop the pooler."""
        self.pool = None

    def layer_groups(self) -> list[list[nn.Module]]:
        """The embeddings, then each layer; layers that share their weights are one."""
        below = (self.embed, self.positions, self.segments, self.norm, self.dropout, self.project)
        blocks = list(self.encoder.blocks)
        layers = [blocks] if self.config.shared else [[block] for block in blocks]
        return [[part for part in below if part is not None], *layers]

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the outputs of the chosen layers, (L, N, D); 0 is what enters the first one, -1 the last one's."""
        self.config.check_layers(layers)
        return torch.stack(self._states(tokens, layers))

    def summary(self, tokens: Tokens) -> Tensor:
        """Return one vector a sequence, (B, D), from the state of its first token, [CLS]."""
        return self._summed(self._states(tokens, (-1,))[0], tokens)

    def logits(self, tokens: Tokens, at: Tensor | None = None, direction: Direction = "masked") -> Tensor:
        """Score what stands at each place: (N, V), or (len(at), V) at the flat positions `at`."""
        if direction != "masked":
            raise RoleError(f"model: a bert fills what is masked, but {direction!r} is asked for")
        states = self._states(tokens, (-1,))[0]
        return self._filled(states if at is None else states[at])

    def fill_loss(self, tokens: Tokens, at: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sum the cross-entropy of targets (M,) at the flat positions `at`; only these meet the vocabulary."""
        states = self._states(tokens, (-1,))[0]
        summary = None if self.pool is None else self._summed(states, tokens)
        assert self.output is not None
        return read_out_sum(self.output, self._transformed(states.index_select(0, at)), targets), summary

    def flops(self, tokens: Tokens, source: Tokens | None = None) -> int:
        """Count the matrices of the layers for each token, 4 D for each pair of them, and the pooler once a text."""
        read, pairs = int(tokens.lengths.sum()), int((tokens.lengths**2).sum())
        narrow, wide = self.config.embedding, self.width
        each = sum(part.weight.numel() for part in self.encoder.modules() if isinstance(part, nn.Linear))
        met = (each + (narrow or 0) * wide) * read + (0 if self.pool is None else wide * wide * len(tokens))
        filled = 0 if self.transform is None else (self.transform.weight.numel() + self.embed.weight.numel()) * read
        return 2 * (met + filled) + 4 * pairs * sum(len(look.kept) * look.size for look in self._looks)

    def _states(self, tokens: Tokens, layers: Sequence[int]) -> list[Tensor]:
        """Return the chosen ones of what enters the first block and what comes out of each, (N, D) each."""
        check_position(tokens.longest, self.reads)
        places = positions_of(tokens) + self.config.offset
        x = self.embed(tokens.ids) + self.positions(places)
        if self.segments is not None:
            kinds = tokens.segments if self.config.segments > 1 else None
            x = x + (self.segments.weight[0] if kinds is None else self.segments(kinds))
        x = self.dropout(self.norm(x))
        x = x if self.project is None else self.project(x)
        found: list[Tensor] = self.encoder(x, AttentionLayout.itself(tokens), layers=layers)
        return found

    def _summed(self, states: Tensor, tokens: Tokens) -> Tensor:
        firsts = tokens.starts[:-1].long().clamp(max=max(len(states) - 1, 0))  # an empty sequence fills a batch up
        first = states.index_select(0, firsts)
        return first if self.pool is None else POOLERS[self.config.pooler](self.pool(first))

    def _filled(self, states: Tensor) -> Tensor:
        assert self.output is not None
        scores: Tensor = self.output(self._transformed(states))
        return scores

    def _transformed(self, states: Tensor) -> Tensor:
        assert self.transform is not None
        assert self.transform_norm is not None
        made: Tensor = self.transform_norm(self.activation(self.transform(states)))
        return made


def _shape(config: BERTConfig) -> BlockConfig:
    assert config.hidden is not None
    return BlockConfig(
        config.width,
        config.heads,
        config.hidden,
        config.activation,
        "post",
        config.dropout,
        config.heads_off,
        config.eps,
    )
