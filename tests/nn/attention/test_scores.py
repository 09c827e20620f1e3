"""The six attention scores against their equations; padding has weight zero, and no influence."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.nn.attention.scores import Additive, Location, attend, make_score


def scored(score, query, memory):
    """One query a row: (B, D) and (B, S, D) to (B, S)."""
    return score(query[:, None], score.keys(memory))[:, 0]


quick = settings(deadline=None, derandomize=True, max_examples=25)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_additive_is_bahdanaus_equation():
    """Appendix A.1.2 of Bahdanau et al. 2015, number by number."""
    torch.manual_seed(0)
    score, query, memory = Additive(3, 4, 5).double(), draw(2, 3), draw(2, 6, 4)
    W, U, b, v = (
        value.detach() for value in (score.query.weight, score.key.weight, score.key.bias, score.energy.weight)
    )
    actual = scored(score, query, memory).detach()
    for row in range(2):
        for place in range(6):
            hidden = [math.tanh(sum(W[a] * query[row]) + sum(U[a] * memory[row, place]) + b[a]) for a in range(5)]
            expected = sum(float(v[0, a]) * hidden[a] for a in range(5))
            assert actual[row, place].item() == pytest.approx(expected, abs=1e-12)


SCORES = ["cosine", "additive", "location", "general", "dot", "scaled-dot"]


def by_equation(name, score, query, key, place):
    """One score by its paper's equation, in plain Python."""

    def dot(one, other):
        return sum(float(a) * float(b) for a, b in zip(one, other, strict=True))

    def through(matrix, vector):
        return [dot(row, vector) for row in matrix]

    weights = {part: value.detach().tolist() for part, value in score.named_parameters()}
    match name:
        case "cosine":
            strength = math.log1p(math.exp(dot(weights["strength.weight"][0], query) + weights["strength.bias"][0]))
            return strength * dot(query, key) / math.sqrt(dot(query, query) * dot(key, key))
        case "additive":
            sums = zip(through(weights["query.weight"], query), through(weights["key.weight"], key), strict=True)
            hidden = [math.tanh(a + b + c) for (a, b), c in zip(sums, weights["key.bias"], strict=True)]
            return dot(weights["energy.weight"][0], hidden)
        case "location":
            return through(weights["place.weight"], query)[place]
        case "general":
            return dot(query, through(weights["key.weight"], key))
        case "dot":
            return dot(query, key)
    return dot(query, key) / math.sqrt(len(query))


@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_its_equation(name):
    torch.manual_seed(1)
    score, query, memory = make_score(name, 4, positions=9).double(), draw(3, 4), draw(3, 5, 4)
    actual = scored(score, query, memory)
    for row in range(3):
        for place in range(5):
            expected = by_equation(name, score, query[row].tolist(), memory[row, place].tolist(), place)
            assert actual[row, place].item() == pytest.approx(expected, abs=1e-10)


def test_the_equation_of_another_score_is_caught():
    torch.manual_seed(1)
    score, query, memory = make_score("scaled-dot", 4, positions=9).double(), draw(1, 4), draw(1, 2, 4)
    actual = scored(score, query, memory)[0, 1].item()
    assert actual != pytest.approx(by_equation("dot", score, query[0].tolist(), memory[0, 1].tolist(), 1), abs=1e-3)


@pytest.mark.parametrize("name", SCORES)
def test_scores_and_attend_have_the_gradient_of_their_function(name):
    torch.manual_seed(2)
    score = make_score(name, 3, positions=2).double()  # shorter than the longest source
    empty = torch.tensor([[False, False, False], [False, True, True]])

    def look(query, memory, *_):
        return attend(score(query, score.keys(memory)), memory, empty)

    inputs = [draw(2, 2, 3).requires_grad_(), draw(2, 3, 3).requires_grad_(), *score.parameters()]
    assert torch.autograd.gradcheck(look, inputs)


@pytest.mark.parametrize("name", SCORES)
def test_many_queries_at_once_are_each_of_them_alone(name):
    torch.manual_seed(3)
    score, queries, memory = make_score(name, 4, positions=3).double(), draw(2, 5, 4), draw(2, 6, 4)
    actual = score(queries, score.keys(memory))
    for step in range(5):
        torch.testing.assert_close(actual[:, step], scored(score, queries[:, step], memory))


def test_location_looks_no_further_than_its_positions():
    torch.manual_seed(0)
    score, query, memory = Location(4, positions=3), torch.randn(2, 1, 4), torch.randn(2, 7, 4)
    _, weights = attend(score(query, score.keys(memory)), memory, torch.zeros(2, 7, dtype=torch.bool))
    assert not weights[..., 3:].any()
    assert (weights[..., :3] > 0).all()


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

    inputs = [draw(2, 2, 3), draw(2, 3, 2), *(value.detach().clone() for value in score.parameters())]
    assert torch.autograd.gradcheck(look, [value.requires_grad_() for value in inputs])


@quick
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 99))
def test_a_row_attends_to_its_real_places_as_if_there_were_no_others(lengths, seed):
    torch.manual_seed(seed)
    rows, places = len(lengths), max(lengths)
    empty = torch.arange(places) >= torch.tensor(lengths)[:, None]
    scores, memory = draw(rows, places), draw(rows, places, 3)
    context, weights = (part[:, 0] for part in attend(scores[:, None], memory, empty))
    assert not weights[empty].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(rows, dtype=torch.float64))
    for row, length in enumerate(lengths):
        alone = torch.softmax(scores[row, :length], -1)
        torch.testing.assert_close(weights[row, :length], alone)
        torch.testing.assert_close(context[row], alone @ memory[row, :length])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_stands_in_empty_places_cannot_matter(dtype):
    scores, memory = (
        torch.tensor([[[-3e4, -3e4, 0.0]]], dtype=dtype),
        torch.tensor([[[1.0], [3.0], [0.0]]], dtype=dtype),
    )
    empty = torch.tensor([[False, False, True]])
    before = attend(scores, memory, empty)
    scores[0, 0, 2], memory[0, 2] = 6e4, 100.0
    for actual, expected in zip(attend(scores, memory, empty), before, strict=True):
        assert torch.equal(actual, expected)
    assert before[0].item() == 2.0


def test_a_row_with_no_real_place_spreads_no_nan():
    scores, memory = draw(2, 1, 3).requires_grad_(), torch.zeros(2, 3, 4, dtype=torch.float64)
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
