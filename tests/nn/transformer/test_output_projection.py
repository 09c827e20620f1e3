"""The product with a vocabulary, part by part, is the product."""

import pytest
import torch

from weft.nn.transformer.output_projection import OutputProjection


@pytest.mark.parametrize("vocab", [10, 4096, 5000])
@pytest.mark.parametrize("rows", [0, 1, 160])
@pytest.mark.parametrize("bias", [False, True])
def test_parts_make_up_the_whole(vocab, rows, bias):
    torch.manual_seed(vocab + rows)
    layer, x = OutputProjection(32, vocab, bias), torch.randn(rows, 32)
    with torch.inference_mode():
        found = layer(x)
    torch.testing.assert_close(found, layer(x).detach(), rtol=1e-5, atol=1e-5)
    assert found.shape == (rows, vocab)


def test_it_learns():
    layer, x = OutputProjection(8, 5000), torch.randn(3, 8)
    layer(x).square().sum().backward()
    assert layer.weight.grad.abs().sum() > 0


def test_rows_of_nought_make_it_even():
    layer = OutputProjection(8, 131, bias=True)
    even, shift = layer.padded_parameters()
    assert even.shape == (192, 8)
    assert torch.equal(shift[:131], layer.bias)
    assert not shift[131:].any()
    assert torch.equal(even[:131], layer.weight)
    assert not even[131:].any()
    assert OutputProjection(8, 128).padded_parameters()[0].shape == (128, 8)
    assert OutputProjection(8, 128).padded_parameters()[1] is None
