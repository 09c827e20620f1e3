"""GPT: a decoder-only Transformer language model, left to right.

    h_0 = Dropout(E u + P)                                    token and position embeddings (Radford et al. 2018, eq. 2)
    h_l = block(h_{l-1})                                      causal self-attention, then FFN with GELU
    p(u_t | u_<t) = softmax(E h_L)                            E is shared with the embeddings

`norm: post` is GPT (Radford et al. 2018, section 4.1). `norm: pre` is GPT-2 (Radford et al. 2019, section 2.3): layer
norm comes before each sub-layer and once more after the last layer, and the output projections of the residual
branches, two a layer, are initialised smaller by 1/√(2L). All other matrices are initialised from N(0, 0.02), biases
with zero.

Departures: no dropout on attention weights (`weft.nn.attention.multihead` says why), where both papers' code has it.
GPT-2's code initialises positions from N(0, 0.01); its papers do not say.
"""

from collections.abc import Collection, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from weft.config.schema import Named, Positions
from weft.errors import RoleError
from weft.models.base import LMDirection, Model, Role
from weft.models.transformer_config import StackConfig
from weft.nn.attention.kv_cache import KVCache, StaticKVCache, without_last_tokens
from weft.nn.attention.multihead import AttentionLayout, MultiHeadAttention
from weft.nn.attention.positions import Learned, check_position, positions_of
from weft.nn.attention.static_kv_pool import StaticKVPool
from weft.nn.kernels import dispatch
from weft.nn.layers.activations import Activation
from weft.nn.layers.losses import read_out_sum
from weft.nn.transformer.blocks import INIT_STD, Block, BlockConfig, Blocks, init_normal_
from weft.nn.transformer.output_projection import OutputProjection
from weft.tokens import Tokens


class GPTConfig(StackConfig):
    """The sizes of GPT-2 by default."""

    place: ClassVar[str] = "decoder"

    activation: Activation = "gelu-tanh"  # of the feed-forward layers
    norm: Literal["pre", "post"] = "pre"  # layer norm before or after each sub-layer
    max_positions: Positions = 1024  # number of learned positions

    @property
    def position_limit(self) -> int:
        """The learned positions."""
        return self.max_positions


class GPT(Model):
    """Embeddings and positions, blocks, and, as a language model, the output. Its state is the key-value cache."""

    Config: ClassVar[type[Named]] = GPTConfig
    supports_compile = True
    supports_low_precision: ClassVar[bool] = True
    config: GPTConfig
    output: OutputProjection | None

    def __init__(self, config: GPTConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        self.width = width = config.width
        self.embed = nn.Embedding(vocab, width)
        self.positions = Learned(config.max_positions, width)
        self.dropout = nn.Dropout(config.dropout)
        assert config.ffn_width is not None
        block = BlockConfig(
            width, config.heads, config.ffn_width, config.activation, config.norm, config.dropout, config.pruned_heads
        )
        self.decoder = Blocks(block, config.layers, "decoder", causal=True)
        self.output = OutputProjection(width, vocab)
        init_normal_(self)
        if config.norm == "pre":
            self._scale_residual_weights()
        if config.tie:
            self.output.weight = self.embed.weight
        self._attentions = tuple(module for module in self.modules() if isinstance(module, MultiHeadAttention))

    def _scale_residual_weights(self) -> None:
        """Scale the weights of each residual branch at initialization by 1/sqrt(their number) (GPT-2, section 2.3)."""
        for block in self.decoder.blocks:
            assert isinstance(block, Block)
            for part in (block.attention.out_proj, block.feed_forward.fc2):
                nn.init.normal_(part.weight, std=INIT_STD / (2 * self.config.layers) ** 0.5)

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Return its roles: encoder, language model, generator."""
        return frozenset({Role.ENCODER, Role.LANGUAGE_MODEL, Role.GENERATOR})

    @property
    def mixable_layers(self) -> tuple[int, ...]:
        """All layers, with the embeddings."""
        return tuple(range(self.config.layers + 1))

    def layer_groups(self) -> list[list[nn.Module]]:
        """Return the embeddings, then each layer; the final layer norm goes with the last."""
        embeddings: list[nn.Module] = [self.embed, self.positions, self.dropout]
        return [embeddings, *self.decoder.layer_groups()]

    def prune_unused(self, needs: Collection[Role]) -> None:
        """Drop the output projection unless a role needs logits."""
        if not {Role.LANGUAGE_MODEL, Role.GENERATOR} & set(needs):
            self.output = None

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the outputs of the chosen layers, (L, N, D); 0 is the embeddings, -1 the last layer, normalised."""
        self.config.check_layers(layers)
        states = self._hidden_states(tokens)
        return torch.stack([states[layer] for layer in layers])

    def pooled_output(self, tokens: Tokens) -> Tensor:
        """Return one vector a sequence, (B, D): the hidden state of its last token, which attends to all."""
        return self._hidden_states(tokens)[-1][_last_positions(tokens)]

    def logits(self, tokens: Tokens, at: Tensor | None = None, direction: LMDirection = "forward") -> Tensor:
        """Return the logits of the token after each: (N, V), or (len(at), V) at the flat positions `at`."""
        if direction != "forward":
            raise RoleError(f"model: a gpt reads forward, but {direction!r} is asked for")
        hidden = self._hidden_states(tokens)[-1]
        return self._project(hidden if at is None else hidden[at])

    def loss_each(self, tokens: Tokens, targets: Sequence[Tensor], directions: Sequence[LMDirection]) -> list[Tensor]:
        """Return the summed cross-entropy of the next tokens, fused with the output projection."""
        if tuple(directions) != ("forward",):
            return super().loss_each(tokens, targets, directions)
        assert self.output is not None
        return [read_out_sum(self.output, self._hidden_states(tokens)[-1], targets[0])]

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, KVCache]:
        """Return the logits (B, V) of the token after each prompt, and the key-value cache."""
        return self.step(prompt.ids[_last_positions(prompt)], self.prefill(prompt))

    def prefill(self, prompt: Tokens, source: Tokens | None = None) -> KVCache:
        """Return the key-value cache of all prompt tokens but the last."""
        prefix = without_last_tokens(prompt)
        if not len(prefix.ids):
            weight = self.embed.weight.detach()
            return KVCache.of(prefix, [weight.new_zeros(0, 2, *shape) for shape in self.decoder.shapes])
        kv: list[Tensor] = []
        self._hidden_states(prefix, kv)
        return KVCache.of(prefix, kv)

    def make_static(self, state: KVCache, rows: int, capacity: int) -> StaticKVCache:
        """Return a cache at fixed addresses for `rows` hypotheses of up to `capacity` tokens."""
        check_position(int(state.at) + 1, self.config.max_positions)  # `end` of a static cache is its capacity
        return StaticKVCache.like(state, rows, min(capacity, self.config.max_positions))

    def make_pool(self, rows: int, tokens: int, source_tokens: int = 0) -> StaticKVPool:
        """Return the empty cache of a running batch, at fixed addresses."""
        return StaticKVPool.make(self.decoder.shapes, rows, tokens, self.embed.weight.detach())

    @property
    def prefill_capturable(self) -> bool:
        """Return True: `prefill` of one-token prompts launches nothing."""
        return True

    @property
    def max_positions(self) -> int:
        """The number of learned positions."""
        return self.config.max_positions

    def step(self, ids: Tensor, state: KVCache) -> tuple[Tensor, KVCache]:
        """Append one token to each hypothesis, ids (B,); return the logits (B, V) of the next one, and the cache."""
        cache = state.opened()
        check_position(cache.end, self.config.max_positions)
        return self._project(self.decoder.step(self._embed_next(ids, cache), cache)), cache

    def flops(self, tokens: Tokens, source: Tokens | None = None) -> int:
        """Return the FLOPs: each matrix for each token, and 4 D for each query-key pair of the causal attention."""
        pairs = int((tokens.lengths * (tokens.lengths + 1)).sum()) // 2
        return super().flops(tokens) + 4 * pairs * sum(len(layer.kept) * layer.size for layer in self._attentions)

    def _hidden_states(self, tokens: Tokens, kv: list[Tensor] | None = None) -> list[Tensor]:
        """Return the embeddings and each block's output, (N, D) each; append each layer's keys and values to `kv`."""
        self.positions.check(tokens)
        x = self.dropout(self.embed(tokens.ids) + self.positions(positions_of(tokens)))
        states: list[Tensor] = self.decoder(x, AttentionLayout.self_attention(tokens), keep=kv)
        return states

    def _embed_next(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Return the embeddings (B, D) of one token a hypothesis, at the cache's last position."""
        table = self.embed.weight
        if embed_next := dispatch.next_embedding_kernel(table, self.training):
            embedded: Tensor = embed_next(ids, table, self.positions.table.weight, cache, 1.0)
            return embedded
        x: Tensor = self.dropout(self.embed(ids) + self.positions(cache.position))
        return x

    def _project(self, hidden: Tensor) -> Tensor:
        assert self.output is not None
        logits: Tensor = self.output(hidden)
        return logits


def _last_positions(tokens: Tokens) -> Tensor:
    """Return the flat position of each sequence's last token, (B,)."""
    return tokens.starts[1:].long() - 1
