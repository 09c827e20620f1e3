"""Words by their characters: a convolution over a word's spelling, of which the maximum over the word is kept.

Section 2.1 of Ma & Hovy 2016, "End-to-end sequence labeling via bi-directional LSTM-CNNs-CRF" (arXiv:1603.01354), and
section 2.3 of Chiu & Nichols 2016, "Named entity recognition with bidirectional LSTM-CNNs" (arXiv:1511.08308). For a
word of C characters with the embeddings x_1..x_C, a filter w over k of them and its feature r:

    c_i = w · x_{i-(k-1)/2 : i+(k-1)/2} + b             at each character i; what lies outside the word is zero
    r   = ReLU(max_i c_i)

The defaults are Ma & Hovy's: k = 3, embeddings of 30, from U(-√(3/30), √(3/30)) (their section 3.1). Departures:
characters are UTF-8 bytes between a sign for the word's beginning and one for its end (`weft.tokens`), as in ELMo
(Peters et al. 2018), whose ReLU is taken over too; dropout is the model's, on what is given here.

ELMo's own way (bilm-tf; Kim et al. 2016, "Character-aware neural language models", arXiv:1508.06615, section 2.3) is
`CharFilters`, filters of several widths, and `Highway`, layers that may leave what they read as it is (Srivastava et
al. 2015, arXiv:1505.00387, eq. 3):

    y = g ⊙ ReLU(W_t x + b_t) + (1 - g) ⊙ x             g = σ(W_g x + b_g), where b_g starts at -2
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import ConfigError
from weft.tokens import LAST, LONGEST_SPELLING, PAD, SYMBOLS, Tokens

_AT_ONCE = 1024  # words whose filters are held at a time: of a large model they are many numbers


class CharCNN(nn.Module):
    """`filters` features of how a token is spelt; no other token of the batch has a part in them."""

    def __init__(self, filters: int, kernel: int = 3, embedding: int = 30) -> None:
        super().__init__()
        assert kernel % 2, "a window is centred on a character"
        self.embed = nn.Embedding(SYMBOLS, embedding, padding_idx=PAD)  # that of PAD is zero, and stays it
        self.convolve = nn.Conv1d(embedding, filters, kernel, padding=kernel // 2)
        with torch.no_grad():
            self.embed.weight.uniform_(-math.sqrt(3 / embedding), math.sqrt(3 / embedding))[PAD] = 0

    def forward(self, tokens: Tokens) -> Tensor:
        """Return the features of each token, (N, F)."""
        chars = tokens.chars
        if chars is None:
            raise ConfigError(
                "model.chars: the tokens come without their spelling, which the tasks tag and classify give; "
                "set model.chars: 0, or give Tokens.chars"
            )
        maps: Tensor = self.convolve(self.embed(chars).transpose(1, 2))  # (N, F, C)
        # A window whose centre is padding may still see the word's last character, and must not win.
        return maps.masked_fill((chars == PAD)[:, None], -torch.inf).amax(-1).relu()


class CharFilters(nn.Module):
    """Filters of several widths over a word's places, of which there are always as many: those past its end count too.

    `filters` maps a width to how many filters have it. No other word has a part in a word's features.
    """

    def __init__(self, filters: Mapping[int, int], embedding: int, activation: str = "relu") -> None:
        super().__init__()
        self.embed = nn.Embedding(LAST + 1, embedding)  # that of PAD is learnt like any other
        self.convolve = nn.ModuleList(nn.Conv1d(embedding, count, width) for width, count in filters.items())
        self.activation = torch.tanh if activation == "tanh" else torch.relu
        self.width, self._widest = sum(filters.values()), max(filters)
        self._start(activation)

    @torch.no_grad()
    def _start(self, activation: str) -> None:
        """Set first weights as bilm-tf does."""
        self.embed.weight.uniform_(-1, 1)
        for filters in self.convolve:
            assert isinstance(filters, nn.Conv1d)
            assert filters.bias is not None
            if activation == "tanh":
                filters.weight.normal_(std=filters.weight[0].numel() ** -0.5)
            else:
                filters.weight.uniform_(-0.05, 0.05)
            filters.bias.zero_()

    def forward(self, chars: Tensor) -> Tensor:
        """Return the features of words as they are spelt: (U, C) to (U, F)."""
        # Past its last sign and one window more, all windows of a word are alike: what is the same need not be filled.
        room = min(LONGEST_SPELLING, chars.shape[1] + self._widest) - chars.shape[1]
        filled = F.pad(chars, (0, room), value=PAD)
        return torch.cat([self._features(part) for part in filled.split(_AT_ONCE)])

    def _features(self, chars: Tensor) -> Tensor:
        embedded = self.embed(chars).transpose(1, 2)  # (U, E, C)
        return self.activation(torch.cat([filters(embedded).amax(-1) for filters in self.convolve], -1))


class Highway(nn.Module):
    """A layer with a gate that says how much of it is taken, in place of what it read; at first it is little."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.transform = nn.Linear(width, width), nn.Linear(width, width)
        for linear, bias in ((self.gate, -2.0), (self.transform, 0.0)):
            nn.init.normal_(linear.weight, std=width**-0.5)
            nn.init.constant_(linear.bias, bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Read (..., D); return (..., D)."""
        gate = torch.sigmoid(self.gate(inputs))
        return gate * torch.relu(self.transform(inputs)) + (1 - gate) * inputs
