"""The mixture of generating and copying against its equation, token by token."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.nn.attention.copying import mix_log_probs

sizes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.integers(0, 99))


def draw(size):
    rows, positions, vocab, seed = size
    torch.manual_seed(seed)
    weights = torch.randn(rows, positions, dtype=torch.float64).softmax(-1)
    logits, gate = torch.randn(rows, vocab, dtype=torch.float64), torch.randn(rows, 1, dtype=torch.float64)
    return logits, gate, weights, torch.randint(vocab, (rows, positions))


def plain(logits, gate, weights, ids):
    """Equation 9 of See et al. 2017, a sum over the places of each word."""
    expected = torch.empty_like(logits)
    for row in range(len(logits)):
        generate = 1 / (1 + torch.exp(-gate[row, 0]))
        odds = logits[row].exp()
        for word in range(logits.shape[1]):
            places = [place for place, id in enumerate(ids[row].tolist()) if id == word]
            copied = sum((float(weights[row, place]) for place in places), 0.0)
            expected[row, word] = generate * odds[word] / odds.sum() + (1 - generate) * copied
    return expected


@settings(deadline=None, derandomize=True, max_examples=25)
@given(sizes)
def test_it_is_the_papers_equation_and_its_own_log_softmax(size):
    logits, gate, weights, ids = draw(size)
    actual = mix_log_probs(logits, gate, weights, ids)
    torch.testing.assert_close(actual.exp(), plain(logits, gate, weights, ids))
    torch.testing.assert_close(actual.log_softmax(-1), actual)


def test_another_words_weights_are_caught():
    logits, gate, weights, ids = draw((3, 4, 6, 1))
    actual = mix_log_probs(logits, gate, weights, (ids + 1) % 6)
    assert (actual.exp() - plain(logits, gate, weights, ids)).abs().max() > 0.01


def test_gradients_are_right_and_finite_where_nothing_is_copied():
    logits, gate, weights, ids = (part.requires_grad_(part.is_floating_point()) for part in draw((2, 3, 5, 2)))
    assert torch.autograd.gradcheck(lambda *parts: mix_log_probs(*parts, ids), (logits, gate, weights))
    single = [part.detach().float().requires_grad_() for part in (logits, gate * 100, weights)]
    grads = torch.autograd.grad(mix_log_probs(*single, ids)[:, 0].sum(), single)
    assert all(grad.isfinite().all() for grad in grads)


def test_half_precision_is_mixed_in_single():
    logits, gate, weights, ids = draw((2, 3, 5, 3))
    mixed = mix_log_probs(logits.bfloat16(), gate.bfloat16(), weights.bfloat16(), ids)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed.double(), mix_log_probs(logits, gate, weights, ids), atol=0.05, rtol=0.05)
