"""Output projection to the logits of a vocabulary: the most expensive part of a generation step."""

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.nn.kernels import dispatch
from weft.nn.layers.packed_linear import Linear

_PAD_TO = 64  # outputs, where their number is not aligned
_CHUNK = 1024  # outputs at a time, where PyTorch's product of few rows with all of them is a quarter slower


class OutputProjection(Linear):
    """A linear layer with many outputs, by default without bias."""

    def __init__(self, width: int, vocab: int, bias: bool = False) -> None:
        super().__init__(width, vocab, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, V) of hidden states (N, D)."""
        if dispatch.pads_vocab(x, self.out_features):
            return self._padded_product(x)
        if not dispatch.chunks_vocab(x, self.out_features):
            return super().forward(x)
        logits = self.product(x, self.bias)
        if logits is not None:
            return logits
        out = x.new_empty(len(x), self.out_features)
        for weight, chunk in zip(self.weight.split(_CHUNK), out.split(_CHUNK, 1), strict=True):
            torch.mm(x, weight.t(), out=chunk)
        return out if self.bias is None else out.add_(self.bias)

    def padded_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias in the dtype of the product, zero-padded to a multiple of 64 outputs."""
        padding = -self.out_features % _PAD_TO
        weight = F.pad(dispatch.to_half(self.weight), (0, 0, 0, padding))
        return weight, None if self.bias is None else F.pad(dispatch.to_half(self.bias), (0, padding))

    def _padded_product(self, x: Tensor) -> Tensor:
        if linear_large_vocab := dispatch.large_vocab_kernel(x):
            logits: Tensor = linear_large_vocab(x, self.weight)
            return logits if self.bias is None else logits.add_(self.bias)
        return F.linear(dispatch.to_half(x), *self.padded_parameters())[:, : self.out_features]
