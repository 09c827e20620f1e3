"""Scores against their definitions, and against sacreBLEU, scikit-learn and seqeval themselves."""

import warnings

import pytest
import sacrebleu
import scipy.stats
import seqeval.metrics
import sklearn.metrics
from hypothesis import example, given
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities

from weft.tasks.metrics import (
    Confusion,
    Tally,
    bleu,
    entities,
    exact_match,
    macro_f1,
    matthews,
    mean_f1,
    pearson,
    spearman,
    tally_entities,
    tally_labels,
)


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


LABELS = ["a", "b", "c", "never seen"]
label = st.sampled_from(LABELS[:3])


@given(st.lists(st.tuples(label, label), min_size=1))
def test_accuracy_and_macro_f1_are_scikit_learns(pairs):
    given, right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    assert exact_match(given, right) == pytest.approx(sklearn.metrics.accuracy_score(right, given))
    expected = sklearn.metrics.f1_score(right, given, average="macro", zero_division=0)
    assert macro_f1(given, right) == pytest.approx(expected)


def test_macro_f1_counts_a_rare_label_as_much_as_a_frequent_one():
    right = ["a"] * 9 + ["b"]
    assert exact_match(["a"] * 10, right) == 0.9
    assert macro_f1(["a"] * 10, right) == pytest.approx((18 / 19) / 2)
    assert macro_f1([], []) == 0


@given(st.lists(st.tuples(label, label), min_size=1))
@example([("a", "a")])
@example([("a", "b"), ("a", "c")])
def test_matthews_correlation_is_scikit_learns(pairs):
    given, right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single label
        expected = sklearn.metrics.matthews_corrcoef(right, given)
    assert matthews(given, right) == pytest.approx(expected, abs=1e-12)


def test_matthews_is_nothing_for_always_the_same_however_accurate():
    right = ["a"] * 9 + ["b"]
    assert exact_match(["a"] * 10, right) == 0.9
    assert matthews(["a"] * 10, right) == matthews([], []) == 0
    assert matthews(right, right) == 1
    assert matthews(["b"] * 9 + ["a"], right) == -1


number = st.floats(-1e6, 1e6, width=32) | st.integers(-3, 3).map(float)  # many of them equal, too


@given(st.lists(st.tuples(number, number), min_size=2, max_size=20))
@example([(0.1, 1.0), (0.1, 2.0), (0.1, 4.0)])
@example([(1.0, 1.0), (1.0, 2.0), (2.0, 2.0), (3.0, 0.0)])
def test_correlations_are_scipys(pairs):
    given, right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if len(set(given)) == 1 or len(set(right)) == 1:  # there scipy warns, and gives no number
        assert pearson(given, right) == spearman(given, right) == 0
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numbers that hardly differ
        expected = scipy.stats.pearsonr(given, right).statistic, scipy.stats.spearmanr(given, right).statistic
    assert pearson(given, right) == pytest.approx(expected[0], abs=1e-6)
    assert spearman(given, right) == pytest.approx(expected[1], abs=1e-9)


def test_a_line_and_an_order_are_not_the_same():
    given, right = [1.0, 2.0, 3.0, 4.0], [1.0, 10.0, 100.0, 1000.0]
    assert spearman(given, right) == pytest.approx(1)
    assert pearson(given, right) < 0.9
    assert spearman(given, right[::-1]) == pytest.approx(-1)
    assert pearson([], []) == spearman([1.0], [1.0]) == 0


@given(st.lists(st.tuples(st.sets(label), st.sets(label)), min_size=1))
def test_f1_of_several_labels_a_text_is_scikit_learns(pairs):
    given, right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    tallies = tally_labels(given, right, LABELS)
    rows = [[[name in one for name in LABELS] for one in side] for side in (right, given)]
    for average, found in (("micro", sum(tallies.values(), Tally()).f1), ("macro", mean_f1(tallies.values()))):
        assert found == pytest.approx(sklearn.metrics.f1_score(*rows, average=average, zero_division=0))
    assert exact_match(given, right) == pytest.approx(sklearn.metrics.accuracy_score(*rows))


tag = st.sampled_from(["O", *(f"{letter}-{kind}" for letter in "BIES" for kind in ("DAY", "YEAR"))])
sentence = st.lists(st.tuples(tag, tag), max_size=8)


def by_seqeval(given, right):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is undefined, and 0
        scores = (seqeval.metrics.f1_score, seqeval.metrics.precision_score, seqeval.metrics.recall_score)
        return [float(score(right, given)) for score in scores]


@given(st.lists(sentence, min_size=1, max_size=6))
@example([[("O", "O")]])
@example([[("I-DAY", "B-DAY"), ("I-DAY", "I-DAY")], [], [("I-DAY", "I-DAY")]])
def test_f1_of_entities_is_seqevals(sentences):
    given, right = ([[pair[side] for pair in one] for one in sentences] for side in (0, 1))
    found = tally_entities(given, right)
    assert [found.f1, found.precision, found.recall] == pytest.approx(by_seqeval(given, right))


@given(st.lists(st.sampled_from(["O", "B", "I", "E", "S", "B-A", "I-A", "B-A-B", "I-A-B"]), max_size=10))
def test_entities_are_those_that_seqeval_reads(tags):
    assert entities(tags) == [(kind, first, last + 1) for kind, first, last in get_entities(tags)]


def test_an_entity_is_right_only_as_a_whole():
    right = [["B-DAY", "I-DAY", "O", "B-YEAR"]]
    assert tally_entities([["B-DAY", "O", "O", "B-YEAR"]], right) == Tally(1, 2, 2)
    assert tally_entities([["B-YEAR", "I-YEAR", "O", "B-YEAR"]], right) == Tally(1, 2, 2)
    assert tally_entities([["B-DAY", "I-DAY", "O", ""]], right) == Tally(1, 1, 2)  # "": a word that was not read


def test_strict_reading_would_be_caught():
    """The control: seqeval has a strict mode too, in which an entity that begins with I is none."""
    given, right = [["I-DAY", "O"]], [["B-DAY", "O"]]
    assert tally_entities(given, right).f1 == by_seqeval(given, right)[0] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert seqeval.metrics.f1_score(right, given, mode="strict", scheme=seqeval.scheme.IOB2) == 0


@given(st.lists(st.tuples(label, label)))
def test_a_confusion_matrix_is_scikit_learns(pairs):
    found = Confusion.of(LABELS, pairs)
    right, given = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    expected = sklearn.metrics.confusion_matrix(right, given, labels=LABELS).tolist() if pairs else [[0] * 4] * 4
    assert found.counts == expected
    assert found.to_dict() == {"labels": LABELS, "counts": expected}
    mistakes = found.mistakes()
    assert sum(times for *_, times in mistakes) == sum(a != b for a, b in pairs)
    assert [times for *_, times in mistakes] == sorted((times for *_, times in mistakes), reverse=True)
    assert all(found.counts[LABELS.index(a)][LABELS.index(b)] == times for a, b, times in mistakes)
