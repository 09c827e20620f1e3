"""Attention in compiled loops against the equation, a sequence and a head at a time."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests import transformer_equations as paper

from weft.nn.kernels.numba.attention import ragged_self_attention

pytestmark = pytest.mark.isa
quick = settings(deadline=None, derandomize=True, max_examples=15)


def drawn(lengths, heads, size, seed=0, spread=1.0):
    torch.manual_seed(seed)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return torch.randn(sum(lengths), 3 * heads * size) * spread, starts


def explicit(qkv, starts, heads, causal):
    whole = qkv.unflatten(1, (3, heads, -1)).double()
    out = torch.zeros_like(whole[:, 0])
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        for head in range(heads if last > first else 0):
            out[first:last, head] = paper.attention(*whole[first:last, :, head].unbind(1), causal)[0]
    return out.flatten(1).float()


@pytest.mark.parametrize("causal", [False, True])
@quick
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 40))
@example([4, 1, 0, 9, 3], 2, 32)
@example([70, 33], 1, 64)
def test_it_is_the_equation(causal, lengths, heads, size):
    qkv, starts = drawn(lengths, heads, size)
    output = ragged_self_attention(qkv, starts, heads, causal)
    torch.testing.assert_close(output, explicit(qkv, starts, heads, causal), rtol=1e-5, atol=1e-5)
    if any(length > 1 for length in lengths):
        assert (output - explicit(qkv, starts, heads, not causal)).abs().max() > 1e-4


def test_attention_to_one_key_alone_is_sharp():
    qkv, starts = drawn([12], 2, 8, spread=8.0)  # scores differ by hundreds
    output = ragged_self_attention(qkv, starts, 2, True)
    torch.testing.assert_close(output, explicit(qkv, starts, 2, True), rtol=1e-4, atol=1e-4)
    far = ragged_self_attention(qkv * 1e4, starts, 2, False)
    values = (qkv * 1e4).unflatten(1, (3, 2, 8))[:, 2]
    assert all((far.view(12, 2, 8)[:, head, None] == values[None, :, head]).all(2).any(1).all() for head in range(2))


def test_neighbours_and_the_future_do_not_count():
    qkv, starts = drawn([5, 6, 7], 2, 16)
    other = qkv.clone()
    other[:5] += 1
    other[9:] += 1
    before, after = (ragged_self_attention(each, starts, 2, True) for each in (qkv, other))
    assert torch.equal(before[5:9], after[5:9])
    assert not torch.equal(before[9:11], after[9:11])
