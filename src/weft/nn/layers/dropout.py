"""The dropouts of AWD-LSTM, whose masks last for a sequence, a batch or a pass (Merity et al. 2018, sections 2 and 4).

    variational     x_t ⊙ m, one mask m a sequence and the same at every step t         (Gal & Ghahramani 2016)
    of words        E w ⊙ m_w, one number m_w a word: dropped from the whole batch      (Gal & Ghahramani 2016)
    of weights      (W ⊙ M) h_{t-1}, one mask M a forward pass: DropConnect             (Wan et al. 2013)

A mask holds 0 with probability p, and else 1 / (1 - p), so that the expectation is unchanged. It is for training alone.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.rnn.time_major import TimeMajor


def draw_mask(p: float, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
    """Return a random dropout mask of a shape."""
    return F.dropout(like.new_ones(shape), p)


class SequenceDropout(nn.Module):
    """Dropout of flat (N, D) or time-major (T, B, D) values; if `kept`, variational: one mask a sequence."""

    def __init__(self, p: float, kept: bool = False) -> None:
        super().__init__()
        self.p, self.kept = p, kept

    def forward(self, values: Tensor, grid: TimeMajor | None = None) -> Tensor:
        """Apply dropout; for flat values, `grid` has the sequence of each token."""
        if not (self.training and self.p):
            return values
        if not self.kept:
            return F.dropout(values, self.p)
        mask = draw_mask(self.p, (grid.rows if grid else values.shape[1], values.shape[-1]), values)
        return values * (mask[grid.row] if grid else mask)


class WordDropout(nn.Module):
    """Embedding dropout: whole words of a vocabulary are dropped."""

    def __init__(self, p: float, vocab: int) -> None:
        super().__init__()
        self.p, self.vocab = p, vocab

    def forward(self, embedded: Tensor, ids: Tensor) -> Tensor:
        """Drop the embeddings (..., E) of some words, at all their positions in ids (...)."""
        if not (self.training and self.p):
            return embedded
        return embedded * draw_mask(self.p, (self.vocab, 1), embedded)[ids]
