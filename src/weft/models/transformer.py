"""The Transformer (Vaswani et al. 2017): an encoder-decoder of attention and feed-forward layers alone.

    x_0 = Dropout(√D · E y + PE)                              embeddings and positions (sections 3.4, 3.5 and 5.4)
    encoder    self-attention over the source                 MultiHead(x, x, x), then FFN             (section 3.1)
    decoder    causal self-attention, cross-attention to the encoder's last layer, then FFN
    p(y_t | y_<t, x) = softmax(E x_L)                         E is shared with the embeddings (section 3.4)

With one vocabulary for both sides, source, target and output share one E; with two, target and output share theirs.

With `embedding` the width of E differs from D, and a projection P follows, as in ALBERT (Lan et al. 2020, section 3.1):
x_0 = Dropout(√D · P E y + PE). The output then has a matrix of its own.

With `copying` tokens of the source are written, too (See, Liu & Manning 2017; `weft.nn.attention.copying`): one head
more attends from the decoder's last layer to the encoder's, and its weights say what is copied.

Departures: positions may be learned, or have all sines before all cosines (`positions: halves`), and the output
projection may have a bias, as in Marian (Junczys-Dowmunt et al. 2018); layer norm may come before each sub-layer
(`norm: pre`). Initialisation follows the authors' code: Xavier uniform for matrices, N(0, 1/D) for embeddings, zero for
biases.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from weft.config.schema import Layers, Named, Positions, Pretrained, Size
from weft.errors import ConfigError
from weft.models.base import Model, Role, check_copying, num_matrix_parameters
from weft.models.transformer_config import PrunedHeads, check_heads, check_pruned_heads
from weft.models.word_vectors import Channels, check_channels, keep_static
from weft.nn.attention.copying import CopyAttention, CopyState, mix_log_probs
from weft.nn.attention.kv_cache import KVCache, KVIndex, StaticKVCache, without_last_tokens
from weft.nn.attention.multihead import AttentionLayout, MultiHeadAttention
from weft.nn.attention.pooled_kv_cache import PooledSources
from weft.nn.attention.positions import Learned, Sinusoidal, check_position, positions_of
from weft.nn.attention.static_kv_pool import StaticKVPool, token_places
from weft.nn.kernels import dispatch
from weft.nn.layers.activations import Activation
from weft.nn.layers.pooling import pool_tokens
from weft.nn.rnn.time_major import TimeMajor
from weft.nn.transformer.blocks import BlockConfig, Blocks
from weft.nn.transformer.output_projection import OutputProjection
from weft.tokens import Tokens, to_device


class TransformerConfig(Pretrained):
    """Sizes of the Transformer; `layers` counts the encoder's, and the decoder's unless `decoder_layers` is set.

    `pruned_heads` prunes heads: {3: [1, 5]} in every attention of layer 3, {cross.3: [1, 5]} in its cross-attention
    alone.
    """

    width: Size = 512  # of the hidden states
    heads: Size = 8  # attention heads a layer; they divide `width`
    layers: Layers = 6  # of the encoder, and of the decoder
    decoder_layers: Layers | None = None  # None: `layers`
    embedding: Size | None = None  # width of the embeddings if not `width`: a projection follows
    vectors: str | None = None  # a file of word vectors to initialise the embeddings; of two vocabularies, the source's
    target_vectors: str | None = None  # the same for the target's own vocabulary
    channels: Channels = "nonstatic"  # static: vectors are not trained
    ffn_width: Size = 2048  # the width inside the feed-forward layers
    activation: Activation = "relu"  # of the feed-forward layers
    norm: Literal["pre", "post"] = "post"  # layer norm before or after each sub-layer
    dropout: float = Field(0.1, ge=0, lt=1)  # on embeddings and sub-layers
    positions: Literal["sinusoidal", "halves", "learned"] = "sinusoidal"  # halves: all sines, then all cosines
    max_positions: Positions = 1024  # number of learned positions
    tie: bool = True  # one matrix for the target's embeddings and the output (Press & Wolf 2017)
    bias: bool = False  # of the output projection: how frequent each word is
    copying: bool = False  # write tokens of the source, too (See et al. 2017); source and target have one vocabulary
    pruned_heads: PrunedHeads = Field({})  # heads left out: {3: [1, 5]}, or {cross.3: [1, 5]}

    @property
    def position_limit(self) -> int | None:
        """The learned positions; None: sinusoidal ones have no end."""
        return self.max_positions if self.positions == "learned" else None

    @model_validator(mode="after")
    def _check(self) -> "TransformerConfig":
        check_heads(self.width, self.heads)
        check_channels(self.channels, self.vectors, self.target_vectors)
        if self.tie and self.embedding not in (None, self.width):
            raise ValueError(
                f"model.tie makes the embeddings the output's weights, which are as wide as the states: got "
                f"model.embedding {self.embedding} and model.width {self.width}; set model.tie: false, or them equal"
            )
        decoder = self.decoder_layers or self.layers
        check_pruned_heads(
            self.pruned_heads, self.heads, {"encoder": self.layers, "decoder": decoder, "cross": decoder}
        )
        return self


@dataclass(frozen=True)
class TransformerState:
    """The decoding state: key-value cache of the hypotheses, and the sources' keys and values, stored once each."""

    cache: KVCache
    source_index: KVIndex  # which of the sources' keys and values each hypothesis attends to
    source_kv: tuple[Tensor, ...]  # for each layer the keys and values of all sources, (M, 2, H, d)
    source_filled: int | None = None  # of M, those in use, where there is room for sources that join; None: all
    copying: CopyState | None = None  # of a model that copies

    def select(self, rows: Tensor) -> "TransformerState":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]; only indices are copied."""
        copying = None if self.copying is None else self.copying.select(rows)
        return replace(
            self, cache=self.cache.select(rows), source_index=self.source_index.select(rows), copying=copying
        )

    def join(self, other: "TransformerState") -> "TransformerState":
        """Return the state of these hypotheses and, after them, the other's: a pool, which is updated in place."""
        own = PooledSources(self.source_kv, self.source_index, self.source_filled or len(self.source_kv[0]))
        sources = own.join(PooledSources.of(other.source_kv, other.source_index))
        copying = None if self.copying is None or other.copying is None else self.copying.join(other.copying)
        return TransformerState(self.cache.join(other.cache), sources.index, sources.layers, sources.filled, copying)


@dataclass(frozen=True)
class StaticTransformerState(TransformerState):
    """A decoding state at fixed addresses, for CUDA graphs (weft.models.base.StaticState)."""

    cache: StaticKVCache

    @property
    def capacity(self) -> int:
        """The capacity of a hypothesis in tokens."""
        return self.cache.capacity

    def select(self, rows: Tensor) -> "StaticTransformerState":
        """Return the state whose hypothesis b continues rows[b], of the same source: `source_index` stays."""
        return replace(self, cache=self.cache.select(rows))

    def copy_from(self, state: TransformerState, rows: Tensor) -> None:
        """Copy `state` in place: hypothesis b continues its hypothesis rows[b]."""
        self.cache.copy_from(state.cache, rows)
        for static, index in zip(self.source_index, state.source_index.select(rows), strict=True):
            static.copy_(index)
        for static, kv in zip(self.source_kv, state.source_kv, strict=True):
            static.copy_(kv)


@dataclass(frozen=True)
class TransformerPool(TransformerState):
    """The decoding states of a running batch at fixed addresses (weft.models.base.StatePool).

    A row has places of its own for its source's keys and values.
    """

    cache: StaticKVPool

    @property
    def active(self) -> Tensor:
        """(R,) int32: 1 where a hypothesis goes on."""
        return self.cache.active

    def first_rows(self, rows: int) -> "TransformerPool":
        """Return the pool of the first rows; the memory is the same."""
        index = KVIndex(*(tensor[:rows] for tensor in self.source_index))
        return replace(self, cache=self.cache.first_rows(rows), source_index=index)

    def put(
        self,
        rows: Sequence[int],
        state: TransformerState,
        hypotheses: Sequence[int],
        tokens: Sequence[int],
        source_tokens: Sequence[int],
    ) -> None:
        """Copy hypotheses of a state, with the keys and values of their sources, into rows."""
        self.cache.put(rows, state.cache, hypotheses, tokens)
        slots, _, last = self.source_index
        row, hypothesis, column = token_places(rows, hypotheses, source_tokens, slots.device)
        places, others = slots[row, column].long(), state.source_index
        sources = others.slots[hypothesis, column + others.first.long()[hypothesis]].long()
        for layer, other in zip(self.source_kv, state.source_kv, strict=True):
            layer[places] = other[sources].to(layer.dtype)
        number, size = to_device(torch.from_numpy(np.array([rows, source_tokens])), slots.device)
        last[number] = size.int()

    def copy_from(self, pool: "TransformerPool") -> None:
        """Copy the rows of a smaller pool into the first rows."""
        self.cache.copy_from(pool.cache)
        (rows, size), last = pool.source_index.slots.shape, pool.source_index.last
        self.source_index.last[:rows] = last
        for layer, other in zip(self.source_kv, pool.source_kv, strict=True):
            layer[self.source_index.slots[:rows, :size].long()] = other[pool.source_index.slots.long()]


class Transformer(Model):
    """Embeddings and positions, encoder, decoder, output projection."""

    Config: ClassVar[type[Named]] = TransformerConfig
    supports_compile = True
    supports_low_precision: ClassVar[bool] = True
    # Embeddings are multiplied by √D and added to positions: vectors with a larger std would drown these.
    keeps_embedding_std: ClassVar[bool] = True
    config: TransformerConfig

    def __init__(self, config: TransformerConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        check_copying(config.copying, target_vocab)
        self.width = width = config.width
        shared = target_vocab is None
        size = config.embedding or width
        self.embed = nn.Embedding(vocab, size)
        self.target_embed = self.embed if target_vocab is None else nn.Embedding(target_vocab, size)
        self.project = nn.Linear(size, width, bias=False) if size != width else None
        self.target_project = nn.Linear(size, width, bias=False) if size != width and not shared else self.project
        self.positions = self._make_positions(config)
        self.dropout = nn.Dropout(config.dropout)
        block = BlockConfig(
            width, config.heads, config.ffn_width, config.activation, config.norm, config.dropout, config.pruned_heads
        )
        self.encoder = Blocks(block, config.layers, "encoder")
        self.decoder = Blocks(block, config.decoder_layers or config.layers, "decoder", causal=True, cross=True)
        self.output = OutputProjection(width, self.target_vocab, bias=config.bias)
        if config.bias:
            nn.init.zeros_(self.output.bias)
        self.copy_attention = CopyAttention(width) if config.copying else None
        if config.copying:
            self.supports_compile = self.supports_capture = False
        if config.tie:
            self.output.weight = self.target_embed.weight
        # Each once, in this order: the order of a set of tensors would differ from run to run.
        for weight in dict.fromkeys((self.embed.weight, self.target_embed.weight, self.output.weight)):
            nn.init.normal_(weight, std=width**-0.5)
        for project in dict.fromkeys((self.project, self.target_project)):
            if project is not None:
                nn.init.normal_(project.weight, std=size**-0.5)  # P E y has the variance of E y
        if config.channels == "static" and config.vectors:
            keep_static(self.embed, tied=config.tie and shared)
        if config.channels == "static" and config.target_vectors:
            keep_static(self.target_embed, tied=config.tie)
        self._attentions = tuple(module for module in self.modules() if isinstance(module, MultiHeadAttention))

    @staticmethod
    def _make_positions(config: TransformerConfig) -> Sinusoidal | Learned:
        if config.positions == "learned":
            return Learned(config.max_positions, config.width)
        return Sinusoidal(config.width, halves=config.positions == "halves")

    def word_embeddings(self) -> dict[str, list[nn.Embedding]]:
        """Return the source's table, which with one vocabulary is the target's too, and the target's own."""
        target = getattr(self, "target_embed", self.embed)  # an encoder alone has none
        return {"vectors": [self.embed], **({} if target is self.embed else {"target_vectors": [target]})}

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Return its roles: a sequence-to-sequence language model that generates; its encoder alone encodes."""
        return frozenset({Role.ENCODER, Role.SEQ2SEQ, Role.LANGUAGE_MODEL, Role.GENERATOR})

    @property
    def mixable_layers(self) -> tuple[int, ...]:
        """All layers of the encoder, with the embeddings."""
        return tuple(range(self.config.layers + 1))

    def prune_unused(self, needs: Collection[Role]) -> None:
        """Drop the decoder, unless a role reads or writes a target: what is left is the encoder of a translator."""
        if {Role.SEQ2SEQ, Role.LANGUAGE_MODEL, Role.GENERATOR} & set(needs):
            return
        for part in {"decoder", "output", "target_embed", "target_project"} & {*vars(self), *self._modules}:
            delattr(self, part)
        self._attentions = tuple(module for module in self.modules() if isinstance(module, MultiHeadAttention))

    def layer_groups(self) -> list[list[nn.Module]]:
        """Return the embeddings, then each layer of the encoder, then each of the decoder, where there is one."""
        names = "embed", "target_embed", "project", "target_project", "positions", "dropout"
        embeddings: list[nn.Module] = [part for name in names if (part := getattr(self, name, None)) is not None]
        decoder = self.decoder.layer_groups() if hasattr(self, "decoder") else []
        return [embeddings, *self.encoder.layer_groups(), *decoder]

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the chosen layers of the encoder for these sources, (L, N, D); 0 is the embeddings, -1 the last."""
        depth = self.config.layers
        if not all(-depth - 1 <= layer <= depth for layer in layers):
            raise ConfigError(
                f"layers: the encoder of this transformer has 0, the embeddings, to {depth}, but {list(layers)} is "
                "asked for"
            )
        states = self._encoder_states(tokens)
        return torch.stack([states[layer] for layer in layers])

    def pooled_output(self, tokens: Tokens) -> Tensor:
        """Return the mean of the encoder's last layer over each source, (B, D)."""
        return pool_tokens(self._encoder_states(tokens)[-1], tokens, "mean")

    def logits(self, tokens: Tokens, source: Tokens, at: Tensor | None = None) -> Tensor:
        """Return the logits of the next tokens, given the source: (N, V), or (len(at), V) at positions `at`."""
        encoder_states, decoder_states = self.states(tokens, source)
        hidden = decoder_states[-1]
        logits: Tensor = self.output(hidden if at is None else hidden[at])
        if self.copy_attention is None:
            return logits
        memory, grid = self.copy_attention.remember(encoder_states[-1], source), TimeMajor(tokens)
        read = self.copy_attention(
            *(grid.pad(states).transpose(0, 1) for states in (hidden, decoder_states[0])), memory
        )
        gate, weights, ids = *(grid.unpad(part.transpose(0, 1)) for part in read), memory.ids[grid.row]
        if at is not None:
            gate, weights, ids = gate[at], weights[at], ids[at]
        return mix_log_probs(logits, gate, weights, ids)

    def states(self, tokens: Tokens, source: Tokens) -> tuple[list[Tensor], list[Tensor]]:
        """Return the hidden states of the encoder and of the decoder: the embeddings, then each layer's output."""
        encoder_states = self._encoder_states(source)
        layouts = self._layouts(tokens, encoder_states[-1], source)
        return encoder_states, self.decoder(self._embed_target(tokens), *layouts)

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, TransformerState]:
        """Encode the sources; return the logits (B, V) of the token after each prompt, and the decoding state."""
        return self.step(prompt.ids[prompt.starts[1:].long() - 1], self.prefill(prompt, source))

    def prefill(self, prompt: Tokens, source: Tokens | None = None) -> TransformerState:
        """Encode the sources; return the state after all prompt tokens but the last."""
        assert source is not None
        memory, prefix = self._encoder_states(source)[-1], without_last_tokens(prompt)
        kv = [memory.new_zeros(0, 2, *shape) for shape in self.decoder.shapes] if not len(prefix.ids) else []
        if len(prefix.ids):
            layout, _, cross = self._layouts(prefix, memory, source)
            self.decoder(self._embed_target(prefix), layout, memory, cross, kv)
        source_kv = tuple(layer.detach() for layer in self.decoder.remember(memory))
        copying = None
        if self.copy_attention is not None:
            owner = torch.arange(len(source), device=source.device)
            copying = CopyState(self.copy_attention.remember(memory, source), owner)
        return TransformerState(KVCache.of(prefix, kv), KVIndex.of(source), source_kv, copying=copying)

    def make_static(self, state: TransformerState, rows: int, capacity: int) -> "StaticTransformerState":
        """Return a state at fixed addresses for `rows` hypotheses of up to `capacity` tokens."""
        if isinstance(self.positions, Learned):
            check_position(
                int(state.cache.at) + 1, self.config.max_positions
            )  # `end` of a static cache is its capacity
            capacity = min(capacity, self.config.max_positions)
        index = KVIndex(*(tensor.new_zeros(rows, *tensor.shape[1:]) for tensor in state.source_index))
        source_kv = tuple(torch.zeros_like(kv) for kv in state.source_kv)
        return StaticTransformerState(StaticKVCache.like(state.cache, rows, capacity), index, source_kv)

    def make_pool(self, rows: int, tokens: int, source_tokens: int) -> TransformerPool:
        """Return the empty states of a running batch, at fixed addresses."""
        like, shapes = self.target_embed.weight.detach(), self.decoder.shapes
        slots = torch.arange(rows * source_tokens, dtype=torch.int32, device=like.device).view(rows, source_tokens)
        index = KVIndex(slots, torch.zeros_like(slots[:, 0]), torch.ones_like(slots[:, 0]))
        source_kv = tuple(like.new_zeros(rows * source_tokens, 2, *shape) for shape in self.decoder.cross_shapes)
        return TransformerPool(StaticKVPool.make(shapes, rows, tokens, like), index, source_kv)

    @property
    def prefill_capturable(self) -> bool:
        """Return whether the encoder can be captured: in half precision on CUDA it never reads lengths on the host."""
        return dispatch.is_half(self.embed.weight) and not self.training

    @property
    def max_positions(self) -> int | None:
        """The number of learned positions; None with sinusoidal ones."""
        return self.config.position_limit

    def step(self, ids: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        """Append one token to each hypothesis, ids (B,); return the logits (B, V) of the next one, and the state."""
        cache = state.cache.opened()
        if isinstance(self.positions, Learned):
            check_position(cache.end, self.config.max_positions)
        inputs, copying = self._embed_next(ids, cache), state.copying
        hidden = self.decoder.step(inputs, cache, state.source_kv, state.source_index)
        logits = self.output(hidden)
        if self.copy_attention is not None and copying is not None:
            memory = copying.memory.rows(copying.owner)
            gate, weights = self.copy_attention(hidden[:, None], inputs[:, None], memory)
            logits = mix_log_probs(logits, gate[:, 0], weights[:, 0], memory.ids)
        return logits, replace(state, cache=cache)

    def flops(self, tokens: Tokens, source: Tokens | None = None) -> int:
        """Return the FLOPs: each matrix for the tokens of its side, and 4 D for each query-key pair of an attention.

        Without a source the tokens are the source, and only the encoder reads them.
        """
        project = 0 if self.project is None else num_matrix_parameters(self.project)
        if source is None:
            heads = sum(len(layer.kept) * layer.size for layer in self._attentions if layer.place == "encoder")
            per_token = num_matrix_parameters(self.encoder) + project
            return 2 * per_token * int(tokens.lengths.sum()) + 4 * heads * int(tokens.lengths.square().sum())
        targets, sources = tokens.lengths, source.lengths
        pairs = {"encoder": sources * sources, "decoder": targets * (targets + 1) // 2, "cross": targets * sources}
        kv_size = sum(num_matrix_parameters(layer.kv_proj) for layer in self._attentions if layer.kv_proj is not None)
        per_source = num_matrix_parameters(self.encoder) + kv_size + project
        per_target = num_matrix_parameters(self.decoder) - kv_size + num_matrix_parameters(self.output) + project
        attentions = [(len(layer.kept) * layer.size, pairs[layer.place]) for layer in self._attentions]
        if self.copy_attention is not None:
            per_source += num_matrix_parameters(self.copy_attention.key)
            per_target += num_matrix_parameters(self.copy_attention) - num_matrix_parameters(self.copy_attention.key)
            attentions.append((self.config.width, pairs["cross"]))
        products = 2 * (per_source * int(sources.sum()) + per_target * int(targets.sum()))
        return products + sum(4 * width * int(count.sum()) for width, count in attentions)

    def _encoder_states(self, source: Tokens) -> list[Tensor]:
        states: list[Tensor] = self.encoder(self._embed_source(source), AttentionLayout.self_attention(source))
        return states

    def _layouts(
        self, tokens: Tokens, memory: Tensor, source: Tokens
    ) -> tuple[AttentionLayout, Tensor, AttentionLayout]:
        return AttentionLayout.self_attention(tokens), memory, AttentionLayout(tokens, source)

    def _embed_source(self, tokens: Tokens) -> Tensor:
        return self._with_positions(_projected(self.embed(tokens.ids), self.project), tokens)

    def _embed_target(self, tokens: Tokens) -> Tensor:
        return self._with_positions(_projected(self.target_embed(tokens.ids), self.target_project), tokens)

    def _with_positions(self, embedded: Tensor, tokens: Tokens) -> Tensor:
        self.positions.check(tokens)
        return self._add_positions(embedded, self.positions(positions_of(tokens), tokens.longest))

    def _embed_next(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Return the embeddings (B, D) of one token a hypothesis, at the cache's last position."""
        table = self.target_embed.weight
        embed_next = dispatch.next_embedding_kernel(table, self.training)
        if embed_next and self.target_project is None:
            positions = self.positions.vectors(cache.storage.capacity, table.device)
            embedded: Tensor = embed_next(ids, table, positions, cache, self.config.width**0.5)
            return embedded
        embedded = _projected(self.target_embed(ids), self.target_project)
        return self._add_positions(embedded, self.positions(cache.position))

    def _add_positions(self, embedded: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.dropout(embedded * self.config.width**0.5 + positions.to(embedded.dtype))
        return x


def _projected(embedded: Tensor, project: nn.Module | None) -> Tensor:
    return embedded if project is None else project(embedded)
