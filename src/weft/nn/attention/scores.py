"""The six attention score functions of a query q, the decoder's state, and the source's hidden states k_j.

    cosine      β cos(q, k_j),  β = softplus(w · q + b)     Graves et al. 2014, eqs. 5 and 6: content-based
    additive    v · tanh(W_q q + W_k k_j)                   Bahdanau et al. 2015, appendix A.1.2
    location    (W q)_j                                     Luong et al. 2015, eq. 8: from the query alone, by position
    general     q · W k_j                                   Luong et al. 2015, section 3.1
    dot         q · k_j                                     Luong et al. 2015, section 3.1
    scaled-dot  q · k_j / √D                                Vaswani et al. 2017, eq. 1

A score has two steps, so that what depends on the source alone is computed once: `keys` computes the keys from the
hidden states (B, S, D), and `forward` scores queries (B, T, D), any number of them, against these keys: (B, T, S).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Cosine(nn.Module):
    """Content-based addressing: cosine similarity, times a key strength β computed from the query."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.strength = nn.Linear(width, 1)
        nn.init.constant_(self.strength.bias, 4.0)  # cosines lie between -1 and 1: at strength 1 softmax is nearly flat

    def keys(self, memory: Tensor) -> Tensor:
        """Normalise the source's states to length one; padding, a state of zeros, stays zero."""
        return _normalize(memory)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score queries (B, T, D) against keys (B, S, D): (B, T, S)."""
        return F.softplus(self.strength(query)) * _dot(_normalize(query), keys)


class Additive(nn.Module):
    """A feed-forward network with one hidden layer."""

    def __init__(self, query: int, key: int, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(query, hidden, bias=False)
        self.key = nn.Linear(key, hidden)
        self.energy = nn.Linear(hidden, 1, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        """Project the source's states: (B, S, D) to (B, S, A)."""
        projected: Tensor = self.key(memory)
        return projected

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score queries (B, T, D) against projected keys (B, S, A): (B, T, S)."""
        hidden = torch.tanh(keys[:, None] + self.query(query)[:, :, None])  # (B, T, S, A)
        scores: Tensor = self.energy(hidden)
        return scores.squeeze(-1)


class Location(nn.Module):
    """Location-based scores of source positions, from the query alone, whatever the states are.

    As in Luong et al. 2015, a short source uses the first positions; positions from `positions` on get no attention.
    """

    def __init__(self, width: int, positions: int) -> None:
        super().__init__()
        self.place = nn.Linear(width, positions, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        """Return the states as they are: only their number is used."""
        return memory

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score queries (B, T, D) for the S positions of keys (B, S, D): (B, T, S)."""
        scores: Tensor = self.place(query)
        missing = keys.shape[1] - scores.shape[-1]
        if missing <= 0:
            return scores[..., : keys.shape[1]]
        return F.pad(scores, (0, missing), value=torch.finfo(scores.dtype).min)


class General(nn.Module):
    """A bilinear score."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key = nn.Linear(width, width, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        """Project the source's states: (B, S, D) to (B, S, D)."""
        projected: Tensor = self.key(memory)
        return projected

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score queries (B, T, D) against projected keys (B, S, D): (B, T, S)."""
        return _dot(query, keys)


class Dot(nn.Module):
    """A dot product; `scale` is 1, or 1/√D for the scaled form."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def keys(self, memory: Tensor) -> Tensor:
        """Return the states as they are."""
        return memory

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score queries (B, T, D) against keys (B, S, D): (B, T, S)."""
        return _dot(query * self.scale, keys)


Score = Cosine | Additive | Location | General | Dot


def make_score(name: str, width: int, positions: int) -> Score:
    """Return the score of that name, for queries and states of the same width."""
    match name:
        case "cosine":
            return Cosine(width)
        case "additive":
            return Additive(width, width, width)
        case "location":
            return Location(width, positions)
        case "general":
            return General(width)
        case "dot":
            return Dot()
        case _:
            assert name == "scaled-dot", name
            return Dot(width**-0.5)


def _normalize(vectors: Tensor) -> Tensor:
    """Normalise vectors (..., D) to length one; zeros stay zeros, in float16 too, where the usual eps of 1e-12 is 0."""
    return F.normalize(vectors, dim=-1, eps=max(1e-12, torch.finfo(vectors.dtype).tiny))


def _dot(query: Tensor, keys: Tensor) -> Tensor:
    return torch.bmm(query, keys.transpose(1, 2))


def attend(scores: Tensor, memory: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
    """Return contexts softmax(scores) memory, (B, T, D), and weights (B, T, S); `empty` (B, S) is the padding mask."""
    # Not -inf: after softmax this is zero too, and a row that is all padding does not become NaN.
    weights = torch.softmax(scores.masked_fill(empty[:, None], torch.finfo(scores.dtype).min), -1)
    return torch.bmm(weights, memory), weights
