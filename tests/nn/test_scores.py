"""Additive attention against its equation; empty places weigh nothing, and spread nothing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.nn.scores import Additive, attend

quick = settings(deadline=None, derandomize=True, max_examples=50)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_additive_is_bahdanaus_equation():
    """Appendix A.1.2 of Bahdanau et al. 2015, number by number."""
    torch.manual_seed(0)
    score, query, memory = Additive(3, 4, 5).double(), draw(2, 3), draw(2, 6, 4)
    W, U, b, v = (
        value.detach() for value in (score.query.weight, score.key.weight, score.key.bias, score.energy.weight)
    )
    got = score(query, score.keys(memory)).detach()
    for row in range(2):
        for place in range(6):
            hidden = [math.tanh(sum(W[a] * query[row]) + sum(U[a] * memory[row, place]) + b[a]) for a in range(5)]
            must = sum(float(v[0, a]) * hidden[a] for a in range(5))
            assert got[row, place].item() == pytest.approx(must, abs=1e-12)


def test_additive_and_attend_have_the_gradient_of_their_function():
    torch.manual_seed(0)
    score = Additive(3, 2, 4).double()
    empty = torch.tensor([[False, False, True], [False, True, True]])

    def look(query, memory, *parameters):
        names = [name for name, _ in score.named_parameters()]
        keys = torch.func.functional_call(
            score, dict(zip(names, parameters, strict=True)), (query, memory @ parameters[1].T)
        )
        return attend(keys, memory, empty)

    inputs = [draw(2, 3), draw(2, 3, 2), *(value.detach().clone() for value in score.parameters())]
    assert torch.autograd.gradcheck(look, [value.requires_grad_() for value in inputs])


@quick
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 99))
def test_a_row_attends_to_its_real_places_as_if_there_were_no_others(lengths, seed):
    torch.manual_seed(seed)
    rows, places = len(lengths), max(lengths)
    empty = torch.arange(places) >= torch.tensor(lengths)[:, None]
    scores, memory = draw(rows, places), draw(rows, places, 3)
    context, weights = attend(scores, memory, empty)
    assert not weights[empty].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(rows, dtype=torch.float64))
    for row, length in enumerate(lengths):
        alone = torch.softmax(scores[row, :length], -1)
        torch.testing.assert_close(weights[row, :length], alone)
        torch.testing.assert_close(context[row], alone @ memory[row, :length])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_stands_in_empty_places_cannot_matter(dtype):
    scores, memory = torch.tensor([[-3e4, -3e4, 0.0]], dtype=dtype), torch.tensor([[[1.0], [3.0], [0.0]]], dtype=dtype)
    empty = torch.tensor([[False, False, True]])
    before = attend(scores, memory, empty)
    scores[0, 2], memory[0, 2] = 6e4, 100.0
    for got, must in zip(attend(scores, memory, empty), before, strict=True):
        assert torch.equal(got, must)
    assert before[0].item() == 2.0


def test_a_row_with_no_real_place_spreads_no_nan():
    scores, memory = draw(2, 3).requires_grad_(), torch.zeros(2, 3, 4, dtype=torch.float64)
    empty = torch.tensor([[False] * 3, [True] * 3])
    memory[0] = draw(3, 4)
    context, _ = attend(scores, memory.requires_grad_(), empty)
    context[0].sum().backward()
    assert not context[1].any()
    assert not scores.grad[1].any()
    assert not memory.grad[1].any()


def test_minus_infinity_would_spread_nan():
    """The negative control for the test above."""
    memory, empty = draw(2, 3, 4).requires_grad_(), torch.tensor([[False] * 3, [True] * 3])
    weights = torch.softmax(draw(2, 3).masked_fill(empty, float("-inf")), -1)
    torch.bmm(weights[:, None], memory)[0].sum().backward()
    assert memory.grad[1].isnan().all()
