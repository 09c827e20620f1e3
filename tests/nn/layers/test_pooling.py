"""Pooling of tokens to one vector a sequence, against each sequence by itself."""

import pytest
import torch

from weft.nn.layers.pooling import concat_pool, pool_tokens
from weft.tokens import Tokens

TOKENS = Tokens.pack([[1, 2, 3], [4], [5, 6]])
POOLS = {
    "mean": lambda states: states.mean(0),
    "max": lambda states: states.amax(0),
    "cls": lambda states: states[0],
    "last": lambda states: states[-1],
}


@pytest.mark.parametrize("pool", POOLS)
def test_each_sequence_is_pooled_by_itself(pool):
    states = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    pooled = pool_tokens(states, TOKENS, pool)
    torch.testing.assert_close(pooled, torch.stack([POOLS[pool](part) for part in TOKENS.split(states)]))
    assert torch.autograd.gradcheck(lambda values: pool_tokens(values, TOKENS, pool), (states,))


def test_layers_are_pooled_at_once_where_a_token_stands_for_all():
    states = torch.arange(48.0).view(2, 6, 4)
    torch.testing.assert_close(pool_tokens(states, TOKENS, "last"), states[:, [2, 3, 5]])


def test_means_of_half_precision_are_taken_in_float32():
    states = torch.full((6, 1), 1.0, dtype=torch.bfloat16)
    states[0] = 1.0078125  # the next number in bf16
    assert pool_tokens(states, TOKENS, "mean")[0].item() == pytest.approx(1.0026042)
    assert pool_tokens(states, TOKENS, "cls").dtype == torch.bfloat16


def test_concat_pooling_is_equation_4_of_each_sequence_by_itself():
    rng = torch.Generator().manual_seed(0)
    states = torch.randn(6, 4, dtype=torch.float64, generator=rng, requires_grad=True)
    final = torch.randn(3, 4, dtype=torch.float64, generator=rng)
    parts = TOKENS.split(states)
    expected = [torch.cat([h, part.amax(0), part.mean(0)]) for h, part in zip(final, parts, strict=True)]
    torch.testing.assert_close(concat_pool(final, states, TOKENS), torch.stack(expected))
    assert torch.autograd.gradcheck(lambda values: concat_pool(final, values, TOKENS), (states,))


def test_an_empty_sequence_that_pads_a_batch_adds_nothing_and_no_nan():
    tokens = Tokens.pack([[1, 2], []])
    states = torch.randn(2, 3, requires_grad=True)
    pooled = concat_pool(torch.zeros(2, 3), states, tokens)
    assert not pooled[1].any()
    pooled.sum().backward()
    assert states.grad.isfinite().all()
