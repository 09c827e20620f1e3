"""The Transformer (Vaswani et al. 2017): an encoder-decoder of attention and feed-forward layers alone.

    x_0 = Dropout(√D · E y + PE)                              embeddings and positions (sections 3.4, 3.5 and 5.4)
    encoder    each token looks at all of its source          MultiHead(x, x, x), then FFN             (section 3.1)
    decoder    each token looks at those before it, then at the encoder's last layer, then FFN
    p(y_t | y_<t, x) = softmax(E x_L)                         E is shared with the embeddings (section 3.4)

One vocabulary for both sides shares one E among source, target and output; two vocabularies share the target's alone.

Departures: positions may be learned, or have their sines before their cosines (`positions: halves`), and the output may
have a bias, as in Marian (Junczys-Dowmunt et al. 2018); the norm may stand before each layer (`norm: pre`). Weights
start as in the authors' code: Xavier's uniform for matrices, N(0, 1/D) for embeddings, nought for biases.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from weft.config.schema import Named, Pretrained
from weft.models.attention_config import HeadsOff, check_heads, check_off
from weft.models.base import Model, Role, matrix_numbers
from weft.nn.attention.kv_cache import KVCache, KVIndex, StaticKVCache, but_last, on_triton
from weft.nn.attention.multihead import AttentionLayout, MultiHeadAttention
from weft.nn.attention.positions import Learned, Sinusoidal, check_position, positions_of
from weft.nn.rnn.fused.codegen_triton import in_half
from weft.nn.transformer.blocks import Activation, BlockConfig, Blocks
from weft.nn.transformer.output import OutputProjection
from weft.tokens import Tokens


class TransformerConfig(Pretrained):
    """`layers` are the encoder's, and the decoder's where `decoder_layers` says nothing else.

    `heads_off` leaves heads out: {3: [1, 5]} in layer 3 wherever it attends, {cross.3: [1, 5]} at one place alone.
    """

    width: int = Field(512, ge=1)
    heads: int = Field(8, ge=1)
    layers: int = Field(6, ge=1)
    decoder_layers: int | None = Field(None, ge=1)
    hidden: int = Field(2048, ge=1)  # the width inside the feed-forward layers
    activation: Activation = "relu"
    norm: Literal["pre", "post"] = "post"
    dropout: float = Field(0.1, ge=0, lt=1)
    positions: Literal["sinusoidal", "halves", "learned"] = "sinusoidal"  # halves: all sines, then all cosines
    longest: int = Field(1024, ge=1)  # how many positions are learned
    tie: bool = True  # one matrix for the target's embeddings and the output (Press & Wolf 2017)
    bias: bool = False  # whether the output has one: how frequent each word is
    heads_off: HeadsOff = Field({})

    @model_validator(mode="after")
    def _fits(self) -> "TransformerConfig":
        check_heads(self.width, self.heads)
        after = self.decoder_layers or self.layers
        check_off(self.heads_off, self.heads, {"encoder": self.layers, "decoder": after, "cross": after})
        return self


@dataclass(frozen=True)
class Reading:
    """The state of generation: what each hypothesis has read, and what it reaches of the sources, held once."""

    cache: KVCache
    reach: KVIndex
    sources: tuple[Tensor, ...]  # a layer's keys and values of all sources, (M, 2, H, d)

    def select(self, rows: Tensor) -> "Reading":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]; nothing but indices is copied."""
        return replace(self, cache=self.cache.select(rows), reach=self.reach.select(rows))


@dataclass(frozen=True)
class FixedReading(Reading):
    """A reading that stays where it is in memory (weft.models.base.FixedState)."""

    cache: StaticKVCache

    @property
    def room(self) -> int:
        """How many tokens of a hypothesis it holds."""
        return self.cache.room

    def select(self, rows: Tensor) -> "FixedReading":
        """Let hypothesis b continue rows[b], of the same source: what it sees of that stays."""
        return replace(self, cache=self.cache.select(rows))

    def take(self, state: Reading, rows: Tensor) -> None:
        """Become the reading whose hypothesis b continues hypothesis rows[b] of the other."""
        self.cache.take(state.cache, rows)
        for mine, theirs in zip(self.reach, state.reach.select(rows), strict=True):
            mine.copy_(theirs)
        for mine, theirs in zip(self.sources, state.sources, strict=True):
            mine.copy_(theirs)


class Transformer(Model):
    """Embeddings and positions, encoder, decoder."""

    Config: ClassVar[type[Named]] = TransformerConfig
    supports_compile: ClassVar[bool] = True
    supports_low_precision: ClassVar[bool] = True
    config: TransformerConfig

    def __init__(self, config: TransformerConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        width = config.width
        self.embed = nn.Embedding(vocab, width)
        self.target_embed = self.embed if target_vocab is None else nn.Embedding(target_vocab, width)
        self.positions = self._positions(config)
        self.dropout = nn.Dropout(config.dropout)
        shape = BlockConfig(
            width, config.heads, config.hidden, config.activation, config.norm, config.dropout, config.heads_off
        )
        self.encoder = Blocks(shape, config.layers, "encoder")
        self.decoder = Blocks(shape, config.decoder_layers or config.layers, "decoder", causal=True, cross=True)
        self.output = OutputProjection(width, self.target_vocab, bias=config.bias)
        if config.bias:
            nn.init.zeros_(self.output.bias)
        if config.tie:
            self.output.weight = self.target_embed.weight
        # In this order, each once: of a set of tensors, the order would differ from run to run.
        for matrix in dict.fromkeys((self.embed.weight, self.target_embed.weight, self.output.weight)):
            nn.init.normal_(matrix, std=width**-0.5)
        self._looks = tuple(part for part in self.modules() if isinstance(part, MultiHeadAttention))

    @staticmethod
    def _positions(config: TransformerConfig) -> Sinusoidal | Learned:
        if config.positions == "learned":
            return Learned(config.longest, config.width)
        return Sinusoidal(config.width, halves=config.positions == "halves")

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Say what it can do: score and generate, given a source."""
        return frozenset({Role.SEQ2SEQ, Role.LANGUAGE_MODEL, Role.GENERATOR})

    def layer_groups(self) -> list[list[nn.Module]]:
        """The embeddings, then each layer of the encoder, then each of the decoder."""
        below: list[nn.Module] = [self.embed, self.target_embed, self.positions, self.dropout]
        return [below, *self.encoder.layer_groups(), *self.decoder.layer_groups()]

    def logits(self, tokens: Tokens, source: Tokens, at: Tensor | None = None) -> Tensor:
        """Score what follows each token, given the source: (N, V), or (len(at), V) at the flat positions `at`."""
        last = self.states(tokens, source)[1][-1]
        scores: Tensor = self.output(last if at is None else last[at])
        return scores

    def states(self, tokens: Tokens, source: Tokens) -> tuple[list[Tensor], list[Tensor]]:
        """Return what goes into the first layer and what comes out of each, of the encoder and of the decoder."""
        inside: list[Tensor] = self.encoder(self._embedded(source, self.embed), AttentionLayout.itself(source))
        layouts = self._layouts(tokens, inside[-1], source)
        return inside, self.decoder(self._embedded(tokens, self.target_embed), *layouts)

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, Reading]:
        """Encode the source and read the prompts; return the logits (B, V) of what follows, and the state."""
        return self.step(prompt.ids[prompt.starts[1:].long() - 1], self.prime(prompt, source))

    def prime(self, prompt: Tokens, source: Tokens | None = None) -> Reading:
        """Encode the source and read the prompts up to their last tokens."""
        assert source is not None
        memory, before = self._encoded(source), but_last(prompt)
        keep = [memory.new_zeros(0, 2, *shape) for shape in self.decoder.shapes] if not len(before.ids) else []
        if len(before.ids):
            layout, _, across = self._layouts(before, memory, source)
            self.decoder(self._embedded(before, self.target_embed), layout, memory, across, keep)
        sources = tuple(one.detach() for one in self.decoder.remember(memory))
        return Reading(KVCache.of(before, keep), KVIndex.of(source), sources)

    def fixed(self, state: Reading, rows: int, room: int) -> "FixedReading":
        """Make a state that stays where it is, for so many hypotheses of so many tokens."""
        if isinstance(self.positions, Learned):
            check_position(int(state.cache.at) + 1, self.config.longest)  # `end` of a fixed one is its room
            room = min(room, self.config.longest)
        reach = KVIndex(*(one.new_zeros(rows, *one.shape[1:]) for one in state.reach))
        sources = tuple(torch.zeros_like(one) for one in state.sources)
        return FixedReading(StaticKVCache.like(state.cache, rows, room), reach, sources)

    @property
    def steady(self) -> bool:
        """Whether what reads the sources never asks how long they are, as in half precision on CUDA."""
        return in_half(self.embed.weight) and not self.training

    @property
    def reads(self) -> int | None:
        """How many positions were learned."""
        return self.config.longest if isinstance(self.positions, Learned) else None

    def step(self, ids: Tensor, state: Reading) -> tuple[Tensor, Reading]:
        """Read one more token a hypothesis."""
        cache = state.cache.opened()
        if isinstance(self.positions, Learned):
            check_position(cache.end, self.config.longest)
        states = self.decoder.step(self._next(ids, cache), cache, state.sources, state.reach)
        return self.output(states), replace(state, cache=cache)

    def flops(self, tokens: Tokens, source: Tokens | None = None) -> int:
        """Count the matrices by the tokens that meet them, and 4 D for each pair of tokens of which one may see one."""
        assert source is not None
        read, given = tokens.lengths, source.lengths
        pairs = {"encoder": given * given, "decoder": read * (read + 1) // 2, "cross": read * given}
        looks = self._looks
        memory = sum(matrix_numbers(look.kv_proj) for look in looks if look.kv_proj is not None)
        per_source = matrix_numbers(self.encoder) + memory
        per_target = matrix_numbers(self.decoder) - memory + matrix_numbers(self.output)
        met = 2 * (per_source * int(given.sum()) + per_target * int(read.sum()))
        return met + sum(4 * len(look.kept) * look.size * int(pairs[look.place].sum()) for look in looks)

    def _encoded(self, source: Tokens) -> Tensor:
        memory: Tensor = self.encoder(self._embedded(source, self.embed), AttentionLayout.itself(source))[-1]
        return memory

    def _layouts(
        self, tokens: Tokens, memory: Tensor, source: Tokens
    ) -> tuple[AttentionLayout, Tensor, AttentionLayout]:
        return AttentionLayout.itself(tokens), memory, AttentionLayout(tokens, source)

    def _embedded(self, tokens: Tokens, table: nn.Embedding) -> Tensor:
        self.positions.check(tokens)
        return self._placed(table(tokens.ids), self.positions(positions_of(tokens), tokens.longest))

    def _next(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Embed one token a hypothesis, which stands in the cache's last column."""
        words = self.target_embed.weight
        if on_triton(words) and not self.training:
            from weft.nn.kernels.triton.decode_step import placed

            places = self.positions.vectors(cache.log.room, words.device)
            return placed(ids, words, places, cache, self.config.width**0.5)
        return self._placed(self.target_embed(ids), self.positions(cache.position))

    def _placed(self, embedded: Tensor, places: Tensor) -> Tensor:
        x = embedded * self.config.width**0.5 + places.to(embedded.dtype)
        found: Tensor = self.dropout(x)
        return found
