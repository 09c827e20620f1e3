"""The Transformer (Vaswani et al. 2017): an encoder-decoder of attention and feed-forward layers alone.

    x_0 = Dropout(√D · E y + PE)                              embeddings and positions (sections 3.4, 3.5 and 5.4)
    encoder    each token looks at all of its source          MultiHead(x, x, x), then FFN             (section 3.1)
    decoder    each token looks at those before it, then at the encoder's last layer, then FFN
    p(y_t | y_<t, x) = softmax(E x_L)                         E is shared with the embeddings (section 3.4)

One vocabulary for both sides shares one E among source, target and output; two vocabularies share the target's alone.

Departures: positions may be learned; the norm may stand before each layer (`norm: pre`). Weights start as in the
authors' code: Xavier's uniform for matrices, N(0, 1/D) for embeddings, nought for biases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor, nn

from weft.config import Named
from weft.models.base import Model, Role
from weft.nn.attention import Layout
from weft.nn.cache import Cache, Reach
from weft.nn.positions import Learned, Sinusoidal, check_position, positions_of
from weft.nn.transformer import Activation, Blocks, Shape
from weft.tokens import Tokens

PLACES = ("encoder", "decoder", "cross")


def _worded(value: Any) -> Any:
    """A layer's number may be written without quotes."""
    return {str(key): heads for key, heads in value.items()} if isinstance(value, Mapping) else value


HeadsOff = Annotated[dict[str, tuple[int, ...]], BeforeValidator(_worded)]


class TransformerConfig(Named):
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
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    longest: int = Field(1024, ge=1)  # how many positions are learned
    tie: bool = True  # one matrix for the target's embeddings and the output (Press & Wolf 2017)
    heads_off: HeadsOff = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> "TransformerConfig":
        if self.width % self.heads:
            near = min((one for one in range(1, self.width + 1) if self.width % one == 0), key=self._far)
            raise ValueError(f"model.heads must divide model.width: got {self.heads} and {self.width}; try {near}")
        for key, off in self.heads_off.items():
            self._check_off(key, off)
        return self

    def _far(self, heads: int) -> int:
        return abs(heads - self.heads)

    def _check_off(self, key: str, off: Sequence[int]) -> None:
        place, _, layer = key.rpartition(".")
        depth = max(self.layers, self.decoder_layers or 0)
        if (place and place not in PLACES) or not layer.isdigit() or int(layer) >= depth:
            raise ValueError(
                f"model.heads_off names layers, 0 to {depth - 1}, alone or as in {PLACES[-1]}.0 ({', '.join(PLACES)}): "
                f"got {key!r}"
            )
        everywhere = {*self.heads_off.get(layer, ()), *off}
        if not all(0 <= head < self.heads for head in off) or len(everywhere) == self.heads:
            raise ValueError(
                f"model.heads_off.{key} names heads, 0 to {self.heads - 1}, and must leave one on: got {list(off)}"
            )


@dataclass(frozen=True)
class Reading:
    """The state of generation: what each hypothesis has read, and what it reaches of the sources, held once."""

    cache: Cache
    reach: Reach
    sources: tuple[Tensor, ...]  # a layer's keys and values of all sources, (M, 2, H, d)

    def select(self, rows: Tensor) -> "Reading":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]; nothing but indices is copied."""
        return replace(self, cache=self.cache.select(rows), reach=self.reach.select(rows))


class Transformer(Model):
    """Embeddings and positions, encoder, decoder."""

    Config: ClassVar[type[Named]] = TransformerConfig
    config: TransformerConfig

    def __init__(self, config: TransformerConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        width = config.width
        self.embed = nn.Embedding(vocab, width)
        self.target_embed = self.embed if target_vocab is None else nn.Embedding(target_vocab, width)
        self.positions = Sinusoidal(width) if config.positions == "sinusoidal" else Learned(config.longest, width)
        self.dropout = nn.Dropout(config.dropout)
        shape = Shape(
            width, config.heads, config.hidden, config.activation, config.norm, config.dropout, config.heads_off
        )
        self.encoder = Blocks(shape, config.layers, "encoder")
        self.decoder = Blocks(shape, config.decoder_layers or config.layers, "decoder", causal=True, cross=True)
        self.output = nn.Linear(width, self.target_vocab, bias=False)
        if config.tie:
            self.output.weight = self.target_embed.weight
        for matrix in {self.embed.weight, self.target_embed.weight, self.output.weight}:
            nn.init.normal_(matrix, std=width**-0.5)

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Say what it can do: score and generate, given a source."""
        return frozenset({Role.CONDITIONAL, Role.SCORER, Role.GENERATOR})

    def logits(self, tokens: Tokens, source: Tokens, at: Tensor | None = None) -> Tensor:
        """Score what follows each token, given the source: (N, V), or (len(at), V) at the flat positions `at`."""
        memory = self._encoded(source)
        states = self.decoder(self._embedded(tokens, self.target_embed), *self._layouts(tokens, memory, source))[-1]
        scores: Tensor = self.output(states if at is None else states[at])
        return scores

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, Reading]:
        """Encode the source and read the prompts; return the logits (B, V) of what follows, and the state."""
        assert source is not None
        memory, keep = self._encoded(source), list[Tensor]()
        layout, _, across = self._layouts(prompt, memory, source)
        states = self.decoder(self._embedded(prompt, self.target_embed), layout, memory, across, keep)[-1]
        sources = tuple(one.detach() for one in self.decoder.remember(memory))
        return self.output(states[prompt.starts[1:].long() - 1]), Reading(
            Cache.of(prompt, keep), Reach.of(source), sources
        )

    def step(self, ids: Tensor, state: Reading) -> tuple[Tensor, Reading]:
        """Read one more token a hypothesis."""
        cache = state.cache.opened()
        if isinstance(self.positions, Learned):
            check_position(cache.end, self.config.longest)
        x = self._placed(self.target_embed(ids), cache.position)
        states = self.decoder.step(x, cache, state.sources, state.reach)
        return self.output(states), replace(state, cache=cache)

    def _encoded(self, source: Tokens) -> Tensor:
        memory: Tensor = self.encoder(self._embedded(source, self.embed), Layout.itself(source))[-1]
        return memory

    def _layouts(self, tokens: Tokens, memory: Tensor, source: Tokens) -> tuple[Layout, Tensor, Layout]:
        return Layout.itself(tokens), memory, Layout(tokens, source)

    def _embedded(self, tokens: Tokens, table: nn.Embedding) -> Tensor:
        self.positions.check(tokens)
        return self._placed(table(tokens.ids), positions_of(tokens))

    def _placed(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """√D · E y + PE: as large as their vectors are, words stand out against places (section 3.4)."""
        x = embedded * self.config.width**0.5 + self.positions(positions).to(embedded.dtype)
        found: Tensor = self.dropout(x)
        return found
