"""GPT: a Transformer's decoder alone, which reads a text from left to right and says what comes next.

    h_0 = Dropout(E u + P)                                    words and learned positions (Radford et al. 2018, eq. 2)
    h_l = block(h_{l-1})                                      causal self-attention, then FFN with GELU
    p(u_t | u_<t) = softmax(E h_L)                            E is shared with the embeddings

`norm: post` is GPT (Radford et al. 2018, section 4.1). `norm: pre` is GPT-2 (Radford et al. 2019, section 2.3): the
norm stands before each layer and once more after the last, and the matrices that add to the residual start smaller by
1/√(2L), for two of them a layer. All other matrices start from N(0, 0.02), biases from nought.

Departures: no weights of attention are dropped out (`weft.nn.attention.multihead` says why), where both papers' code
drops them. GPT-2's code starts positions from N(0, 0.01); its papers do not say.
"""

from collections.abc import Collection, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from weft.config.schema import Named
from weft.errors import RoleError
from weft.models.attention_config import StackConfig
from weft.models.base import Direction, Model, Role
from weft.nn.attention.kv_cache import KVCache, StaticKVCache, but_last, on_triton
from weft.nn.attention.multihead import AttentionLayout, MultiHeadAttention
from weft.nn.attention.positions import Learned, check_position, positions_of
from weft.nn.layers.losses import read_out_sum
from weft.nn.transformer.blocks import Activation, Block, BlockConfig, Blocks
from weft.nn.transformer.output import OutputProjection
from weft.tokens import Tokens

_SPREAD = 0.02  # the standard deviation that weights start with


class GPTConfig(StackConfig):
    """The sizes of GPT-2 by default."""

    place: ClassVar[str] = "decoder"

    activation: Activation = "gelu-tanh"
    norm: Literal["pre", "post"] = "pre"
    longest: int = Field(1024, ge=1)  # how many positions are learned


class GPT(Model):
    """Embeddings and positions, blocks, and, where it scores, an output. Its state is the cache of keys and values."""

    Config: ClassVar[type[Named]] = GPTConfig
    supports_compile: ClassVar[bool] = True
    supports_low_precision: ClassVar[bool] = True
    config: GPTConfig
    output: OutputProjection | None

    def __init__(self, config: GPTConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        self.width = width = config.width
        self.embed = nn.Embedding(vocab, width)
        self.positions = Learned(config.longest, width)
        self.dropout = nn.Dropout(config.dropout)
        assert config.hidden is not None
        shape = BlockConfig(
            width, config.heads, config.hidden, config.activation, config.norm, config.dropout, config.heads_off
        )
        self.decoder = Blocks(shape, config.layers, "decoder", causal=True)
        self.output = OutputProjection(width, vocab)
        self._start_weights()
        if config.tie:
            self.output.weight = self.embed.weight
        self._looks = tuple(part for part in self.modules() if isinstance(part, MultiHeadAttention))

    def _start_weights(self) -> None:
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=_SPREAD)
        if self.config.norm == "pre":
            for block in self.decoder.blocks:
                assert isinstance(block, Block)
                for part in (block.attention.out_proj, block.feed_forward.fc2):
                    nn.init.normal_(part.weight, std=_SPREAD / (2 * self.config.layers) ** 0.5)

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Say what it can do: encode, score and generate."""
        return frozenset({Role.ENCODER, Role.LANGUAGE_MODEL, Role.GENERATOR})

    @property
    def mixable_layers(self) -> tuple[int, ...]:
        """Every layer, the embeddings too."""
        return tuple(range(self.config.layers + 1))

    def layer_groups(self) -> list[list[nn.Module]]:
        """The embeddings, then each layer; the norm at the end goes with the last."""
        below: list[nn.Module] = [self.embed, self.positions, self.dropout]
        return [below, *self.decoder.layer_groups()]

    def keep(self, needs: Collection[Role]) -> None:
        """Drop the output where nothing is scored."""
        if not {Role.LANGUAGE_MODEL, Role.GENERATOR} & set(needs):
            self.output = None

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the outputs of the chosen layers, (L, N, D); 0 is the embeddings, -1 the last layer, normed."""
        self.config.check_layers(layers)
        states = self._states(tokens)
        return torch.stack([states[layer] for layer in layers])

    def summary(self, tokens: Tokens) -> Tensor:
        """Return one vector a sequence, (B, D): the state of its last token, which alone has seen all of it."""
        return self._states(tokens)[-1][_last(tokens)]

    def logits(self, tokens: Tokens, at: Tensor | None = None, direction: Direction = "forward") -> Tensor:
        """Score what follows each token: (N, V), or (len(at), V) at the flat positions `at`."""
        if direction != "forward":
            raise RoleError(f"model: a gpt reads forward, but {direction!r} is asked for")
        states = self._states(tokens)[-1]
        return self._score(states if at is None else states[at])

    def loss_each(self, tokens: Tokens, targets: Sequence[Tensor], directions: Sequence[Direction]) -> list[Tensor]:
        """Sum the cross-entropy of what follows each token, without a copy of the logits."""
        if tuple(directions) != ("forward",):
            return super().loss_each(tokens, targets, directions)
        assert self.output is not None
        return [read_out_sum(self.output, self._states(tokens)[-1], targets[0])]

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, KVCache]:
        """Read the prompts; return the logits (B, V) of what follows, and the state."""
        return self.step(prompt.ids[_last(prompt)], self.prime(prompt))

    def prime(self, prompt: Tokens, source: Tokens | None = None) -> KVCache:
        """Read the prompts up to their last tokens."""
        before = but_last(prompt)
        if not len(before.ids):
            empty = self.embed.weight.detach()
            return KVCache.of(before, [empty.new_zeros(0, 2, *shape) for shape in self.decoder.shapes])
        keep: list[Tensor] = []
        self._states(before, keep)
        return KVCache.of(before, keep)

    def fixed(self, state: KVCache, rows: int, room: int) -> StaticKVCache:
        """Make a state that stays where it is, for so many hypotheses of so many tokens."""
        check_position(int(state.at) + 1, self.config.longest)  # `end` of a fixed one is its room
        return StaticKVCache.like(state, rows, min(room, self.config.longest))

    @property
    def steady(self) -> bool:
        """Whether reading prompts of one token is always the same work: there is nothing to read before the step."""
        return True

    @property
    def reads(self) -> int:
        """How many positions were learned."""
        return self.config.longest

    def step(self, ids: Tensor, state: KVCache) -> tuple[Tensor, KVCache]:
        """Read one more token a hypothesis."""
        cache = state.opened()
        check_position(cache.end, self.config.longest)
        return self._score(self.decoder.step(self._next(ids, cache), cache)), cache

    def flops(self, tokens: Tokens, source: Tokens | None = None) -> int:
        """Count the matrices for each token, and 4 D for each token and one that it may see."""
        pairs = int((tokens.lengths * (tokens.lengths + 1)).sum()) // 2
        return super().flops(tokens) + 4 * pairs * sum(len(look.kept) * look.size for look in self._looks)

    def _states(self, tokens: Tokens, keep: list[Tensor] | None = None) -> list[Tensor]:
        """Return the embeddings and what comes out of each block, (N, D) each."""
        self.positions.check(tokens)
        x = self.dropout(self.embed(tokens.ids) + self.positions(positions_of(tokens)))
        found: list[Tensor] = self.decoder(x, AttentionLayout.itself(tokens), keep=keep)
        return found

    def _next(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Embed one token a hypothesis, which stands in the cache's last column."""
        words = self.embed.weight
        if on_triton(words) and not self.training:
            from weft.nn.kernels.triton.decode_step import placed

            return placed(ids, words, self.positions.table.weight, cache, 1.0)
        x: Tensor = self.dropout(self.embed(ids) + self.positions(cache.position))
        return x

    def _score(self, states: Tensor) -> Tensor:
        assert self.output is not None
        scores: Tensor = self.output(states)
        return scores


def _last(tokens: Tokens) -> Tensor:
    """Return the flat position of each sequence's last token, (B,)."""
    return tokens.starts[1:].long() - 1
