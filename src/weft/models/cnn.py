"""CNN for sentence classification: Kim 2014, "Convolutional neural networks for sentence classification".

Section 2, for a sentence of T token embeddings x_1..x_T, a filter over h words and its feature map c:

    c_i = ReLU(w · x_{i:i+h-1} + b)                                  (eq. 2)
    c   = [c_1, c_2, ..., c_T]                                       (eq. 3)
    ĉ   = max(c)                                                     (max over time)

`encode` returns the feature maps of all filters, concatenated at each position; `pooled_output` returns every ĉ, the
paper's z. The `width` filters are shared equally among the filter widths in `kernels`: by default 3, 4 and 5, as in the
paper.

`channels` names the paper's models with word vectors (section 3.1), where `vectors` is a file of them; without it the
embeddings are random, the paper's CNN-rand:

    nonstatic      the vectors are trained with the rest
    static         the embeddings are not trained, those of words without a vector neither
    multichannel   two tables that start equal, x^n trained and x^s static; each filter is applied to both and the
                   results are added: c_i = ReLU(w^n · x^n_{i:i+h-1} + w^s · x^s_{i:i+h-1} + b)

A filter has weights of its own for each channel, as a convolution of an image has for each colour: with one w for both,
x^n + x^s would be a single trained channel.

Departures: a window is centred on its position, with zero padding outside the sentence, so that there are as many
windows as tokens, even in a short sentence; the paper's c has T - h + 1. Dropout on z and the softmax layer belong to
the task; `dropout` here is on embeddings.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from weft.config.schema import MAX_SIZE, Named, Size
from weft.errors import ConfigError, RoleError
from weft.models.base import Model, Role
from weft.models.word_vectors import check_channels, keep_static
from weft.nn.attention.positions import rows_of
from weft.tokens import Tokens, to_device


class CNNConfig(Named):
    """`width` is the total number of filters, shared equally among the filter widths `kernels`, in tokens."""

    width: Size = 300  # number of filters in all
    # filter widths, in tokens, which share the filters equally
    kernels: Annotated[tuple[Annotated[int, Field(le=MAX_SIZE)], ...], Field(max_length=1000)] = (3, 4, 5)
    embedding: Size | None = None  # width of the embeddings; None: `width`
    vectors: str | None = None  # a file of word vectors to initialise the embeddings
    # nonstatic: vectors are trained; static: they are not
    channels: Literal["nonstatic", "static", "multichannel"] = "nonstatic"
    dropout: float = Field(0.0, ge=0, lt=1)  # on the embeddings

    @model_validator(mode="after")
    def _check(self) -> "CNNConfig":
        check_channels(self.channels, self.vectors)
        count = len(self.kernels)
        if not count or min(self.kernels) < 1:
            raise ValueError(f"model.kernels must be widths of 1 or more, but is {list(self.kernels)}; try [3, 4, 5]")
        if self.width % count:
            near = self.width + count - self.width % count
            raise ValueError(f"model.width must be a multiple of {count}, the kernels: got {self.width}; try {near}")
        return self


class CNN(Model):
    """Embeddings, convolutions of several widths, max over time."""

    Config: ClassVar[type[Named]] = CNNConfig
    config: CNNConfig

    def __init__(self, config: CNNConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        self.width, self.kernels = config.width, config.kernels
        self.embed = nn.Embedding(vocab, config.embedding or config.width)
        nn.init.uniform_(self.embed.weight, -0.25, 0.25)  # as in Kim's code, about the variance of word2vec's vectors
        self.static = nn.Embedding.from_pretrained(self.embed.weight.detach().clone()) if self._two_channels else None
        if config.channels == "static":
            keep_static(self.embed)
        self.dropout = nn.Dropout(config.dropout)
        share = config.width // len(config.kernels)
        self.filters = nn.ModuleList(nn.Linear(size * self.input_width, share) for size in config.kernels)
        for layer in self.filters:
            assert isinstance(layer, nn.Linear)
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # He et al. 2015
            nn.init.zeros_(layer.bias)

    @property
    def _two_channels(self) -> bool:
        return self.config.channels == "multichannel"

    @property
    def input_width(self) -> int:
        """The width of a token's embedding; with two channels, of both."""
        return self.embed.embedding_dim * (2 if self._two_channels else 1)

    def word_embeddings(self) -> dict[str, list[nn.Embedding]]:
        """Return both channels: they start from the same vectors."""
        return {"vectors": [self.embed] if self.static is None else [self.embed, self.static]}

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Return its only role: encoder."""
        return frozenset({Role.ENCODER})

    def layer_groups(self) -> list[list[nn.Module]]:
        """Return the embeddings, then the filters."""
        tables = [table for table in (self.embed, self.static) if table is not None]
        return [[*tables, self.dropout], [self.filters]]

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the chosen layers, (L, N, D): 0 is the embeddings, of two channels side by side; 1 (-1) the maps."""
        embedded = self.dropout(self._embed(tokens.ids))
        outputs = [embedded, self._feature_maps(embedded, tokens)]
        if not set(layers) <= {-2, -1, 0, 1}:
            raise ConfigError(f"layers: a cnn has 0, the embeddings, and 1, the features, but {list(layers)} is asked")
        if len({outputs[layer].shape[-1] for layer in layers}) > 1:
            raise RoleError(
                f"layers: embeddings are {embedded.shape[-1]} wide and features {self.width}: they cannot be stacked; "
                "ask for one at a time"
            )
        return torch.stack([outputs[layer] for layer in layers])

    def pooled_output(self, tokens: Tokens) -> Tensor:
        """Return the maximum over time of each feature, (B, D); zeros for a sequence with no token."""
        maps = self.encode(tokens)[0]
        # Features are ReLU outputs, so a maximum with initial value 0 is exact. Not segment_reduce: where a window
        # occurs twice, its gradient counts twice if it is negative (torch 2.13).
        zeros = maps.new_zeros(len(tokens), self.width)
        return zeros.scatter_reduce(0, rows_of(tokens).long()[:, None].expand_as(maps), maps, "amax")

    def _embed(self, ids: Tensor) -> Tensor:
        channels = [self.embed(ids)] if self.static is None else [self.embed(ids), self.static(ids)]
        return torch.cat(channels, -1)  # (N, E), or (N, 2 E)

    def _feature_maps(self, embedded: Tensor, tokens: Tokens) -> Tensor:
        """Return the feature maps at each position, (N, D) (eq. 2)."""
        before, after = (max(self.kernels) - 1) // 2, max(self.kernels) // 2
        padded = torch.cat([embedded, embedded.new_zeros(1, embedded.shape[-1])])
        windows = padded[_window_positions(tokens, before, after)]  # (N, before + 1 + after, E)
        maps = []
        for size, layer in zip(self.kernels, self.filters, strict=True):
            first = before - (size - 1) // 2
            maps.append(layer(windows[:, first : first + size].flatten(1)))
        return torch.cat(maps, -1).relu()


def _window_positions(tokens: Tokens, before: int, after: int) -> Tensor:
    """Return the flat positions of each window, (N, before + 1 + after); N, the padding row, outside the sequence."""
    lengths = tokens.lengths
    total, ends = int(lengths.sum()), lengths.cumsum(0).repeat_interleave(lengths)[:, None]
    starts = ends - lengths.repeat_interleave(lengths)[:, None]
    positions = torch.arange(total)[:, None] + torch.arange(-before, after + 1)
    positions = positions.where((positions >= starts) & (positions < ends), total)
    return to_device(positions, tokens.device)
