"""Position encodings of a model, and their dot products.

The first plot shows the vectors, position by dimension. The second shows their dot products: for sinusoidal encodings
they depend on the distance of two positions alone,

    PE(p) · PE(q) = Σ_i cos((p - q) / 10000^(2i/D))                     (from Vaswani et al. 2017, section 3.5)

so it is a band along the diagonal. Learned encodings show how far training reached: beyond the longest text there is
noise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.analysis.render.matrix_plots import MatrixPlot
from weft.errors import RoleError
from weft.nn.attention.positions import Learned, Sinusoidal

WIDTH, COUNT = 128, 100  # width without a model, and the number of positions shown
_DIGITS = 6


@dataclass(frozen=True)
class Positions:
    """The vectors (P, D) of the first positions; `known` is how many the model has, None if unlimited."""

    name: str
    vectors: np.ndarray
    known: int | None = None

    @property
    def similarity(self) -> np.ndarray:
        """The dot products of all pairs, (P, P)."""
        products: np.ndarray = self.vectors @ self.vectors.T
        return products

    @property
    def title(self) -> str:
        """The kind of encoding and the number of positions shown."""
        count, width = self.vectors.shape
        shown = f"the first {count} of {self.known:,}" if self.known and self.known > count else f"{count}"
        return f"{self.name}: {shown} positions, {width} wide"

    def plots(self) -> list[MatrixPlot]:
        """Return the two plots."""
        return [
            MatrixPlot(self.title, self.vectors, "position", "dimension"),
            MatrixPlot("dot product of two positions", self.similarity, "position", "position"),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the data as JSON-ready values."""
        arrays = {"vectors": self.vectors, "similarity": self.similarity}
        rounded = {key: np.round(value.astype(np.float64), _DIGITS).tolist() for key, value in arrays.items()}
        return {"name": self.name, "positions": len(self.vectors), "width": self.vectors.shape[1], **rounded}


def sinusoidal(width: int = WIDTH, count: int = COUNT) -> Positions:
    """Compute the sinusoidal encodings of Vaswani et al. 2017, section 3.5."""
    return Positions("sinusoidal", Sinusoidal(width)(torch.arange(count)).numpy())


def positions_in(model: nn.Module, name: str) -> list[Positions]:
    """Return the position encodings that a model adds to its embeddings; `name` is the model's name in errors."""
    encodings = list(_find_encodings(model))
    if not encodings:
        raise RoleError(
            f"model: {name!r} has no position encodings to draw; give one that has, such as a transformer, or none for "
            "the sinusoidal ones"
        )
    return encodings


def _find_encodings(model: nn.Module) -> Iterator[Positions]:
    for module in model.modules():
        if isinstance(module, Sinusoidal):
            yield sinusoidal(module.width)
        if isinstance(module, Learned):
            table = module.table.weight.detach().float().cpu().numpy()
            yield Positions("learned", table[:COUNT], len(table))
