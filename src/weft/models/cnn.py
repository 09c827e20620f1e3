"""The convolutional network for sentences of Kim 2014, "Convolutional neural networks for sentence classification".

Section 2, for a sentence of T tokens x_1..x_T (their embeddings), a filter of h words and its feature map c:

    c_i = ReLU(w · x_{i:i+h-1} + b)                                  (eq. 2)
    c   = [c_1, c_2, ..., c_T]                                       (eq. 3)
    ĉ   = max(c)                                                     (max over time)

`encode` gives the maps themselves, at each position those of all filters, side by side; `summary` gives every ĉ, the
paper's z. Of the `width` filters each of the widths in `kernels` has an equal share: by default 3, 4 and 5, as there.

Departures: a window is centred on its position, and what of it lies outside the sentence is zero, so that there are as
many windows as tokens, however few those are; the paper's c has T - h + 1. Embeddings are learnt with the rest (the
paper's CNN-rand). Dropout on z, and the last layer, are the task's; `dropout` here is on embeddings.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from weft.config.schema import Named
from weft.errors import ConfigError, RoleError
from weft.models.base import Model, Role
from weft.tokens import Tokens


class CNNConfig(Named):
    """`width` is the number of filters in all; each of the `kernels`, counted in tokens, has an equal share of them."""

    width: int = Field(300, ge=1)
    kernels: tuple[int, ...] = (3, 4, 5)
    embedding: int | None = Field(None, ge=1)  # None: as wide as `width`
    dropout: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _shares(self) -> "CNNConfig":
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

    def __init__(self, config: CNNConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        self.width, self.kernels = config.width, config.kernels
        self.embed = nn.Embedding(vocab, config.embedding or config.width)
        self.dropout = nn.Dropout(config.dropout)
        share = config.width // len(config.kernels)
        self.filters = nn.ModuleList(nn.Linear(size * self.embed.embedding_dim, share) for size in config.kernels)
        for layer in self.filters:
            assert isinstance(layer, nn.Linear)
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # He et al. 2015
            nn.init.zeros_(layer.bias)

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Say what it can do: encode."""
        return frozenset({Role.ENCODER})

    def layer_groups(self) -> list[list[nn.Module]]:
        """The embeddings, then the filters: to freeze the first is the paper's CNN-static."""
        return [[self.embed, self.dropout], [self.filters]]

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return layers (L, N, D), of which 0 is the embeddings and 1, the last, the feature maps."""
        embedded = self.dropout(self.embed(tokens.ids))
        known = [embedded, self._maps(embedded, tokens)]
        if not set(layers) <= {-2, -1, 0, 1}:
            raise ConfigError(f"layers: a cnn has 0, the embeddings, and 1, the features, but {list(layers)} is asked")
        if len({known[layer].shape[-1] for layer in layers}) > 1:
            raise RoleError(
                f"layers: embeddings are {embedded.shape[-1]} wide and features {self.width}: they cannot be stacked; "
                "ask for one at a time, or leave model.embedding out"
            )
        return torch.stack([known[layer] for layer in layers])

    def summary(self, tokens: Tokens) -> Tensor:
        """Return the maximum over time of each feature, (B, D); zeros for a sequence with no token."""
        maps = self.encode(tokens)[0]
        # A feature is never below 0, so a maximum that starts at 0 is the maximum.
        lengths = tokens.lengths.to(maps.device, non_blocking=True)
        return torch.segment_reduce(maps, "max", lengths=lengths, axis=0, initial=0, unsafe=True)

    def _maps(self, embedded: Tensor, tokens: Tokens) -> Tensor:
        """Return the features at each position, (N, D)."""
        before, after = (max(self.kernels) - 1) // 2, max(self.kernels) // 2
        padded = torch.cat([embedded, embedded.new_zeros(1, embedded.shape[-1])])
        near = padded[_window(tokens, before, after)]  # (N, before + 1 + after, E)
        maps = []
        for size, layer in zip(self.kernels, self.filters, strict=True):
            first = before - (size - 1) // 2
            maps.append(layer(near[:, first : first + size].flatten(1)))
        return torch.cat(maps, -1).relu()


def _window(tokens: Tokens, before: int, after: int) -> Tensor:
    """Return the flat positions around each position, (N, before + 1 + after); N where the sequence has none."""
    lengths = tokens.lengths
    total, ends = int(lengths.sum()), lengths.cumsum(0).repeat_interleave(lengths)[:, None]
    starts = ends - lengths.repeat_interleave(lengths)[:, None]
    places = torch.arange(total)[:, None] + torch.arange(-before, after + 1)
    places = places.where((places >= starts) & (places < ends), total)
    return places.to(tokens.device, non_blocking=True)
