"""ELMo: contextual word representations from a bidirectional language model.

Peters et al. 2018, "Deep contextualized word representations" (arXiv:1802.05365), section 3, with the sizes and the
equations of its code, bilm-tf. A word w_k is represented by its characters alone: x_k is a character CNN, two highway
layers and a projection (`weft.nn.layers.char_cnn`). A forward and a backward stack of LSTMs with projections
(`weft.nn.rnn.projected_lstm`) read the x, and share one softmax:

    p(w_{k+1} | w_≤k) = softmax(W →h_{k,L} + b)         p(w_{k-1} | w_≥k) = softmax(W ←h_{k,L} + b)

Layers from the second on have a residual connection, →h_{k,j} = →h_{k,j-1} + LSTM(→h_{k,j-1}). `encode` returns the
layers h_{k,j} = [→h_{k,j} ; ←h_{k,j}], and h_{k,0} = [x_k ; x_k]; a task mixes them (`weft.nn.layers.scalar_mix`).

The characters of a token are those of `Tokens.chars`. Where they are empty, as for bos and eos, and for tokens without
`chars` or just generated, they come from the vocabulary's character table: `set_char_table`.

Departures: every text starts from a zero state, where bilm-tf carries states from batch to batch, and the softmax is
over all words, where it samples 8192 of them in training. The character CNN runs once for each distinct word of a
batch.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from weft.config.schema import MAX_SIZE, Layers, Named, Pretrained, Size
from weft.errors import ConfigError, RoleError
from weft.models.base import LMDirection, Model, Role, num_matrix_parameters
from weft.nn.layers.char_cnn import CharFilters, Highway
from weft.nn.rnn.cells import CellState, join_layers
from weft.nn.rnn.projected_lstm import ProjectedLSTM
from weft.nn.rnn.time_major import TimeMajor
from weft.tokens import CHAR_PAD, MAX_WORD_CHARS, WORD_END, Tokens

_LM_ROLES = {Role.LANGUAGE_MODEL, Role.GENERATOR}


def _width_of_key(key: object) -> object:
    """Return a filter's width: the keys of a saved recipe are strings."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 else key


FilterWidth = Annotated[int, BeforeValidator(_width_of_key)]


class ELMoConfig(Pretrained):
    """`width` is that of a layer, half for each direction; `cells` is the size of an LSTM cell before projection."""

    embedding: Size = 16  # of a character
    filters: dict[FilterWidth, Size] = Field({1: 32, 2: 32, 3: 64, 4: 128, 5: 256, 6: 512, 7: 1024})  # filters by width
    activation: Literal["relu", "tanh"] = "relu"  # after the character convolution
    highways: int = Field(2, ge=0, le=1000)  # number of highway layers
    width: int = Field(1024, ge=2, le=MAX_SIZE)  # of a layer; half for each direction
    cells: Size = 4096  # size of an LSTM cell before projection
    layers: Layers = 2  # of LSTMs, in each direction
    clip: float = Field(3.0, ge=0)  # clipping of cells and projections; 0: none
    residual: bool = True  # around each layer but the first
    dropout: float = Field(0.1, ge=0, lt=1)  # on the input of each layer and of the softmax

    @field_validator("filters")
    @classmethod
    def _check_filters(cls, filters: dict[int, int]) -> dict[int, int]:
        if not filters or not all(1 <= width <= MAX_WORD_CHARS and count >= 1 for width, count in filters.items()):
            raise ValueError(
                f"must say how many filters there are of each width, 1 to {MAX_WORD_CHARS}, such as {{2: 32, 3: 64}}"
            )
        return filters

    @model_validator(mode="after")
    def _check_width(self) -> "ELMoConfig":
        if self.width % 2:
            near = self.width + 1
            raise ValueError(f"model.width must be even, half for each direction: got {self.width}; try {near}")
        return self


@dataclass(frozen=True)
class ELMoState:
    """The states of the forward layers."""

    layers: tuple[CellState, ...]

    def select(self, rows: Tensor) -> "ELMoState":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]."""
        return ELMoState(tuple(tuple(part[rows] for part in layer) for layer in self.layers))

    def join(self, other: "ELMoState") -> "ELMoState":
        """Return the state of these hypotheses and, after them, the other's."""
        return ELMoState(join_layers(self.layers, other.layers))


class CharEncoder(nn.Module):
    """The character encoder x_k: character CNN, highway layers, projection."""

    def __init__(self, config: ELMoConfig) -> None:
        super().__init__()
        self.filters = CharFilters(config.filters, config.embedding, config.activation)
        self.highways = nn.Sequential(*(Highway(self.filters.width) for _ in range(config.highways)))
        self.project = nn.Linear(self.filters.width, config.width // 2)
        nn.init.normal_(self.project.weight, std=self.filters.width**-0.5)
        nn.init.zeros_(self.project.bias)

    def forward(self, chars: Tensor) -> Tensor:
        """Encode the characters of words: (U, C) to (U, D/2)."""
        encoded: Tensor = self.project(self.highways(self.filters(chars)))
        return encoded


class DirectionalLSTM(nn.Module):
    """The stacked LSTMs of one direction."""

    def __init__(self, config: ELMoConfig, reverse: bool) -> None:
        super().__init__()
        half = config.width // 2
        self.reverse, self.residual = reverse, config.residual
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            ProjectedLSTM(half, half, config.cells, config.clip or None) for _ in range(config.layers)
        )

    def forward(self, flat: Tensor, grid: TimeMajor) -> list[Tensor]:
        """Run all layers over (N, D/2); return each layer's outputs, (N, D/2) each."""
        outputs, _ = self.run(grid.pad(flat, self.reverse))
        return [grid.unpad(output, self.reverse) for output in outputs]

    def run(
        self, inputs: Tensor, states: Sequence[CellState] | None = None, real: Tensor | None = None
    ) -> tuple[list[Tensor], tuple[CellState, ...]]:
        """Run all layers over time-major inputs (T, B, D/2) from `states` on; return each layer's outputs and state."""
        outputs, last = [], []
        for depth, layer in enumerate(self.layers):
            dropped = self.dropout(inputs) if layer.training == self.training else inputs  # none into a frozen layer
            hidden, state = layer(dropped, states[depth] if states else None, real)
            inputs = dropped + hidden if depth and self.residual else hidden
            outputs.append(inputs)
            last.append(state)
        return outputs, tuple(last)


class ELMo(Model):
    """Character encoder, forward and backward LSTMs, and, as a language model, one softmax for both."""

    Config: ClassVar[type[Named]] = ELMoConfig
    config: ELMoConfig
    output: nn.Linear | None
    char_table: Tensor | None  # (V, C) the characters of each token of the vocabulary

    def __init__(self, config: ELMoConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        self.width = config.width
        self.char_encoder = CharEncoder(config)
        self.forward_lstm, self.backward_lstm = (
            DirectionalLSTM(config, reverse=False),
            DirectionalLSTM(config, reverse=True),
        )
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(config.width // 2, vocab)
        nn.init.normal_(self.output.weight, std=(config.width // 2) ** -0.5)
        nn.init.zeros_(self.output.bias)
        self.register_buffer("char_table", None, persistent=False)
        self._char_lengths: Tensor | None = None  # (V,) lengths in `char_table`, on the CPU wherever the model is

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Return its roles: encoder, language model and (forward) generator."""
        return frozenset({Role.ENCODER, *_LM_ROLES})

    @classmethod
    def directions(cls, config: Named) -> tuple[LMDirection, ...]:
        """Return both directions: each is a language model of its own."""
        return "forward", "backward"

    @classmethod
    def uses_chars(cls, config: Named) -> bool:
        """Return True: its input is characters."""
        return True

    @property
    def mixable_layers(self) -> tuple[int, ...]:
        """All layers, with the character encoder's output."""
        return tuple(range(self.config.layers + 1))

    def set_char_table(self, table: Tensor) -> None:
        """Set the characters of each token of the vocabulary, (V, C), in the character ids of `weft.tokens`."""
        assert len(table) == self.vocab, "characters for every token"
        self.char_table = table.to(self.char_encoder.project.weight.device, torch.int16)
        self._char_lengths = (table != CHAR_PAD).sum(1).cpu()

    def layer_groups(self) -> list[list[nn.Module]]:
        """Return the character encoder, then each layer of both directions."""
        return [
            [self.char_encoder],
            *(list(pair) for pair in zip(self.forward_lstm.layers, self.backward_lstm.layers, strict=True)),
        ]

    def prune_unused(self, needs: Collection[Role]) -> None:
        """Drop the softmax unless a role needs logits."""
        if not _LM_ROLES & set(needs):
            self.output = None

    def flops(self, tokens: Tokens, source: Tokens | None = None) -> int:
        """Return the FLOPs: each matrix for each token, filters for each character, the softmax for each direction."""
        length = int(tokens.lengths.sum())
        count = super().flops(tokens) + 2 * num_matrix_parameters(self.char_encoder.filters) * (
            self._num_chars(tokens) - length
        )
        return count if self.output is None else count + 2 * num_matrix_parameters(self.output) * length

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the chosen layers, (L, N, D); 0 is the character encoder's output, twice, -1 the last layer."""
        depth = self.config.layers
        if not all(-depth - 1 <= layer <= depth for layer in layers):
            raise ConfigError(
                f"layers: this elmo has 0, the character encoder, to {depth}, but {list(layers)} is asked for"
            )
        embedded, grid = self._embed(tokens), TimeMajor(tokens)
        states = [[embedded, *lstm(embedded, grid)] for lstm in (self.forward_lstm, self.backward_lstm)]
        return torch.stack([torch.cat([own[layer] for own in states], -1) for layer in layers])

    def final_states(self, states: Tensor, tokens: Tokens) -> Tensor:
        """Return the final state of each direction, (B, D): forward at the last token, backward at the first."""
        grid, (forward, backward) = TimeMajor(tokens), states.chunk(2, -1)
        return torch.cat([grid.end(forward), grid.end(backward, reverse=True)], -1)

    def pooled_output(self, tokens: Tokens) -> Tensor:
        """Return one vector a sequence, (B, D): the last layer's final output in each direction."""
        embedded, grid = self._embed(tokens), TimeMajor(tokens)
        return torch.cat(
            [grid.end(lstm(embedded, grid)[-1], lstm.reverse) for lstm in (self.forward_lstm, self.backward_lstm)], -1
        )

    def logits(self, tokens: Tokens, at: Tensor | None = None, direction: LMDirection = "forward") -> Tensor:
        """Return the logits of the next or, backward, the previous token: (N, V), or (len(at), V)."""
        hidden = self._lstm(direction)(self._embed(tokens), TimeMajor(tokens))[-1]
        return self._project(hidden if at is None else hidden[at])

    def logits_each(self, tokens: Tokens, directions: Sequence[LMDirection]) -> list[Tensor]:
        """Return the logits (N, V) of each direction; the character encoder runs once for all."""
        embedded, grid = self._embed(tokens), TimeMajor(tokens)
        return [self._project(self._lstm(direction)(embedded, grid)[-1]) for direction in directions]

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, ELMoState]:
        """Return the logits (B, V) of the token after each prompt, and the state."""
        grid = TimeMajor(prompt)
        outputs, last = self.forward_lstm.run(grid.pad(self._embed(prompt)), None, None if grid.full else grid.mask)
        return self._project(grid.last(outputs[-1])), ELMoState(last)

    def step(self, ids: Tensor, state: ELMoState) -> tuple[Tensor, ELMoState]:
        """Append one token to each hypothesis, ids (B,), with the characters that the vocabulary has for it."""
        embedded = self._embed(Tokens.flat(ids, torch.ones(len(ids))))
        outputs, last = self.forward_lstm.run(embedded[None], state.layers)
        return self._project(outputs[-1][0]), ELMoState(last)

    def _lstm(self, direction: LMDirection) -> DirectionalLSTM:
        if direction == "both":
            raise RoleError("direction: elmo scores forward and backward, each on its own, but both is asked for")
        return self.forward_lstm if direction == "forward" else self.backward_lstm

    def _embed(self, tokens: Tokens) -> Tensor:
        """Return x (N, D/2); each distinct word is encoded once."""
        if tokens.chars is None and self.char_table is not None:
            ids, inverse = tokens.ids.unique(return_inverse=True)
            chars = self.char_table[ids].int()
        else:
            chars, inverse = self._chars(tokens).unique(dim=0, return_inverse=True)
        embedded: Tensor = self.char_encoder(chars[:, (chars != CHAR_PAD).any(0)])
        return embedded.index_select(0, inverse)

    def _chars(self, tokens: Tokens) -> Tensor:
        """Return the characters of each token, (N, C); those of the vocabulary where the token has none."""
        chars, table = tokens.chars, self.char_table
        if chars is None and table is None:
            raise ConfigError(
                "model.name: elmo reads the characters of words, and here neither the tokens nor the vocabulary have "
                "them; give Tokens.chars, or call set_char_table"
            )
        if chars is None or table is None:
            return table[tokens.ids].int() if chars is None else chars  # type: ignore[index]
        from_vocab = F.pad(table[tokens.ids].int(), (0, max(0, chars.shape[1] - table.shape[1])), value=CHAR_PAD)
        from_tokens = F.pad(chars, (0, max(0, table.shape[1] - chars.shape[1])), value=CHAR_PAD)
        return torch.where((chars[:, 1] == WORD_END)[:, None], from_vocab, from_tokens)

    def _num_chars(self, tokens: Tokens) -> int:
        """Return the number of characters in `_chars`, computed on the CPU, where the batch is at that time."""
        if self._char_lengths is None:
            return int((self._chars(tokens) != CHAR_PAD).sum())
        from_vocab = self._char_lengths[tokens.ids.cpu()]
        if tokens.chars is None:
            return int(from_vocab.sum())
        chars = tokens.chars.cpu()
        return int(torch.where(chars[:, 1] == WORD_END, from_vocab, (chars != CHAR_PAD).sum(1)).sum())

    def _project(self, hidden: Tensor) -> Tensor:
        assert self.output is not None
        logits: Tensor = self.output(self.dropout(hidden))
        return logits
