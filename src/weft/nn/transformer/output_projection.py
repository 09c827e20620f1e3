"""Output projection to the logits of a vocabulary: the most expensive part of a generation step."""

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.nn.attention.kv_cache import on_triton
from weft.nn.layers.packed_linear import Linear
from weft.nn.rnn.fused.codegen_triton import is_half, to_half

_PAD_TO, _ALIGNED = 64, 8  # on CUDA, logits whose number is no multiple of 8 are slow: they are padded to one of 64
_CHUNK = 1024  # outputs at a time; PyTorch's product of few rows with all of them is a quarter slower


class OutputProjection(Linear):
    """A linear layer with many outputs, by default without bias."""

    def __init__(self, width: int, vocab: int, bias: bool = False) -> None:
        super().__init__(width, vocab, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, V) of hidden states (N, D)."""
        if self.out_features % _ALIGNED and is_half(x):
            return self._padded_product(x)
        if torch.is_grad_enabled() or x.device.type != "cpu" or self.out_features < 4 * _CHUNK:
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
        weight = F.pad(to_half(self.weight), (0, 0, 0, padding))
        return weight, None if self.bias is None else F.pad(to_half(self.bias), (0, padding))

    def _padded_product(self, x: Tensor) -> Tensor:
        if on_triton(x):
            from weft.nn.kernels.triton.decode_step import MAX_ROWS, linear_large_vocab

            if len(x) <= MAX_ROWS:
                logits = linear_large_vocab(x, self.weight)
                return logits if self.bias is None else logits.add_(self.bias)
        return F.linear(to_half(x), *self.padded_parameters())[:, : self.out_features]
