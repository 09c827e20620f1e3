"""The sum of cross-entropies, by torch's own and by its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from weft.nn.layers.losses import (
    binary_cross_entropy_sum,
    contrastive_sum,
    cosine_distance_sum,
    cross_entropy_sum,
    read_out_sum,
    soft_binary_cross_entropy_sum,
    soft_cross_entropy_sum,
    squared_error_sum,
)
from weft.nn.transformer.output_projection import OutputProjection

quick = settings(deadline=None, derandomize=True, max_examples=25)


@quick
@given(st.integers(1, 9), st.integers(2, 12), st.sampled_from([0.0, 0.1, 0.5]), st.integers(0, 99))
def test_it_is_torchs_mean_times_the_count_and_the_definition(rows, vocab, smoothing, seed):
    torch.manual_seed(seed)
    logits = torch.randn(rows, vocab, dtype=torch.float64) * 5
    targets = torch.randint(vocab, (rows,))
    actual = cross_entropy_sum(logits, targets, smoothing)
    torch.testing.assert_close(actual, F.cross_entropy(logits, targets, label_smoothing=smoothing) * rows)
    asked = F.one_hot(targets, vocab) * (1 - smoothing) + smoothing / vocab  # Szegedy et al. 2016, section 7
    torch.testing.assert_close(actual, -(asked * logits.log_softmax(-1)).sum())


def test_its_gradient_is_softmax_less_target():
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 5, dtype=torch.float64, requires_grad=True), torch.tensor([1, 0, 4, 4])
    cross_entropy_sum(logits, targets).backward()
    torch.testing.assert_close(logits.grad, logits.detach().softmax(-1) - F.one_hot(targets, 5))
    assert torch.autograd.gradcheck(lambda x: cross_entropy_sum(x, targets, 0.1), (logits,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    torch.manual_seed(0)
    logits, targets = torch.randn(4096, 7).to(dtype), torch.randint(7, (4096,))
    actual = cross_entropy_sum(logits, targets)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, cross_entropy_sum(logits.double(), targets).float(), rtol=1e-5, atol=0)
    coarse = F.cross_entropy(logits, targets, reduction="sum").float()  # the negative control
    assert not torch.isclose(actual, coarse, rtol=1e-5, atol=0)


def test_with_the_output_layer_it_is_that_of_the_logits():
    torch.manual_seed(0)
    output, states, targets = OutputProjection(8, 13), torch.randn(5, 8), torch.tensor([1, 0, 12, 4, -100])
    actual = read_out_sum(output, states, targets, 0.1)
    torch.testing.assert_close(actual, cross_entropy_sum(output(states), targets, 0.1))
    assert not torch.isclose(actual, read_out_sum(output, states, targets))  # the negative control


def test_no_tokens_cost_nothing():
    logits = torch.randn(0, 5, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0


@quick
@given(st.integers(1, 9), st.integers(2, 6), st.sampled_from([0.0, 0.3]), st.integers(0, 99))
def test_weights_multiply_the_terms_of_their_targets(rows, vocab, smoothing, seed):
    torch.manual_seed(seed)
    logits, targets = torch.randn(rows, vocab, dtype=torch.float64), torch.randint(vocab, (rows,))
    weights = torch.rand(vocab, dtype=torch.float64) + 0.1
    asked = F.one_hot(targets, vocab) * (1 - smoothing) + smoothing / vocab
    actual = cross_entropy_sum(logits, targets, smoothing, weights)
    torch.testing.assert_close(actual, -(weights[targets, None] * asked * logits.log_softmax(-1)).sum())


@quick
@given(st.integers(1, 9), st.integers(1, 6), st.sampled_from([0.0, 0.3]), st.booleans(), st.integers(0, 99))
def test_questions_of_yes_and_no_are_summed_by_their_definition(rows, vocab, smoothing, weighted, seed):
    torch.manual_seed(seed)
    logits, targets = torch.randn(rows, vocab, dtype=torch.float64), torch.randint(2, (rows, vocab)).double()
    weights = torch.rand(vocab, dtype=torch.float64) + 0.1 if weighted else None
    soft, likely = targets * (1 - smoothing) + smoothing / 2, logits.sigmoid()
    terms = soft * likely.log() * (1 if weights is None else weights) + (1 - soft) * (1 - likely).log()
    torch.testing.assert_close(binary_cross_entropy_sum(logits, targets, smoothing, weights), -terms.sum())
    assert binary_cross_entropy_sum(logits.bfloat16(), targets.float()).dtype == torch.float32


def test_the_squared_error_is_by_its_definition():
    found, targets = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.0, -100.0, 0.5])
    assert squared_error_sum(found, targets) == 1 + 98**2
    assert squared_error_sum(found.bfloat16(), targets).dtype == torch.float32


LOSSES = {
    "weighted": (lambda x, y: cross_entropy_sum(x, y, 0.1, torch.tensor([1.0, 2.0, 0.5])), torch.tensor([2, 0, 1])),
    "several": (lambda x, y: binary_cross_entropy_sum(x, y, 0.1, torch.tensor([1.0, 2.0, 0.5])), torch.eye(3)),
    "number": (lambda x, y: squared_error_sum(x[:, 0], y), torch.tensor([0.3, -100.0, 7.0])),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_has_no_target_counts_for_nothing_and_sends_nothing_back(name):
    loss, targets = LOSSES[name]
    torch.manual_seed(0)
    scores = torch.randn(5, 3, requires_grad=True)
    unread = torch.full((2, *targets.shape[1:]), float("nan") if targets.is_floating_point() else -100).to(targets)
    filled = loss(scores, torch.cat([targets, unread]))
    (grad,) = torch.autograd.grad(filled, scores)
    expected = loss(scores[:3], targets)
    torch.testing.assert_close(filled, expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, scores)[0])
    assert not grad[3:].any()
    assert not torch.isclose(loss(scores, torch.cat([targets, targets[:2]])), expected)  # the control: they are read


# In-batch negatives.


def unit_vectors(rows, seed=0):
    values = torch.randn(rows, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return F.normalize(values, dim=-1)


def contrastive_by_definition(anchors, candidates, anchor_groups, candidate_groups, temperature):
    """Sum the loss of each anchor, with a loop over its candidates (Gao et al. 2021, equations 1 and 5)."""
    total = 0.0
    for row, anchor in enumerate(anchors):
        exps = [
            (anchor @ candidate / temperature).exp()
            for column, candidate in enumerate(candidates)
            if column == row or candidate_groups[column] != anchor_groups[row]
        ]
        total = total - torch.log((anchor @ candidates[row] / temperature).exp() / sum(exps))
    return total


@quick
@given(st.integers(1, 6), st.integers(0, 4), st.sampled_from([0.05, 0.5]), st.integers(0, 99))
def test_the_contrastive_loss_is_its_definition(pairs, negatives, temperature, seed):
    anchors, candidates = unit_vectors(pairs, seed), unit_vectors(pairs + negatives, seed + 1)
    groups = torch.randint(3, (pairs + negatives,), generator=torch.Generator().manual_seed(seed))
    given = anchors, candidates, groups[:pairs], groups, temperature
    torch.testing.assert_close(contrastive_sum(*given), contrastive_by_definition(*given))


def test_the_gradient_of_the_contrastive_loss_is_right_and_leaves_its_own_group_out():
    anchors, candidates = (unit_vectors(rows, seed).requires_grad_() for rows, seed in ((3, 0), (4, 1)))
    groups = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1, 0])
    assert torch.autograd.gradcheck(lambda a, c: contrastive_sum(a, c, *groups, 0.5), (anchors, candidates))
    (moved,) = torch.autograd.grad(contrastive_sum(anchors[:1], candidates, groups[0][:1], groups[1], 0.5), candidates)
    assert moved.abs().sum(1).gt(0).tolist() == [True, True, True, False]  # the last is of the first one's group
    alone = torch.arange(3), torch.arange(4)  # the negative control: nothing is left out
    (moved,) = torch.autograd.grad(contrastive_sum(anchors[:1], candidates, alone[0][:1], alone[1], 0.5), candidates)
    assert moved.abs().sum(1).gt(0).all()


def test_cosines_keep_float32_under_autocast():
    anchors, candidates = unit_vectors(64, 0).float(), unit_vectors(64, 1).float()
    given = anchors, candidates, torch.arange(64), torch.arange(64), 0.05
    expected = contrastive_sum(*given)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(contrastive_sum(*given), expected)
        coarse = F.cross_entropy(anchors @ candidates.T / 0.05, torch.arange(64), reduction="sum")
    assert not torch.isclose(coarse.float(), expected, rtol=1e-5, atol=0)  # the negative control


@pytest.mark.parametrize("temperature", [1.0, 3.5])
def test_soft_cross_entropy_is_hintons_distance(temperature):
    rng = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(5, 4, generator=rng, dtype=torch.float64) for _ in range(2))
    p, q = ((scores / temperature).softmax(-1) for scores in (teacher, logits))
    expected = temperature**2 * (p * (p / q).log()).sum()
    torch.testing.assert_close(soft_cross_entropy_sum(logits, teacher, temperature), expected)
    p, q = ((scores / temperature).sigmoid() for scores in (teacher, logits))
    decisions = temperature**2 * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum()
    torch.testing.assert_close(soft_binary_cross_entropy_sum(logits, teacher, temperature), decisions)
    for loss in (soft_cross_entropy_sum, soft_binary_cross_entropy_sum):
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss(x, teacher, temperature), (logits.requires_grad_(),))
        assert loss(teacher, teacher, temperature) == 0


def test_the_cosine_distance_is_of_angles_alone():
    states = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    assert cosine_distance_sum(states, 5 * states).item() == pytest.approx(0, abs=1e-6)
    assert cosine_distance_sum(states, states.flip(1)).item() == pytest.approx(2)
