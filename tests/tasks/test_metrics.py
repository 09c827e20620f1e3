"""Scores against their definitions, and against sacreBLEU itself."""

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from weft.tasks.metrics import bleu, exact_match


def test_exact_match_is_a_share():
    assert exact_match(["a", "b", "c ", "D"], ["a", "x", "c", "d"]) == 0.25
    assert exact_match(["a", "b"], ["a", "b"]) == 1
    assert exact_match([], []) == 0


def test_bleu_is_sacrebleus():
    texts = ["the cat sat on the mat", "a dog ran over the hill today"]
    targets = ["the cat is on the mat", "a dog ran up the hill today"]
    assert bleu(texts, targets) == pytest.approx(sacrebleu.corpus_bleu(texts, [targets]).score)
    assert 0 < bleu(texts, targets) < 100
    assert bleu(targets, targets) == pytest.approx(100)
    assert bleu([], []) == 0


def test_bleu_is_the_corpuss_and_no_mean_over_sentences():
    texts, targets = ["a b c d", "e"], ["a b c d", "e f g h i j"]
    mean = (bleu(texts[:1], targets[:1]) + bleu(texts[1:], targets[1:])) / 2
    assert abs(bleu(texts, targets) - mean) > 1


def test_unequal_lengths_are_a_mistake_of_ours():
    with pytest.raises(ValueError, match="longer"):
        exact_match(["a"], ["a", "b"])


@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20)), max_size=8))
def test_they_stay_in_their_range_whatever_the_text(pairs):
    texts, targets = [text for text, _ in pairs], [target for _, target in pairs]
    assert 0 <= exact_match(texts, targets) <= 1
    assert 0 <= bleu(texts, targets) <= 100 + 1e-9
