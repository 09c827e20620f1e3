"""ELMo: words in their context, from a language model that reads both ways.

Peters et al. 2018, "Deep contextualized word representations" (arXiv:1802.05365), section 3, with the sizes and the
equations of its code, bilm-tf. A word w_k is known by its characters alone: x_k is a convolution over them, two highway
layers and a projection (`weft.nn.layers.char_cnn`). Two LSTMs with projections (`weft.nn.rnn.projected_lstm`) read the
x, one from either end, layer on layer, and one softmax serves both:

    p(w_{k+1} | w_≤k) = softmax(W →h_{k,L} + b)         p(w_{k-1} | w_≥k) = softmax(W ←h_{k,L} + b)

A layer from the second on adds what it read, →h_{k,j} = →h_{k,j-1} + LSTM(→h_{k,j-1}). `encode` gives the layers
h_{k,j} = [→h_{k,j} ; ←h_{k,j}], and h_{k,0} = [x_k ; x_k]; a task mixes them (`weft.nn.layers.scalar_mix`).

A token is spelt as `Tokens.chars` has it. Where that says nothing, as of a text's beginning and end, and where a token
comes without it or was just generated, it is spelt as the vocabulary has it: `set_char_table` tells.

Departures: every text is read from its beginning and alone, where bilm-tf carries states from batch to batch, and the
softmax is of all words, where it draws 8192 of them in training. The spelling of a word is computed once a batch.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from weft.config.schema import Named, Pretrained
from weft.errors import ConfigError, RoleError
from weft.models.base import Direction, Model, Role, matrix_numbers
from weft.nn.layers.char_cnn import CharFilters, Highway
from weft.nn.rnn.cells import State
from weft.nn.rnn.projected_lstm import ProjectedLSTM
from weft.nn.rnn.time_major import Grid
from weft.tokens import END, LONGEST_SPELLING, PAD, Tokens

SCORES = {Role.LANGUAGE_MODEL, Role.GENERATOR}


class ELMoConfig(Pretrained):
    """`width` is that of a layer, half for each direction; `cells` is what each LSTM has before its projection."""

    embedding: int = Field(16, ge=1)  # of a character
    filters: dict[int, int] = Field({1: 32, 2: 32, 3: 64, 4: 128, 5: 256, 6: 512, 7: 1024})  # how many of each width
    activation: Literal["relu", "tanh"] = "relu"
    highways: int = Field(2, ge=0)
    width: int = Field(1024, ge=2)
    cells: int = Field(4096, ge=1)
    layers: int = Field(2, ge=1)
    clip: float = Field(3.0, ge=0)  # the bound of cells and projections; 0: none
    residual: bool = True  # around each layer but the first
    dropout: float = Field(0.1, ge=0, lt=1)  # on what each layer reads, and what is scored

    @field_validator("filters")
    @classmethod
    def _some(cls, filters: dict[int, int]) -> dict[int, int]:
        if not filters or not all(1 <= width <= LONGEST_SPELLING and count >= 1 for width, count in filters.items()):
            raise ValueError(
                f"must say how many filters there are of each width, 1 to {LONGEST_SPELLING}, such as {{2: 32, 3: 64}}"
            )
        return filters

    @model_validator(mode="after")
    def _even(self) -> "ELMoConfig":
        if self.width % 2:
            near = self.width + 1
            raise ValueError(f"model.width must be even, half for each direction: got {self.width}; try {near}")
        return self


@dataclass(frozen=True)
class ELMoState:
    """The state of each layer that reads forward."""

    layers: tuple[State, ...]

    def select(self, rows: Tensor) -> "ELMoState":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]."""
        return ELMoState(tuple(tuple(part[rows] for part in layer) for layer in self.layers))


class Speller(nn.Module):
    """x_k: filters over a word's characters, highways, a projection."""

    def __init__(self, config: ELMoConfig) -> None:
        super().__init__()
        self.filters = CharFilters(config.filters, config.embedding, config.activation)
        self.highways = nn.Sequential(*(Highway(self.filters.width) for _ in range(config.highways)))
        self.project = nn.Linear(self.filters.width, config.width // 2)
        nn.init.normal_(self.project.weight, std=self.filters.width**-0.5)
        nn.init.zeros_(self.project.bias)

    def forward(self, chars: Tensor) -> Tensor:
        """Read words as they are spelt: (U, C) to (U, D/2)."""
        found: Tensor = self.project(self.highways(self.filters(chars)))
        return found


class DirectionalLSTM(nn.Module):
    """The LSTMs of one direction, layer on layer."""

    def __init__(self, config: ELMoConfig, reverse: bool) -> None:
        super().__init__()
        half = config.width // 2
        self.reverse, self.residual = reverse, config.residual
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            ProjectedLSTM(half, half, config.cells, config.clip or None) for _ in range(config.layers)
        )

    def forward(self, flat: Tensor, grid: Grid) -> list[Tensor]:
        """Read (N, D/2); return each layer's outputs, (N, D/2) each."""
        outputs, _ = self.walk(grid.lay(flat, self.reverse))
        return [grid.gather(one, self.reverse) for one in outputs]

    def walk(
        self, inputs: Tensor, states: Sequence[State] | None = None, real: Tensor | None = None
    ) -> tuple[list[Tensor], tuple[State, ...]]:
        """Go on from `states` over a grid (T, B, D/2), as it lies; return each layer's outputs and state."""
        outputs, after = [], []
        for depth, layer in enumerate(self.layers):
            read = self.dropout(inputs) if layer.training == self.training else inputs  # a frozen one reads all
            walked, state = layer(read, states[depth] if states else None, real)
            inputs = read + walked if depth and self.residual else walked
            outputs.append(inputs)
            after.append(state)
        return outputs, tuple(after)


class ELMo(Model):
    """The spelling of words, a way through a text from either end, and where it scores one softmax for both."""

    Config: ClassVar[type[Named]] = ELMoConfig
    config: ELMoConfig
    output: nn.Linear | None
    spelling: Tensor | None  # (V, C) how each token of the vocabulary is spelt

    def __init__(self, config: ELMoConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        self.width = config.width
        self.speller = Speller(config)
        self.ahead, self.back = DirectionalLSTM(config, reverse=False), DirectionalLSTM(config, reverse=True)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(config.width // 2, vocab)
        nn.init.normal_(self.output.weight, std=(config.width // 2) ** -0.5)
        nn.init.zeros_(self.output.bias)
        self.register_buffer("spelling", None, persistent=False)
        self._sizes: Tensor | None = None  # (V,) how many signs each spelling has, on the CPU wherever the model is

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Say what it can do: it generates forwards."""
        return frozenset({Role.ENCODER, *SCORES})

    @classmethod
    def directions(cls, config: Named) -> tuple[Direction, ...]:
        """It sees a word from what stands before it, and again from what stands after."""
        return "forward", "backward"

    @classmethod
    def uses_chars(cls, config: Named) -> bool:
        """It knows words by their characters."""
        return True

    @property
    def mixable_layers(self) -> tuple[int, ...]:
        """Every layer, that of the words' spelling too."""
        return tuple(range(self.config.layers + 1))

    def set_char_table(self, table: Tensor) -> None:
        """Take how each token of the vocabulary is spelt, (V, C), by the signs of `weft.tokens`."""
        assert len(table) == self.vocab, "a spelling for every token"
        self.spelling = table.to(self.speller.project.weight.device, torch.int16)
        self._sizes = (table != PAD).sum(1).cpu()

    def layer_groups(self) -> list[list[nn.Module]]:
        """The spelling, then each layer, of both directions."""
        return [[self.speller], *(list(pair) for pair in zip(self.ahead.layers, self.back.layers, strict=True))]

    def keep(self, needs: Collection[Role]) -> None:
        """Drop the softmax where nothing is scored."""
        if not SCORES & set(needs):
            self.output = None

    def flops(self, tokens: Tokens, source: Tokens | None = None) -> int:
        """Count each matrix for each token, filters for each of its characters, the softmax for each direction."""
        read = int(tokens.lengths.sum())
        count = super().flops(tokens) + 2 * matrix_numbers(self.speller.filters) * (self._signs(tokens) - read)
        return count if self.output is None else count + 2 * matrix_numbers(self.output) * read

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the chosen layers, (L, N, D); 0 is the words' spelling, twice, -1 the last layer."""
        deep = self.config.layers
        if not all(-deep - 1 <= layer <= deep for layer in layers):
            raise ConfigError(f"layers: this elmo has 0, the spelling, to {deep}, but {list(layers)} is asked for")
        embedded, grid = self._embed(tokens), Grid(tokens)
        ways = [[embedded, *way(embedded, grid)] for way in (self.ahead, self.back)]
        return torch.stack([torch.cat([way[layer] for way in ways], -1) for layer in layers])

    def summary(self, tokens: Tokens) -> Tensor:
        """Return one vector a sequence, (B, D): the last layer where each direction has read all."""
        embedded, grid = self._embed(tokens), Grid(tokens)
        return torch.cat([grid.end(way(embedded, grid)[-1], way.reverse) for way in (self.ahead, self.back)], -1)

    def logits(self, tokens: Tokens, at: Tensor | None = None, direction: Direction = "forward") -> Tensor:
        """Score what follows each token, or backward what stands before it: (N, V), or (len(at), V)."""
        states = self._way(direction)(self._embed(tokens), Grid(tokens))[-1]
        return self._score(states if at is None else states[at])

    def logits_each(self, tokens: Tokens, directions: Sequence[Direction]) -> list[Tensor]:
        """Score in each of several directions: words are spelt once for all."""
        embedded, grid = self._embed(tokens), Grid(tokens)
        return [self._score(self._way(direction)(embedded, grid)[-1]) for direction in directions]

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, ELMoState]:
        """Read the prompts; return the logits (B, V) of what follows, and the state."""
        grid = Grid(prompt)
        outputs, after = self.ahead.walk(grid.lay(self._embed(prompt)), None, None if grid.full else grid.real)
        return self._score(grid.last(outputs[-1])), ELMoState(after)

    def step(self, ids: Tensor, state: ELMoState) -> tuple[Tensor, ELMoState]:
        """Read one more token a hypothesis, spelt as the vocabulary has it."""
        embedded = self._embed(Tokens.flat(ids, torch.ones(len(ids))))
        outputs, after = self.ahead.walk(embedded[None], state.layers)
        return self._score(outputs[-1][0]), ELMoState(after)

    def _way(self, direction: Direction) -> DirectionalLSTM:
        if direction == "both":
            raise RoleError("direction: elmo scores forward and backward, each on its own, but both is asked for")
        return self.ahead if direction == "forward" else self.back

    def _embed(self, tokens: Tokens) -> Tensor:
        """Return x (N, D/2); what is spelt alike is computed once."""
        if tokens.chars is None and self.spelling is not None:
            ids, places = tokens.ids.unique(return_inverse=True)
            words = self.spelling[ids].int()
        else:
            words, places = self._chars(tokens).unique(dim=0, return_inverse=True)
        embedded: Tensor = self.speller(words[:, (words != PAD).any(0)])
        return embedded.index_select(0, places)

    def _chars(self, tokens: Tokens) -> Tensor:
        """Return how each token is spelt, (N, C); one that is spelt as nothing, as the vocabulary has it."""
        chars, table = tokens.chars, self.spelling
        if chars is None and table is None:
            raise ConfigError(
                "model.name: elmo knows words by their spelling, and here neither the tokens come with it nor the "
                "vocabulary; give Tokens.chars, or call set_char_table"
            )
        if chars is None or table is None:
            return table[tokens.ids].int() if chars is None else chars  # type: ignore[index]
        known = F.pad(table[tokens.ids].int(), (0, max(0, chars.shape[1] - table.shape[1])), value=PAD)
        given = F.pad(chars, (0, max(0, table.shape[1] - chars.shape[1])), value=PAD)
        return torch.where((chars[:, 1] == END)[:, None], known, given)

    def _signs(self, tokens: Tokens) -> int:
        """Count the signs of `_chars` on the CPU, where a batch is when it is counted."""
        if self._sizes is None:
            return int((self._chars(tokens) != PAD).sum())
        known = self._sizes[tokens.ids.cpu()]
        if tokens.chars is None:
            return int(known.sum())
        chars = tokens.chars.cpu()
        return int(torch.where(chars[:, 1] == END, known, (chars != PAD).sum(1)).sum())

    def _score(self, states: Tensor) -> Tensor:
        assert self.output is not None
        scores: Tensor = self.output(self.dropout(states))
        return scores
