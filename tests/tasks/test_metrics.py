"""Metrics against their definitions, and against sacreBLEU, scikit-learn, scipy and seqeval."""

import warnings

import pytest
import scipy.stats
import seqeval.metrics
import sklearn.metrics
from hypothesis import example, given
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities

from weft.tasks.metrics import (
    MAX_CONFUSED,
    ConfusionMatrix,
    Tally,
    entities,
    exact_match,
    macro_f1,
    matthews,
    mean_f1,
    metric_title,
    pearson,
    spearman,
    tally_entities,
    tally_labels,
)


def test_exact_match_is_a_share():
    assert exact_match(["a", "b", "c ", "D"], ["a", "x", "c", "d"]) == 0.25
    assert exact_match(["a", "b"], ["a", "b"]) == 1
    assert exact_match([], []) == 0


def test_a_binary_f1_says_which_label_it_is_of():
    assert metric_title("f1", "yes") == "f1 (yes)"
    assert metric_title("f1", None) == "f1"
    assert metric_title("macro_f1", "yes") == "macro_f1"


def test_unequal_lengths_are_a_mistake_of_ours():
    with pytest.raises(ValueError, match="longer"):
        exact_match(["a"], ["a", "b"])


@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20)), max_size=8))
def test_they_stay_in_their_range_whatever_the_text(pairs):
    texts, targets = [text for text, _ in pairs], [target for _, target in pairs]
    assert 0 <= exact_match(texts, targets) <= 1


LABELS = ["a", "b", "c", "never seen"]
label = st.sampled_from(LABELS[:3])


@given(st.lists(st.tuples(label, label), min_size=1))
def test_accuracy_and_macro_f1_are_scikit_learns(pairs):
    predicted, gold = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    assert exact_match(predicted, gold) == pytest.approx(sklearn.metrics.accuracy_score(gold, predicted))
    expected = sklearn.metrics.f1_score(gold, predicted, average="macro", zero_division=0)
    assert macro_f1(predicted, gold) == pytest.approx(expected)


def test_macro_f1_counts_a_rare_label_as_much_as_a_frequent_one():
    gold = ["a"] * 9 + ["b"]
    assert exact_match(["a"] * 10, gold) == 0.9
    assert macro_f1(["a"] * 10, gold) == pytest.approx((18 / 19) / 2)
    assert macro_f1([], []) == 0


@given(st.lists(st.tuples(label, label), min_size=1))
@example([("a", "a")])
@example([("a", "b"), ("a", "c")])
def test_matthews_correlation_is_scikit_learns(pairs):
    predicted, gold = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single label
        expected = sklearn.metrics.matthews_corrcoef(gold, predicted)
    assert matthews(predicted, gold) == pytest.approx(expected, abs=1e-12)


def test_matthews_is_nothing_for_always_the_same_however_accurate():
    gold = ["a"] * 9 + ["b"]
    assert exact_match(["a"] * 10, gold) == 0.9
    assert matthews(["a"] * 10, gold) == matthews([], []) == 0
    assert matthews(gold, gold) == 1
    assert matthews(["b"] * 9 + ["a"], gold) == -1


number = st.floats(-1e6, 1e6, width=32) | st.integers(-3, 3).map(float)  # many of them equal, too


@given(st.lists(st.tuples(number, number), min_size=2, max_size=20))
@example([(0.1, 1.0), (0.1, 2.0), (0.1, 4.0)])
@example([(1.0, 1.0), (1.0, 2.0), (2.0, 2.0), (3.0, 0.0)])
def test_correlations_are_scipys(pairs):
    predicted, gold = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if len(set(predicted)) == 1 or len(set(gold)) == 1:  # there scipy warns, and gives no number
        assert pearson(predicted, gold) == spearman(predicted, gold) == 0
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numbers that hardly differ
        expected = scipy.stats.pearsonr(predicted, gold).statistic, scipy.stats.spearmanr(predicted, gold).statistic
    assert pearson(predicted, gold) == pytest.approx(expected[0], abs=1e-6)
    assert spearman(predicted, gold) == pytest.approx(expected[1], abs=1e-9)


def test_a_line_and_an_order_are_not_the_same():
    predicted, gold = [1.0, 2.0, 3.0, 4.0], [1.0, 10.0, 100.0, 1000.0]
    assert spearman(predicted, gold) == pytest.approx(1)
    assert pearson(predicted, gold) < 0.9
    assert spearman(predicted, gold[::-1]) == pytest.approx(-1)
    assert pearson([], []) == spearman([1.0], [1.0]) == 0


@given(st.lists(st.tuples(st.sets(label), st.sets(label)), min_size=1))
def test_f1_of_several_labels_a_text_is_scikit_learns(pairs):
    predicted, gold = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    tallies = tally_labels(predicted, gold, LABELS)
    rows = [[[name in labels for name in LABELS] for labels in side] for side in (gold, predicted)]
    for average, f1 in (("micro", sum(tallies.values(), Tally()).f1), ("macro", mean_f1(tallies.values()))):
        assert f1 == pytest.approx(sklearn.metrics.f1_score(*rows, average=average, zero_division=0))
    assert exact_match(predicted, gold) == pytest.approx(sklearn.metrics.accuracy_score(*rows))


tag = st.sampled_from(["O", *(f"{letter}-{kind}" for letter in "BIES" for kind in ("DAY", "YEAR"))])
sentence = st.lists(st.tuples(tag, tag), max_size=8)


def by_seqeval(predicted, gold):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is undefined, and 0
        scores = (seqeval.metrics.f1_score, seqeval.metrics.precision_score, seqeval.metrics.recall_score)
        return [float(score(gold, predicted)) for score in scores]


@given(st.lists(sentence, min_size=1, max_size=6))
@example([[("O", "O")]])
@example([[("I-DAY", "B-DAY"), ("I-DAY", "I-DAY")], [], [("I-DAY", "I-DAY")]])
def test_f1_of_entities_is_seqevals(sentences):
    predicted, gold = ([[pair[side] for pair in sentence] for sentence in sentences] for side in (0, 1))
    tally = sum(tally_entities(predicted, gold).values(), Tally())
    assert [tally.f1, tally.precision, tally.recall] == pytest.approx(by_seqeval(predicted, gold))


@given(st.lists(st.sampled_from(["O", "B", "I", "E", "S", "B-A", "I-A", "B-A-B", "I-A-B"]), max_size=10))
def test_entities_are_those_that_seqeval_reads(tags):
    assert entities(tags) == [(kind, first, last + 1) for kind, first, last in get_entities(tags)]


def test_an_entity_is_right_only_as_a_whole():
    gold = [["B-DAY", "I-DAY", "O", "B-YEAR"]]
    assert tally_entities([["B-DAY", "O", "O", "B-YEAR"]], gold) == {"DAY": Tally(0, 1, 1), "YEAR": Tally(1, 1, 1)}
    mistaken = {"DAY": Tally(0, 0, 1), "YEAR": Tally(1, 2, 1)}
    assert tally_entities([["B-YEAR", "I-YEAR", "O", "B-YEAR"]], gold) == mistaken
    unread = {"DAY": Tally(1, 1, 1), "YEAR": Tally(0, 0, 1)}
    assert tally_entities([["B-DAY", "I-DAY", "O", ""]], gold) == unread  # "": a word that was not read


def test_strict_reading_would_be_caught():
    """The control: seqeval has a strict mode too, in which an entity that begins with I is none."""
    predicted, gold = [["I-DAY", "O"]], [["B-DAY", "O"]]
    assert tally_entities(predicted, gold)["DAY"].f1 == by_seqeval(predicted, gold)[0] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert seqeval.metrics.f1_score(gold, predicted, mode="strict", scheme=seqeval.scheme.IOB2) == 0


@given(st.lists(st.tuples(label, label)))
def test_a_confusion_matrix_is_scikit_learns(pairs):
    matrix = ConfusionMatrix.of(LABELS, pairs)
    gold, predicted = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    expected = sklearn.metrics.confusion_matrix(gold, predicted, labels=LABELS).tolist() if pairs else [[0] * 4] * 4
    assert matrix.counts == expected
    assert matrix.to_dict() == {"labels": LABELS, "counts": expected}
    mistakes = matrix.mistakes()
    assert sum(times for *_, times in mistakes) == sum(a != b for a, b in pairs)
    assert [times for *_, times in mistakes] == sorted((times for *_, times in mistakes), reverse=True)
    assert all(matrix.counts[LABELS.index(a)][LABELS.index(b)] == times for a, b, times in mistakes)


def test_the_confusion_matrix_of_very_many_labels_is_of_the_most_frequent():
    labels = [f"{number:05d}" for number in range(50_000)]  # whose square would take all memory
    pairs = [("00007", "00009")] * 3 + [("00001", "00001")] + [(label, label) for label in labels[10:5000]]
    matrix = ConfusionMatrix.of(labels, pairs)
    assert len(matrix.labels) == len(matrix.counts) == MAX_CONFUSED
    assert matrix.mistakes() == [("00007", "00009", 3)]
    assert list(matrix.labels) == sorted(matrix.labels)
