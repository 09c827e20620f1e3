"""Inference in fewer bits: bf16, or on the CPU matrices of 8-bit integers, a quarter of the bytes.

A weight is kept as round(w / s) with a scale s for each output; an input is rounded on the fly, with a scale and a zero
for each token, so that a sequence's answer does not depend on its neighbours. The sum of the products is exact on every
machine (`weft.nn.kernels.numba.matmul`, after a self-test); it is scaled back to float32. Nothing else is rounded:
norms, softmax, attention and residuals stay as they were.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.nn.kernels.numba.matmul import Format
    from weft.nn.kernels.numba.rowwise import Rows


class Int8Linear(nn.Module):
    """A dense layer whose matrix is in 8-bit integers."""

    def __init__(self, dense: nn.Linear) -> None:
        from weft.nn.kernels.numba.matmul import PackedWeights, quantize_weight

        super().__init__()
        self.in_features, self.out_features, self.form = dense.in_features, dense.out_features, _format(dense)
        self.bias = None if dense.bias is None else dense.bias.detach().float()
        self._packed = PackedWeights.integers(*quantize_weight(dense.weight.detach().float()), self.form)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_features) to (N, out_features)."""
        from weft.nn.kernels.numba.rowwise import quantize_rows

        return self.product(quantize_rows(x, self.form))

    def product(self, rows: "Rows", out: Tensor | None = None) -> Tensor:
        """Do the same with tokens that are rounded already."""
        assert rows.integers is not None
        return self._packed.multiply(rows.integers, self.bias, out)


def _format(dense: nn.Linear) -> "Format":
    """Return the format of inputs; refuse where no product of integers is exact."""
    from weft.nn.kernels.numba.matmul import WIDEST, integer_format

    form = integer_format()
    if form is None:
        raise ConfigError(
            "precision: a self-test shows that int8 products are not exact on this CPU; take fp32 or bf16"
        )
    if dense.in_features > WIDEST:
        raise ConfigError(
            f"precision: int8 is exact for layers of up to {WIDEST:,} inputs, but one has {dense.in_features:,}; take "
            "fp32 or bf16"
        )
    return form


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
    for part in list(module.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.Linear):
                setattr(part, name, Int8Linear(child))
