"""The softmax over groups is that of each group by itself, and what is in none has no part in it."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.nn.layers.segment_ops import MASKED_SCORE, segment_logsumexp


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 2**31), st.floats(-1e4, 1e4))
def test_each_group_is_summed_by_itself(sizes, seed, shift):
    torch.manual_seed(seed)
    parts = [torch.randn(size, dtype=torch.float64) * 30 + shift * number for number, size in enumerate(sizes)]
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    found = segment_logsumexp(torch.cat(parts), groups, len(sizes))
    torch.testing.assert_close(found, torch.stack([part.logsumexp(0) for part in parts]))


def test_the_gradient_is_the_softmax_and_an_empty_or_a_closed_group_spoils_nothing():
    scores = torch.tensor([1.0, 2.0, -3.0, MASKED_SCORE, MASKED_SCORE], requires_grad=True)
    found = segment_logsumexp(scores, torch.tensor([0, 0, 1, 3, 3]), 4)
    assert found[2] == -torch.inf
    torch.where(torch.tensor([True, True, False, False]), found, 0).sum().backward()
    expected = [*torch.tensor([1.0, 2.0]).softmax(0).tolist(), 1.0, 0.0, 0.0]
    torch.testing.assert_close(scores.grad, torch.tensor(expected))
