"""The table of a comparison: order, spread, what may be called worse, and units."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compared import classification, fitted, language_models, trained, translation, versus

from weft.comparison import quantities, ranking
from weft.comparison.findings import findings
from weft.comparison.quantities import metric_name
from weft.comparison.ranking import best_entry, on_frontier, quality, ranked
from weft.comparison.results import Entry, SeedResult
from weft.comparison.table import metric_header, result_table

quick = settings(deadline=None, derandomize=True, max_examples=60)


def column(results, header):
    headers, rows = result_table(results)
    return {row[0]: row[headers.index(header)] for row in rows}


def entry(name, *values, metric="accuracy", **more):
    runs = [SeedResult(seed=i, metrics={metric: value}, seconds=1.0) for i, value in enumerate(values)]
    return Entry(name=name, model=name, kind="trained", runs=runs, **more)


def test_the_best_stands_first_and_what_failed_last():
    headers, rows = result_table(classification())
    assert [row[0] for row in rows][:2] == ["langid-cnn", "langid-bilstm"]
    assert rows[-1][0] == "langid-huge"
    assert headers[:5] == ["entry", "model", "accuracy ↑", "macro F1", "against the best"]


def test_lower_is_better_where_it_is():
    headers, rows = result_table(language_models())
    assert [row[0] for row in rows] == [
        *("pydoc-gpt", "pydoc-lstm", "pydoc-gru", "pydoc-ngram", "pydoc-elman"),
        "pydoc-unsmoothed",  # its metric is not finite
    ]
    assert "bits per byte ↓" in headers


def test_a_difference_within_noise_is_no_win():
    verdicts = column(classification(), "against the best")
    assert verdicts["langid-cnn"] == "best"
    assert verdicts["langid-bilstm"] == "not significantly worse, p = 0.21"
    assert verdicts["langid-elmo"] == "worse, p = 0.034"
    assert verdicts["bag of words"] == "worse, p < 0.001"
    assert "langid-bilstm (p = 0.21) is not significantly worse" in findings(classification())[0]
    assert findings(classification())[0].endswith("the difference may be chance. The others are.")
    assert findings(translation())[0].endswith("the difference may be chance. dates-fixed is.")


@pytest.mark.parametrize("p_value", [0.05, math.nan])
def test_only_a_small_p_value_is_a_difference(p_value):
    results = translation(entries=[entry("a", 0.9), entry("b", 0.8, versus_best=versus(-0.1, p_value))])
    assert column(results.model_copy(update={"metric": "accuracy"}), "against the best")["b"].startswith("not sig")


def test_a_failed_entry_says_why():
    verdict = column(classification(), "against the best")["langid-huge"]
    assert verdict.startswith("failed: out of memory: weights, gradients and")
    assert verdict.endswith("…")
    assert column(language_models(), "against the best")["pydoc-unsmoothed"] == "not finite"


def test_a_deep_model_that_does_not_beat_the_classical_one_is_named():
    assert findings(classification())[1] == (
        "langid-bert and langid-word2vec do not beat the best classical model, character n-grams (95.1%)."
    )
    better = classification(entries=[trained("deep", 0.97), fitted("n-grams", "logistic regression", 0.9)])
    assert findings(better)[1].startswith("Every trained model is better")
    assert len(findings(translation())) == 1


def test_the_spread_is_the_standard_deviation_of_the_sample():
    score = quality(entry("a", 0.90, 0.92, 0.97), "accuracy")
    assert score.mean == pytest.approx(0.93)
    assert score.spread == pytest.approx(0.036056, abs=1e-6)
    results = classification(entries=[entry("a", 0.90, 0.92, 0.97), entry("b", 0.5)], metric_names=["accuracy"])
    assert list(column(results, "accuracy ↑").values()) == ["93.0% ± 3.6", "50.0%"]


def test_one_seed_that_is_not_finite_is_not_hidden_by_the_others():
    assert quality(entry("a", 0.9, None), "accuracy") is None
    assert quality(entry("a", 0.9, math.inf), "accuracy") is None
    results = classification(entries=[entry("a", 0.99, None), entry("b", 0.5)])
    assert best_entry(results).name == "b"


def test_columns_with_nothing_in_them_are_left_out():
    headers, _ = result_table(classification(entries=[entry("a", 0.9), entry("b", 0.8)]))
    assert headers == ["entry", "accuracy ↑", "against the best", "training time"]
    alone, rows = result_table(classification(entries=[entry("a", 0.9)]))
    assert alone == ["entry", "accuracy ↑", "training time"]
    assert rows == [["a", "90.0%", "1 s"]]


def test_without_a_result_there_is_still_a_table():
    results = classification(entries=[Entry(name="a", model="rnn", kind="trained", failure="NaN in the loss")])
    assert result_table(results)[1] == [["a", "rnn", "failed: NaN in the loss"]]
    assert findings(results) == ["No entry has a result that can be ranked."]


def test_a_column_has_one_unit():
    times = column(classification(), "training time")
    assert {cell.split()[-1] for cell in times.values() if cell != "–"} == {"s"}
    assert {cell.split()[-1] for cell in column(classification(), "latency p50").values() if cell != "–"} <= {
        "ms",
        "µs",
    }


@pytest.mark.parametrize(
    ("metric", "value", "written"),
    [
        ("accuracy", 0.9734, "97.3%"),
        ("bleu", 31.449, "31.4"),
        ("perplexity", 1234.5, "1,234.50"),
        ("bits_per_byte", 1.98449, "1.984"),
        ("spearman", -0.5, "−0.500"),
        ("perplexity", 1e12, "1e+12"),
        ("accuracy", None, "not finite"),
        ("loss", math.nan, "not finite"),
    ],
)
def test_a_metric_is_written_as_is_customary(metric, value, written):
    assert quantities.format_metric(metric, value) == written


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (quantities.format_duration(0.00021), "210 µs"),
        (quantities.format_duration(0.0042), "4.2 ms"),
        (quantities.format_duration(45.2), "45.2 s"),
        (quantities.format_duration(1800), "30 min"),
        (quantities.format_duration(36_000), "10 h"),
        (quantities.bytes_writer([1e6])(12_400_000), "12.4 MB"),
        (quantities.format_operations(1.23e15), "1.2e15"),
        (quantities.format_p_value(0.0002), "p < 0.001"),
        (quantities.format_count(1_558_000_000), "1,558,000,000"),
        (quantities.format_count(0.123456), "0.123"),
        (quantities.listed(["a", "b", "c"]), "a, b and c"),
    ],
)
def test_quantities(written, wanted):
    assert written == wanted


def dominated(points, kept, sign):
    """Whether each point that is not kept has one as cheap and as good, and no point that is kept has a better one."""
    return all(
        any(points[k][0] <= x and sign * points[k][1] >= sign * y for k in kept)
        if i not in kept
        else not any(a <= x and sign * b > sign * y for a, b in points)
        for i, (x, y) in enumerate(points)
    )


POINTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12)


@quick
@given(POINTS, st.booleans())
def test_the_frontier_is_what_nothing_dominates(points, higher):
    kept = on_frontier(points, higher)
    assert dominated(points, kept, 1 if higher else -1)
    assert [points[i][0] for i in kept] == sorted({points[i][0] for i in kept})


def test_a_frontier_of_the_wrong_direction_is_caught():
    points = [(1, 1), (2, 2), (3, 3)]
    assert dominated(points, on_frontier(points, True), 1)
    assert not dominated(points, on_frontier(points, False), 1)


@quick
@given(st.lists(st.none() | st.floats(), min_size=1, max_size=5), st.booleans())
def test_any_metric_can_be_ranked(values, higher):
    results = classification(entries=[entry(f"e{i}", value) for i, value in enumerate(values)], higher_is_better=higher)
    scores = [quality(e, "accuracy") for e in ranked(results)]
    finite = [score.mean for score in scores if score]
    assert finite == sorted(finite, reverse=higher)
    assert all(score is None for score in scores[len(finite) :])
    result_table(results)


def test_an_order_that_ignores_the_direction_is_caught(monkeypatch):
    results = language_models()
    assert best_entry(results).name == "pydoc-gpt"
    assert ranking.ranked(results.model_copy(update={"higher_is_better": True}))[0].name != "pydoc-gpt"


@pytest.mark.parametrize(
    ("budget", "written"),
    [("1000", "1,000 steps"), ("2000steps", "2,000 steps"), ("1e15flops", "1e15 operations"), ("60s", "60s")],
)
def test_a_budget_is_written_in_words(budget, written):
    assert quantities.format_budget(budget) == written


def test_a_metric_is_called_by_its_name():
    assert [metric_name(name) for name in ("bleu", "exact_match", "macro_f1")] == ["BLEU", "exact match", "macro F1"]
    assert metric_header(classification(positive_label="no_1", metric="f1"), "f1") == "F1 (no_1) ↑"
