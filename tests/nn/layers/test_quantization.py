"""Matrices of 8-bit integers: near enough to the ones that they stand for, and nothing else is touched."""

import pytest
import torch
from torch import nn

from weft.errors import ConfigError
from weft.models.transformer import Transformer, TransformerConfig
from weft.nn.kernels.numba import matmul
from weft.nn.kernels.numba.matmul import WIDEST, integer_format, quantize_weight
from weft.nn.layers.quantization import Int8Linear, lower
from weft.tokens import Tokens

pytestmark = pytest.mark.isa


def small_model(seed=0, **config):
    torch.manual_seed(seed)
    small = {"width": 64, "heads": 4, "layers": 2, "ffn_width": 128, **config}
    return Transformer(TransformerConfig(name="transformer", **small), 300).eval()


def rounded(x, steps):
    """Round each row to `steps` + 1 values between its least and its greatest, one of which is 0."""
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    scale = (high - low) / steps
    return torch.round(x / scale) * scale, scale


def by_hand(dense, x):
    """Round as the module's docstring says: a scale an output for the weights, a scale and a zero a token for x."""
    weight, scale = quantize_weight(dense.weight)
    return nn.functional.linear(rounded(x, integer_format().steps)[0], weight * scale[:, None], dense.bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 160])
def test_a_dense_layer_is_its_rounded_self(bias, rows):
    torch.manual_seed(rows)
    dense, x = nn.Linear(96, 40, bias=bias), torch.randn(rows, 96)
    with torch.inference_mode():
        output, expected = Int8Linear(dense)(x), by_hand(dense, x)
        # A value that lies between two steps may be rounded either way, which changes an output by a step of it.
        step = rounded(x, integer_format().steps)[1] * dense.weight.abs().max()
        assert ((output - expected).abs() <= 1e-5 + 1.01 * step).all()
        assert ((output - expected).abs() <= 1e-5).float().mean() > 0.9
        apart = (output - dense(x)).norm() / dense(x).norm()
    assert 1e-5 < apart < 0.02


@pytest.mark.parametrize("sign", [1, -1])
def test_values_at_both_ends_of_the_range_do_not_saturate(sign):
    """Neighbouring products of the same sign, as large as they can be: the hardest case for sums in 16 bits."""
    dense, x = nn.Linear(64, 32, bias=False), torch.ones(20, 64)
    x[::2] *= -1
    with torch.inference_mode():
        dense.weight.fill_(sign)
        output, expected = Int8Linear(dense)(x), dense(x)
        torch.testing.assert_close(output, expected, rtol=0.008, atol=0)  # half a step of 63.5
        saturated = expected * (32767 / (2 * 255 * 127))  # what 16 bits would leave of it
        assert ((output - saturated).abs() > 0.1 * expected.abs()).all()


def test_a_token_alone_is_what_it_is_in_a_batch():
    torch.manual_seed(0)
    layer, x = Int8Linear(nn.Linear(64, 300)), torch.randn(9, 64)
    x[4] *= 100  # one scale for all would round the others away
    with torch.inference_mode():
        together = layer(x)
        assert all(torch.equal(layer(x[row : row + 1])[0], together[row]) for row in range(9))
        assert layer(x[:0]).shape == (0, 300)
        assert torch.equal(layer(torch.zeros(2, 64)), layer(torch.zeros(1, 64)).expand(2, -1))


def test_what_is_not_a_number_is_not_hidden():
    layer, x = Int8Linear(nn.Linear(64, 30)), torch.randn(3, 64)
    x[1, 5] = torch.nan
    with torch.inference_mode():
        assert layer(x).isnan().all(1).tolist() == [False, True, False]


def test_one_large_weight_does_not_spoil_the_other_outputs():
    torch.manual_seed(0)
    dense, x = nn.Linear(64, 8), torch.randn(5, 64)
    dense.weight.data[3, 7] = 100
    with torch.inference_mode():
        apart = (Int8Linear(dense)(x) - dense(x)).abs()
    others = [output for output in range(8) if output != 3]
    assert apart[:, others].max() < 0.1


def test_a_model_in_int8_says_nearly_the_same():
    model, tokens, source = small_model(), Tokens.pack([[1, 5, 9], [1]]), Tokens.pack([[7, 8, 9, 2], [4, 2]])
    with torch.inference_mode():
        exact = model.logits(tokens, source)
        lower(model, "int8")
        assert not any(isinstance(part, nn.Linear) for part in model.modules())
        logits = model.logits(tokens, source)
    assert 1e-6 < (logits - exact).norm() / exact.norm() < 0.05


def test_a_machine_whose_products_are_not_exact_is_refused(monkeypatch):
    matmul.integer_format.cache_clear()
    monkeypatch.setattr(matmul, "is_exact", lambda form: False)
    try:
        with pytest.raises(ConfigError, match="not exact on this CPU; take fp32 or bf16"):
            lower(small_model(), "int8")
    finally:
        matmul.integer_format.cache_clear()


def test_a_layer_whose_sums_might_overflow_is_refused():
    with pytest.raises(ConfigError, match=f"up to {WIDEST:,} inputs, but one has {WIDEST + 1:,}; take fp32 or bf16"):
        Int8Linear(nn.Linear(WIDEST + 1, 1))
    assert WIDEST * 127 * max(matmul.UINT8.steps, matmul.INT16.steps) < 2**31


def test_bf16_is_bf16_and_fp32_is_left_alone():
    model = small_model()
    before = {name: value.clone() for name, value in model.named_parameters()}
    lower(model, "fp32")
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    lower(model, "bf16")
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}


def test_other_precisions_are_refused():
    with pytest.raises(ConfigError, match="precision: must be fp32, bf16 or int8, but is 'int4' instead"):
        lower(small_model(), "int4")
