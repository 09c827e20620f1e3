"""BERT: a bidirectional Transformer encoder with a masked-LM head (Devlin et al. 2019).

    h_0 = Dropout(LayerNorm(E w + S s + P i))                 token, segment and position embeddings (figure 2)
    h_l = block(h_{l-1})                                      self-attention, then FFN with GELU, post-norm
    pooled = tanh(W h_L[CLS] + b)                             the pooler, learnt by next-sentence prediction
    p(w_i | text with w_i masked) = softmax(E LayerNorm(gelu(W h_L[i] + b)) + c)                      (section 3.1)

The family, by configuration (presets): RoBERTa (Liu et al. 2019) has one segment, and positions that begin at 2.
DistilBERT (Sanh et al. 2019) has no segments and half the layers. ALBERT (Lan et al. 2020) shares one layer's weights
across all layers (`shared`), on narrow embeddings (`embedding`); ELECTRA (Clark et al. 2020) has narrow embeddings.
Their poolers differ in the activation (`pooler`).

All matrices are initialised from N(0, 0.02), biases with zero. Departure: no dropout on attention weights
(`weft.nn.attention.multihead` says why), where the papers' code drops a tenth of them.
"""

from collections.abc import Collection, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from weft.config.schema import MAX_POSITIONS, MAX_SIZE, Named, Positions, Size
from weft.errors import RoleError
from weft.models.base import LMDirection, Model, Role
from weft.models.transformer_config import StackConfig
from weft.nn.attention.multihead import AttentionLayout, MultiHeadAttention
from weft.nn.attention.positions import Learned, check_position, positions_of
from weft.nn.layers.activations import ACTIVATIONS, Activation
from weft.nn.layers.losses import read_out_sum
from weft.nn.transformer.blocks import BlockConfig, Blocks, init_normal_
from weft.nn.transformer.output_projection import OutputProjection
from weft.tokens import Tokens

POOLERS = {"tanh": torch.tanh, "relu": ACTIVATIONS["relu"], "gelu": ACTIVATIONS["gelu"]}


class BERTConfig(StackConfig):
    """The sizes of BERT-base by default."""

    place: ClassVar[str] = "encoder"

    activation: Activation = "gelu"  # of the feed-forward layers
    max_positions: Positions = 512  # number of learned positions
    offset: int = Field(0, ge=0, le=MAX_POSITIONS)  # the position of the first token
    segments: int = Field(2, ge=0, le=MAX_SIZE)  # number of segment embeddings; below 2 segment ids are ignored
    embedding: Size | None = None  # width of the embeddings if not `width`: a projection follows
    shared: bool = False  # all layers share one set of weights
    pooler: Literal["tanh", "relu", "gelu", "none"] = "tanh"  # activation of the pooler
    eps: float = Field(1e-12, ge=0)  # of the layer norms

    @property
    def position_limit(self) -> int:
        """The learned positions from `offset` on."""
        return self.max_positions - self.offset

    @model_validator(mode="after")
    def _check(self) -> "BERTConfig":
        if self.shared and self.pruned_heads:
            raise ValueError("model.pruned_heads: layers that share their weights have the same heads; leave it out")
        if self.offset >= self.max_positions:
            raise ValueError(
                f"model.offset must be below model.max_positions: got {self.offset} and {self.max_positions}"
            )
        return self


class BERT(Model):
    """Embeddings, blocks, pooler and masked-LM head."""

    Config: ClassVar[type[Named]] = BERTConfig
    supports_compile = True
    supports_low_precision: ClassVar[bool] = True
    config: BERTConfig
    pooler: nn.Linear | None
    transform: nn.Linear | None
    transform_norm: nn.LayerNorm | None
    output: OutputProjection | None

    def __init__(self, config: BERTConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        self.width = width = config.width
        narrow = config.embedding or width
        self.embed = nn.Embedding(vocab, narrow)
        self.positions = Learned(config.max_positions, narrow)
        self.segments = nn.Embedding(config.segments, narrow) if config.segments else None
        self.norm, self.dropout = nn.LayerNorm(narrow, config.eps), nn.Dropout(config.dropout)
        self.project = nn.Linear(narrow, width) if config.embedding else None
        self.encoder = Blocks(_block_config(config), config.layers, "encoder", shared=config.shared)
        self.pooler = None if config.pooler == "none" else nn.Linear(width, width)
        self.transform, self.transform_norm = nn.Linear(width, narrow), nn.LayerNorm(narrow, config.eps)
        self.activation = ACTIVATIONS[config.activation]
        self.output = OutputProjection(narrow, vocab, bias=True)
        init_normal_(self)
        if config.tie:
            self.output.weight = self.embed.weight
        self._attentions = tuple(module for module in self.modules() if isinstance(module, MultiHeadAttention))

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Return its roles: encoder and masked LM."""
        return frozenset({Role.ENCODER, Role.MASKED_LM})

    @classmethod
    def directions(cls, config: Named) -> tuple[LMDirection, ...]:
        """Return its only direction: a masked token is predicted from all the others."""
        return ("masked",)

    @property
    def mixable_layers(self) -> tuple[int, ...]:
        """All layers, with the embeddings."""
        return tuple(range(self.config.layers + 1))

    @property
    def max_positions(self) -> int:
        """The maximum length: the learned positions from `offset` on."""
        return self.config.position_limit

    def prune_unused(self, needs: Collection[Role]) -> None:
        """Drop the masked-LM head unless that role is needed."""
        if Role.MASKED_LM not in needs:
            self.transform = self.transform_norm = self.output = None

    def drop_pooler(self) -> None:
        """Drop the pooler."""
        self.pooler = None

    def layer_groups(self) -> list[list[nn.Module]]:
        """Return the embeddings, then each layer; layers that share their weights are one group."""
        embeddings = (self.embed, self.positions, self.segments, self.norm, self.dropout, self.project)
        blocks = list(self.encoder.blocks)
        layers = [blocks] if self.config.shared else [[block] for block in blocks]
        return [[module for module in embeddings if module is not None], *layers]

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the outputs of the chosen layers, (L, N, D); 0 is the embeddings, -1 the last layer."""
        self.config.check_layers(layers)
        return torch.stack(self._hidden_states(tokens, layers))

    def pooled_output(self, tokens: Tokens) -> Tensor:
        """Return the pooled output (B, D): the pooler on the hidden state of each sequence's first token, [CLS]."""
        return self._pooled(self._hidden_states(tokens, (-1,))[0], tokens)

    def final_states(self, states: Tensor, tokens: Tokens) -> Tensor:
        """Return the state of each sequence's first token, [CLS], which stands for the text: (B, D)."""
        first = tokens.starts[:-1].long().clamp(max=max(len(states) - 1, 0))  # empty sequences may pad a batch
        return states.index_select(0, first)

    def logits(self, tokens: Tokens, at: Tensor | None = None, direction: LMDirection = "masked") -> Tensor:
        """Return the masked-LM logits of each token: (N, V), or (len(at), V) at the flat positions `at`."""
        if direction != "masked":
            raise RoleError(f"model: a bert fills what is masked, but {direction!r} is asked for")
        return self.masked_logits_of(self._hidden_states(tokens, (-1,))[0], at)

    def masked_lm_loss(self, tokens: Tokens, at: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the summed cross-entropy at the flat positions `at`; only these go through the output projection."""
        hidden = self._hidden_states(tokens, (-1,))[0]
        pooled = None if self.pooler is None else self._pooled(hidden, tokens)
        return self.masked_loss_of(hidden, at, targets), pooled

    def masked_logits_of(self, hidden: Tensor, at: Tensor | None = None) -> Tensor:
        """Return the masked-LM logits from the last layer's output (N, D): of all tokens, or at the flat positions."""
        assert self.output is not None
        logits: Tensor = self.output(self._mlm_transform(hidden if at is None else hidden[at]))
        return logits

    def masked_loss_of(self, hidden: Tensor, at: Tensor, targets: Tensor) -> Tensor:
        """Return the summed cross-entropy at the flat positions `at` from the last layer's output (N, D)."""
        assert self.output is not None
        return read_out_sum(self.output, self._mlm_transform(hidden.index_select(0, at)), targets)

    def flops(self, tokens: Tokens, source: Tokens | None = None) -> int:
        """Return the FLOPs: each matrix for each token, 4 D for each query-key pair, and the pooler once a sequence."""
        count, pairs = int(tokens.lengths.sum()), int((tokens.lengths**2).sum())
        narrow, width = self.config.embedding, self.width
        encoder = sum(layer.weight.numel() for layer in self.encoder.modules() if isinstance(layer, nn.Linear))
        body = (encoder + (narrow or 0) * width) * count + (0 if self.pooler is None else width * width * len(tokens))
        head = 0 if self.transform is None else (self.transform.weight.numel() + self.embed.weight.numel()) * count
        return 2 * (body + head) + 4 * pairs * sum(len(layer.kept) * layer.size for layer in self._attentions)

    def _hidden_states(self, tokens: Tokens, layers: Sequence[int]) -> list[Tensor]:
        """Return the chosen hidden states, (N, D) each: 0 is the first block's input, then each block's output."""
        check_position(tokens.longest, self.max_positions)
        positions = positions_of(tokens) + self.config.offset
        x = self.embed(tokens.ids) + self.positions(positions)
        if self.segments is not None:
            segments = tokens.segments if self.config.segments > 1 else None
            x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        x = self.dropout(self.norm(x))
        x = x if self.project is None else self.project(x)
        states: list[Tensor] = self.encoder(x, AttentionLayout.self_attention(tokens), layers=layers)
        return states

    def _pooled(self, hidden: Tensor, tokens: Tokens) -> Tensor:
        first = self.final_states(hidden, tokens)
        return first if self.pooler is None else POOLERS[self.config.pooler](self.pooler(first))

    def _mlm_transform(self, hidden: Tensor) -> Tensor:
        assert self.transform is not None
        assert self.transform_norm is not None
        transformed: Tensor = self.transform_norm(self.activation(self.transform(hidden)))
        return transformed


def _block_config(config: BERTConfig) -> BlockConfig:
    assert config.ffn_width is not None
    return BlockConfig(
        config.width,
        config.heads,
        config.ffn_width,
        config.activation,
        "post",
        config.dropout,
        config.pruned_heads,
        config.eps,
    )
