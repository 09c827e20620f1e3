"""Classification reports against those of scikit-learn and seqeval."""

import warnings

import pytest
import seqeval.metrics
import sklearn.metrics
from hypothesis import example, given
from hypothesis import strategies as st

from weft.tasks.classification_report import ClassificationReport, ClassScores, present
from weft.tasks.metrics import ConfusionMatrix, Tally, macro_f1, tally_entities, tally_labels

LABELS = ["a", "b", "c", "never seen"]
label = st.sampled_from(LABELS[:3])
tag = st.sampled_from(["O", *(f"{letter}-{kind}" for letter in "BIES" for kind in ("DAY", "YEAR"))])


def rows_of(report):
    """Return a report's rows under the names that scikit-learn and seqeval give them."""
    return {**report.classes, **{f"{name} avg": scores for name, scores in report.averages.items()}}


def check(report, expected):
    """Compare with a report of scikit-learn or seqeval, which must have the same rows in the same order."""
    assert list(rows_of(report)) == list(expected)
    for name, scores in rows_of(report).items():
        theirs = [expected[name][key] for key in ("precision", "recall", "f1-score")]
        assert [scores.precision, scores.recall, scores.f1] == pytest.approx(theirs), name
        assert scores.support == expected[name]["support"], name


def of_labels(pairs):
    gold, predicted = [[pair[0]] for pair in pairs], [[pair[1]] for pair in pairs]
    return ClassificationReport.of(present(tally_labels(predicted, gold, LABELS)))


def without_micro(report):
    averages = {name: scores for name, scores in report.averages.items() if name != "micro"}
    return ClassificationReport(report.classes, averages)


def by_scikit_learn(gold, predicted, **options):
    return sklearn.metrics.classification_report(gold, predicted, output_dict=True, zero_division=0, **options)


@given(st.lists(st.tuples(label, label), min_size=1))
@example([("a", "b")])
def test_of_one_label_a_text_it_is_scikit_learns(pairs):
    gold, predicted = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    expected = by_scikit_learn(gold, predicted)
    accuracy = expected.pop("accuracy")  # scikit-learn prints the micro average under this name
    report = of_labels(pairs)
    micro = report.averages["micro"]
    assert [micro.precision, micro.recall, micro.f1] == pytest.approx([accuracy] * 3)
    assert micro.support == len(pairs)
    check(without_micro(report), expected)
    assert report.averages["macro"].f1 == pytest.approx(macro_f1(predicted, gold))
    assert ClassificationReport.of_confusion(ConfusionMatrix.of(LABELS, pairs)) == report


@given(st.lists(st.tuples(st.sets(label), st.sets(label)), min_size=1))
@example([(set(), set())])
def test_of_several_labels_a_text_it_is_scikit_learns(pairs):
    gold, predicted = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    rows = [[[int(name in labels) for name in LABELS] for labels in side] for side in (gold, predicted)]
    samples = [Tally(len(found & right), len(found), len(right)) for right, found in pairs]
    report = ClassificationReport.of(tally_labels(predicted, gold, LABELS), samples=samples)
    check(report, by_scikit_learn(*rows, target_names=LABELS))


@given(st.lists(st.lists(st.tuples(tag, tag), max_size=8), min_size=1, max_size=6))
@example([[("I-DAY", "B-DAY"), ("I-DAY", "I-DAY")], [], [("I-DAY", "I-DAY")]])
@example([[("O", "B-DAY")]])
def test_of_entities_it_is_seqevals(sentences):
    gold, predicted = ([[pair[side] for pair in sentence] for sentence in sentences] for side in (0, 1))
    report = ClassificationReport.of(tally_entities(predicted, gold), "entity")
    if not report.classes:  # of which seqeval makes nothing
        assert all(scores == ClassScores(0, 0, 0, 0) for scores in report.averages.values())
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = seqeval.metrics.classification_report(gold, predicted, output_dict=True, zero_division=0)
    check(report, expected)


def test_precision_and_recall_exchanged_would_be_caught():
    pairs = [("a", "a"), ("a", "b"), ("a", "b"), ("c", "b")]
    gold, predicted = zip(*pairs, strict=True)
    expected = by_scikit_learn(gold, predicted)
    del expected["accuracy"]
    check(without_micro(of_labels(pairs)), expected)
    with pytest.raises(AssertionError):
        check(without_micro(of_labels(list(zip(predicted, gold, strict=True)))), expected)


def test_a_label_that_is_only_predicted_counts_in_the_macro_average_and_not_in_the_weighted_one():
    report = of_labels([("a", "a"), ("a", "b")])
    assert report.classes["b"] == ClassScores(0, 0, 0, 0)
    assert report.averages["macro"].recall == 0.25
    assert report.averages["weighted"].recall == 0.5
    assert "never seen" not in report.classes


def test_the_table_and_the_data_have_classes_then_averages():
    report = of_labels([("a", "a"), ("b", "a")] * 600)
    headers, rows = report.table()
    assert headers == ["label", "precision", "recall", "f1", "support"]
    assert rows[0] == ["a", "0.5000", "1.0000", "0.6667", "600"]
    assert [row[0] for row in rows] == ["a", "b", "micro avg", "macro avg", "weighted avg"]
    assert rows[2][-1] == "1,200"
    told = report.to_dict()
    assert told["classes"]["b"] == {"precision": 0, "recall": 0, "f1": 0, "support": 600}
    assert list(told["averages"]) == ["micro", "macro", "weighted"]
