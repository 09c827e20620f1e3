"""Character CNN: word features by a convolution over a word's characters and max-pooling.

Section 2.1 of Ma & Hovy 2016, "End-to-end sequence labeling via bi-directional LSTM-CNNs-CRF" (arXiv:1603.01354), and
section 2.3 of Chiu & Nichols 2016, "Named entity recognition with bidirectional LSTM-CNNs" (arXiv:1511.08308). For a
word of C characters with the embeddings x_1..x_C, a filter w over k of them and its feature r:

    c_i = w · x_{i-(k-1)/2 : i+(k-1)/2} + b             at each character i; zero padding outside the word
    r   = ReLU(max_i c_i)

The defaults are Ma & Hovy's: k = 3, embeddings of 30, from U(-√(3/30), √(3/30)) (their section 3.1). Departures:
characters are UTF-8 bytes between begin-of-word and end-of-word symbols (`weft.tokens`), as in ELMo (Peters et al.
2018), whose ReLU is taken over too; dropout is the model's, on these features.

ELMo's encoder (bilm-tf; Kim et al. 2016, "Character-aware neural language models", arXiv:1508.06615, section 2.3) is
`CharFilters`, filters of several widths, and `Highway`, layers that may carry their input through unchanged (Srivastava
et al. 2015, arXiv:1505.00387, eq. 3):

    y = g ⊙ ReLU(W_t x + b_t) + (1 - g) ⊙ x             g = σ(W_g x + b_g), where b_g starts at -2
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import ConfigError
from weft.tokens import CHAR_PAD, MAX_WORD_CHARS, NUM_CHARS, TEXT_END, Tokens

_WORDS_AT_ONCE = 1024  # words at a time: the feature maps of a large model take much memory


class CharCNN(nn.Module):
    """`filters` features of a token's characters, independent of the other tokens of the batch."""

    def __init__(self, filters: int, kernel: int = 3, embedding: int = 30) -> None:
        super().__init__()
        assert kernel % 2, "a window is centred on a character"
        self.embed = nn.Embedding(NUM_CHARS, embedding, padding_idx=CHAR_PAD)  # that of PAD is zero, and stays zero
        self.convolve = nn.Conv1d(embedding, filters, kernel, padding=kernel // 2)
        with torch.no_grad():
            self.embed.weight.uniform_(-math.sqrt(3 / embedding), math.sqrt(3 / embedding))[CHAR_PAD] = 0

    def forward(self, tokens: Tokens) -> Tensor:
        """Return the features of each token, (N, F)."""
        chars = tokens.chars
        if chars is None:
            raise ConfigError(
                "model.chars: the tokens come without their spelling, which the tasks tag and classify give; "
                "set model.chars: 0, or give Tokens.chars"
            )
        maps: Tensor = self.convolve(self.embed(chars).transpose(1, 2))  # (N, F, C)
        # A window centred on padding may still contain the word's last character, and must not be the maximum.
        return maps.masked_fill((chars == CHAR_PAD)[:, None], -torch.inf).amax(-1).relu()


class CharFilters(nn.Module):
    """Filters of several widths over a word's characters, padded to a fixed length: the padding counts too.

    `filters` maps a width to its number of filters. A word's features do not depend on other words.
    """

    def __init__(self, filters: Mapping[int, int], embedding: int, activation: str = "relu") -> None:
        super().__init__()
        self.embed = nn.Embedding(TEXT_END + 1, embedding)  # that of PAD is learned like any other
        self.convolve = nn.ModuleList(nn.Conv1d(embedding, count, width) for width, count in filters.items())
        self.activation = torch.tanh if activation == "tanh" else torch.relu
        self.width, self._widest = sum(filters.values()), max(filters)
        self._init_weights(activation)

    @torch.no_grad()
    def _init_weights(self, activation: str) -> None:
        """Initialise the weights as bilm-tf does."""
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
        """Return the features of words by their characters: (U, C) to (U, F)."""
        # From one window after a word's last character on, all windows are the same: no more padding is needed.
        padding = min(MAX_WORD_CHARS, chars.shape[1] + self._widest) - chars.shape[1]
        padded = F.pad(chars, (0, padding), value=CHAR_PAD)
        return torch.cat([self._features(words) for words in padded.split(_WORDS_AT_ONCE)])

    def _features(self, chars: Tensor) -> Tensor:
        embedded = self.embed(chars).transpose(1, 2)  # (U, E, C)
        return self.activation(torch.cat([filters(embedded).amax(-1) for filters in self.convolve], -1))


class Highway(nn.Module):
    """Highway layer: a gate mixes the transformed input and the input; at first the gate is nearly closed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.transform = nn.Linear(width, width), nn.Linear(width, width)
        for linear, bias in ((self.gate, -2.0), (self.transform, 0.0)):
            nn.init.normal_(linear.weight, std=width**-0.5)
            nn.init.constant_(linear.bias, bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (..., D) to (..., D)."""
        gate = torch.sigmoid(self.gate(inputs))
        return gate * torch.relu(self.transform(inputs)) + (1 - gate) * inputs
