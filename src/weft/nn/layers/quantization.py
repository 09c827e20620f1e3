"""Low-precision inference: bf16, or on the CPU int8 weight matrices, a quarter of the bytes.

Weights are stored as round(w / s) with a scale s for each output; inputs are quantized dynamically, with a scale and a
zero point for each token, so that a sequence's result does not depend on the rest of the batch. The sum of the products
is exact on every machine (`weft.nn.kernels.numba.matmul`, after a self-test); it is scaled back to float32. All else,
layer norms, softmax, attention and residuals, stays as it was.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.nn.kernels import dispatch

if TYPE_CHECKING:
    from weft.nn.kernels.numba.matmul import Format, PackedWeights
    from weft.nn.kernels.numba.rowwise import Rows


class Int8Linear(nn.Module):
    """A linear layer whose weight matrix is int8."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        matmul = dispatch.matmul_module()
        self.in_features, self.out_features, self.form = dense.in_features, dense.out_features, _format(dense)
        self.bias = None if dense.bias is None else dense.bias.detach().float()
        quantized = matmul.quantize_weight(dense.weight.detach().float())
        self.packed: PackedWeights = matmul.PackedWeights.integers(*quantized, self.form)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_features) to (N, out_features)."""
        return self.product(dispatch.row_quantizer()(x, self.form))

    def product(self, rows: "Rows", out: Tensor | None = None) -> Tensor:
        """Return the same for tokens that are quantized already."""
        assert rows.integers is not None
        return self.packed.multiply(rows.integers, self.bias, out)


def _format(dense: nn.Linear) -> "Format":
    """Return the format of inputs; raise ConfigError where no integer product is exact."""
    matmul = dispatch.matmul_module()
    form: Format | None = matmul.integer_format()
    if form is None:
        raise ConfigError(
            "precision: a self-test shows that int8 products are not exact on this CPU; take fp32 or bf16"
        )
    if dense.in_features > matmul.WIDEST:
        raise ConfigError(
            f"precision: int8 is exact for layers of up to {matmul.WIDEST:,} inputs, but one has "
            f"{dense.in_features:,}; take fp32 or bf16"
        )
    return form


def lower(module: nn.Module, precision: str) -> None:
    """Convert a module to a precision, in place: fp32 (unchanged), bf16 or int8."""
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
    """Replace every linear layer by an int8 one; embeddings stay as they are."""
    if any(parameter.device.type != "cpu" for parameter in module.parameters()):
        raise ConfigError("precision: int8 is for the CPU, but the model is on a GPU; take bf16")
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, Int8Linear(child))
