"""The product with a whole vocabulary: of all that a step of generation does, the largest part."""

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.nn.attention.kv_cache import on_triton
from weft.nn.layers.linear import Linear
from weft.nn.rnn.fused.codegen_triton import halved, in_half

_EVEN, _ODD = 64, 8  # on CUDA, rows of a multiple of so many words; a multiple of fewer is slow
_PART = 1024  # outputs at a time; the library's product of few rows with all of them is a quarter slower


class OutputProjection(Linear):
    """A dense layer with many outputs, and no bias unless it is asked for."""

    def __init__(self, width: int, vocab: int, bias: bool = False) -> None:
        super().__init__(width, vocab, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Score the vocabulary: (N, D) to (N, V)."""
        if self.out_features % _ODD and in_half(x):
            return self._oddly(x)
        if torch.is_grad_enabled() or x.device.type != "cpu" or self.out_features < 4 * _PART:
            return super().forward(x)
        found = self.product(x, self.bias)
        if found is not None:
            return found
        out = x.new_empty(len(x), self.out_features)
        for matrix, place in zip(self.weight.split(_PART), out.split(_PART, 1), strict=True):
            torch.mm(x, matrix.t(), out=place)
        return out if self.bias is None else out.add_(self.bias)

    def evened(self) -> tuple[Tensor, Tensor | None]:
        """Return matrix and bias, in the precision of products with it, with rows of nought up to an even number."""
        spare = -self.out_features % _EVEN
        matrix = F.pad(halved(self.weight), (0, 0, 0, spare))
        return matrix, None if self.bias is None else F.pad(halved(self.bias), (0, spare))

    def _oddly(self, x: Tensor) -> Tensor:
        if on_triton(x):
            from weft.nn.kernels.triton.decode_step import MANY, read_out

            if len(x) <= MANY:
                found = read_out(x, self.weight)
                return found if self.bias is None else found.add_(self.bias)
        return F.linear(halved(x), *self.evened())[:, : self.out_features]
