"""Where tokens stand, as a model has it: the vectors of its positions, and how like one another they are.

The first picture is that of the vectors, position by dimension. The second is that of their dot products: of the
sinusoidal ones it hangs on the distance of two positions alone,

    PE(p) · PE(q) = Σ_i cos((p - q) / 10000^(2i/D))                     (from Vaswani et al. 2017, section 3.5)

so it is a band along the diagonal. What is learned shows how far training got: beyond the longest text there is noise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.analysis.render.matrix_plots import Grid
from weft.errors import RoleError
from weft.nn.attention.positions import Learned, Sinusoidal

WIDTH, COUNT = 128, 100  # how wide they are with no model, and how many are shown of any
_DIGITS = 6


@dataclass(frozen=True)
class Positions:
    """The vectors (P, D) of the first positions; `known` is how many the model has, None where there is no end."""

    name: str
    vectors: np.ndarray
    known: int | None = None

    @property
    def similarity(self) -> np.ndarray:
        """The dot product of each two, (P, P)."""
        found: np.ndarray = self.vectors @ self.vectors.T
        return found

    @property
    def title(self) -> str:
        """What they are, and how many are shown."""
        count, width = self.vectors.shape
        of = f"the first {count} of {self.known:,}" if self.known and self.known > count else f"{count}"
        return f"{self.name}: {of} positions, {width} wide"

    def grids(self) -> list[Grid]:
        """Return the two pictures."""
        return [
            Grid(self.title, self.vectors, "position", "dimension"),
            Grid("dot product of two positions", self.similarity, "position", "position"),
        ]

    def plain(self) -> dict[str, Any]:
        """Return it as JSON-ready numbers and words."""
        arrays = {"vectors": self.vectors, "similarity": self.similarity}
        numbers = {key: np.round(value.astype(np.float64), _DIGITS).tolist() for key, value in arrays.items()}
        return {"name": self.name, "positions": len(self.vectors), "width": self.vectors.shape[1], **numbers}


def sinusoidal(width: int = WIDTH, count: int = COUNT) -> Positions:
    """Compute the encodings of Vaswani et al. 2017."""
    return Positions("sinusoidal", Sinusoidal(width)(torch.arange(count)).numpy())


def positions_in(model: nn.Module, name: str) -> list[Positions]:
    """Find the positions that a model adds to its embeddings; `name` is what an error calls it."""
    found = list(_found(model))
    if not found:
        raise RoleError(
            f"model: {name!r} has no position encodings to draw; give one that has, such as a transformer, or none for "
            "the sinusoidal ones"
        )
    return found


def _found(model: nn.Module) -> Iterator[Positions]:
    for part in model.modules():
        if isinstance(part, Sinusoidal):
            yield sinusoidal(part.width)
        if isinstance(part, Learned):
            table = part.table.weight.detach().float().cpu().numpy()
            yield Positions("learned", table[:COUNT], len(table))
