"""A dense layer by weft's own product: only where it answers, and never with weights of before."""

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import torch
from torch import nn

from weft.nn.kernels import dispatch
from weft.nn.layers import packed_linear as linear
from weft.nn.layers.packed_linear import Linear, frozen_weights

pytestmark = pytest.mark.isa


def layer(inputs=24, outputs=40, bias=True):
    torch.manual_seed(0)
    return Linear(inputs, outputs, bias)


@pytest.fixture
def packings(monkeypatch):
    """Return the list of matrices that were packed."""
    weights, pack = [], linear._pack
    monkeypatch.setattr(linear, "_pack", lambda weight, scope: weights.append(weight) or pack(weight, scope))
    return weights


def is_library(dense, x):
    return dense.product(x, dense.bias) is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, dispatch.MIN_PACKED_ROWS, 200])
def test_it_is_the_librarys_layer(bias, rows, packings):
    dense, x = layer(bias=bias), torch.randn(rows, 24)
    with torch.no_grad(), frozen_weights():
        torch.testing.assert_close(dense(x), nn.functional.linear(x, dense.weight, dense.bias))
    assert len(packings) == (rows >= dispatch.MIN_PACKED_ROWS)


def test_a_matrix_is_packed_once_in_a_scope_and_forgotten_after_it(packings):
    dense, x = layer(), torch.randn(60, 24)
    with torch.inference_mode():
        dense(x)
        assert not packings
        with frozen_weights():
            dense(x)
            with frozen_weights():
                dense(x[:3])  # few rows use what is there
            dense(x)
        assert len(packings) == 1
        dense(x)
        assert len(packings) == 1
        with frozen_weights():
            dense(x)
        assert len(packings) == 2


def test_weights_that_change_against_the_promise_are_seen():
    dense, x = layer(), torch.randn(60, 24)
    with torch.no_grad(), frozen_weights():
        before = dense(x)
        dense.weight.mul_(2)
        torch.testing.assert_close(dense(x), 2 * before - dense.bias)


def test_a_scope_ends_with_an_error_too():
    with pytest.raises(RuntimeError, match="on the way"), frozen_weights():
        raise RuntimeError("on the way")
    assert not linear._scope.get().users


def test_scopes_may_end_in_any_order(packings):
    dense, x = layer(), torch.randn(60, 24)

    def outputs():
        with frozen_weights():
            while True:
                with torch.inference_mode():
                    output = dense(x)
                yield output

    first, second = outputs(), outputs()
    next(first), next(second)
    ThreadPoolExecutor(1).submit(first.close).result()
    next(second)
    assert len(packings) == 1
    second.close()
    next(outputs())
    assert len(packings) == 2


def test_what_learns_or_is_not_float32_is_the_librarys():
    dense, x = layer(), torch.randn(60, 24)
    with frozen_weights():
        assert is_library(dense, x)  # gradients
        dense(x).sum().backward()
        with torch.no_grad():
            assert not is_library(dense, x)
            assert is_library(dense, x.view(2, 30, 24))
            assert is_library(layer().double(), x.double())
            assert is_library(layer().bfloat16(), x.bfloat16())
            with torch.autocast("cpu", torch.bfloat16):
                assert is_library(dense, x)
                assert dense(x).dtype is torch.bfloat16


def test_threads_share_what_is_packed(packings):
    dense, x = layer(), torch.randn(60, 24)
    with torch.no_grad():
        expected = nn.functional.linear(x, dense.weight, dense.bias)

        def answer(_):
            with torch.inference_mode():
                return dense(x)

        with frozen_weights(), ThreadPoolExecutor(4) as pool:
            for output in [pool.submit(copy_context().run, answer, number).result() for number in range(32)]:
                torch.testing.assert_close(output, expected)
            assert len(packings) <= 4
            assert len(linear._scope.get().cache) == 1
            pool.submit(answer, 0).result()  # another context: nothing is promised there
            assert len(linear._scope.get().cache) == 1
