"""Fewer bits for inference: bf16, or on the CPU matrices of 8-bit integers, a quarter of the bytes.

A weight is kept as round(w / s) with a scale s for each output, s = max |w| / 127; an input is rounded on the fly, with
a scale for each token, so that a sequence's answer does not depend on its neighbours. The sum of the products is exact;
it is scaled back to float32. Nothing else is rounded: norms, softmax, attention and residuals stay as they were.
"""

import warnings

import torch
from torch import Tensor, nn

from weft.errors import ConfigError

_ROWS = 160  # for so many tokens at a time the library lays a matrix out
_MIDDLE = 128  # stands for 0 among the unsigned bytes that inputs are rounded to: signed ones have no fast product


class Int8Linear(nn.Module):
    """A dense layer whose matrix is in 8-bit integers."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = dense.in_features, dense.out_features
        weight = dense.weight.detach().float()
        self._scale = weight.abs().amax(1).clamp(min=1e-12) / 127
        self._zero = torch.zeros(len(weight), dtype=torch.long)
        self.bias = None if dense.bias is None else dense.bias.detach().float()
        rounded = torch.round(weight / self._scale[:, None]).to(torch.int8)
        with warnings.catch_warnings():  # of PyTorch's about the future of its older ways to do this
            warnings.simplefilter("ignore")
            self._packed = torch.ops.onednn.qlinear_prepack(rounded, [_ROWS, self.in_features])

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_features) to (N, out_features)."""
        if not len(x):
            return x.new_zeros(0, self.out_features)
        from weft.nn.rows_cpu import round_rows

        rounded = round_rows(x)
        found = self.product(rounded.bytes_)
        return found.mul_(rounded.scale) if self.bias is None else torch.addcmul(self.bias, found, rounded.scale)

    def product(self, bytes_: Tensor) -> Tensor:
        """Multiply tokens that are rounded, (N, in_features); what is found is yet to be scaled, and shifted."""
        weight = (self._packed, self._scale, self._zero)
        found: Tensor = torch.ops.onednn.qlinear_pointwise(
            bytes_, 1.0, _MIDDLE, *weight, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return found


def lower(module: nn.Module, precision: str) -> None:
    """Bring a module to a precision, in place: fp32 (as it is), bf16 or int8."""
    match precision:
        case "fp32":
            return
        case "bf16":
            module.to(torch.bfloat16)
        case "int8":
            _quantize(module)
        case _:
            raise ConfigError(f"precision: must be fp32, bf16 or int8, but is {precision!r} instead")


def _quantize(module: nn.Module) -> None:
    """Put every dense layer into 8-bit integers; embeddings stay as they are."""
    if any(parameter.device.type != "cpu" for parameter in module.parameters()):
        raise ConfigError("precision: int8 is for the CPU, but the model is on a GPU; take bf16")
    if "onednn" not in torch.backends.quantized.supported_engines:
        raise ConfigError("precision: this build of PyTorch has no int8 products; take fp32 or bf16")
    for part in list(module.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.Linear):
                setattr(part, name, Int8Linear(child))
