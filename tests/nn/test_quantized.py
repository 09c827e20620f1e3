"""Matrices of 8-bit integers: near enough to the ones that they stand for, and nothing else is touched."""

import pytest
import torch
from torch import nn

from weft.errors import ConfigError
from weft.models.transformer import Transformer, TransformerConfig
from weft.nn.quantized import Int8Linear, lower
from weft.tokens import Tokens


def made(seed=0, **config):
    torch.manual_seed(seed)
    small = {"width": 64, "heads": 4, "layers": 2, "hidden": 128, **config}
    return Transformer(TransformerConfig(name="transformer", **small), 300).eval()


def by_hand(dense, x):
    """Round as the module's docstring says: a scale an output for the weights, and one a token for the input."""
    scale, step = dense.weight.abs().amax(1, keepdim=True) / 127, x.abs().amax(1, keepdim=True) / 127
    weight = torch.round(dense.weight / scale) * scale
    return nn.functional.linear(torch.round(x / step) * step, weight, dense.bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 160])
def test_a_dense_layer_is_its_rounded_self(bias, rows):
    torch.manual_seed(rows)
    dense, x = nn.Linear(96, 40, bias=bias), torch.randn(rows, 96)
    with torch.inference_mode():
        found = Int8Linear(dense)(x)
        torch.testing.assert_close(found, by_hand(dense, x), rtol=1e-4, atol=1e-4)
        apart = (found - dense(x)).norm() / dense(x).norm()
    assert 1e-5 < apart < 0.03


def test_a_token_alone_is_what_it_is_in_a_batch():
    torch.manual_seed(0)
    layer, x = Int8Linear(nn.Linear(64, 300)), torch.randn(9, 64)
    x[4] *= 100  # one scale for all would round the others away
    with torch.inference_mode():
        together = layer(x)
        assert all(torch.equal(layer(x[row : row + 1])[0], together[row]) for row in range(9))
        assert layer(x[:0]).shape == (0, 300)
        assert torch.equal(layer(torch.zeros(2, 64)), layer(torch.zeros(1, 64)).expand(2, -1))


def test_one_large_weight_does_not_spoil_the_other_outputs():
    torch.manual_seed(0)
    dense, x = nn.Linear(64, 8), torch.randn(5, 64)
    dense.weight.data[3, 7] = 100
    with torch.inference_mode():
        apart = (Int8Linear(dense)(x) - dense(x)).abs()
    others = [output for output in range(8) if output != 3]
    assert apart[:, others].max() < 0.1


def test_a_model_in_int8_says_nearly_the_same():
    model, tokens, source = made(), Tokens.pack([[1, 5, 9], [1]]), Tokens.pack([[7, 8, 9, 2], [4, 2]])
    with torch.inference_mode():
        exact = model.logits(tokens, source)
        lower(model, "int8")
        assert not any(isinstance(part, nn.Linear) for part in model.modules())
        found = model.logits(tokens, source)
    assert 1e-6 < (found - exact).norm() / exact.norm() < 0.05


def test_bf16_is_bf16_and_fp32_is_left_alone():
    model = made()
    before = {name: value.clone() for name, value in model.named_parameters()}
    lower(model, "fp32")
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    lower(model, "bf16")
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}


def test_other_precisions_are_refused():
    with pytest.raises(ConfigError, match="precision: must be fp32, bf16 or int8, but is 'int4' instead"):
        lower(made(), "int4")
