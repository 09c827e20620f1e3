"""Activation functions of feed-forward layers, by name."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

Activation = Literal["relu", "gelu", "gelu-tanh", "silu"]


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GPT's GELU, by tanh: 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))) (Hendrycks & Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": gelu_tanh,
    "silu": F.silu,
}
