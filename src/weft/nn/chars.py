"""Words by their characters: a convolution over a word's spelling, of which the maximum over the word is kept.

Section 2.1 of Ma & Hovy 2016, "End-to-end sequence labeling via bi-directional LSTM-CNNs-CRF" (arXiv:1603.01354), and
section 2.3 of Chiu & Nichols 2016, "Named entity recognition with bidirectional LSTM-CNNs" (arXiv:1511.08308). For a
word of C characters with the embeddings x_1..x_C, a filter w over k of them and its feature r:

    c_i = w · x_{i-(k-1)/2 : i+(k-1)/2} + b             at each character i; what lies outside the word is zero
    r   = ReLU(max_i c_i)

The defaults are Ma & Hovy's: k = 3, embeddings of 30, from U(-√(3/30), √(3/30)) (their section 3.1). Departures:
characters are UTF-8 bytes between a sign for the word's beginning and one for its end (`weft.tokens`), as in ELMo
(Peters et al. 2018), whose ReLU is taken over too; dropout is the model's, on what is given here.
"""

import math

import torch
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.tokens import PAD, SYMBOLS, Tokens


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
