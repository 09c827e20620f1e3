"""Pooling of tokens to one vector a sequence, against each sequence by itself."""

import pytest
import torch

from weft.nn.layers.pooling import pool_tokens
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
