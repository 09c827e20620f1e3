"""The paired bootstrap: on known distributions, and on what has no difference."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from weft.comparison.significance import (
    corpus_bleu,
    mean_of,
    metric_of_answers,
    metric_of_losses,
    paired_difference,
    resample,
)
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.tasks.factory import make_task
from weft.tasks.lm.text_losses import TextLosses


def compared(first, second, seed=0):
    """Give the significance of the difference of two means over the same examples."""
    samples = resample(
        [lambda rows: float(first[rows].mean()), lambda rows: float(second[rows].mean())], len(first), seed=seed
    )
    return paired_difference(float(np.mean(first) - np.mean(second)), *samples.T)


def test_of_a_mean_it_is_the_normal_interval_and_the_t_test():
    rng = np.random.default_rng(1)
    second = rng.normal(size=400)
    first = second + rng.normal(0.1, 1, size=400)
    result, differences = compared(first, second), first - second
    error = differences.std(ddof=1) / 20
    assert result.difference == pytest.approx(differences.mean())
    assert result.low == pytest.approx(differences.mean() - 1.96 * error, abs=0.015)
    assert result.high == pytest.approx(differences.mean() + 1.96 * error, abs=0.015)
    assert result.p_value == pytest.approx(stats.ttest_rel(first, second).pvalue, abs=0.03)


def test_where_there_is_no_difference_few_are_called_one():
    rng = np.random.default_rng(2)
    rejected = 0
    for trial in range(40):
        noise = rng.normal(size=(2, 100))
        rejected += compared(noise[0], noise[1], seed=trial).p_value < 0.05
    assert stats.binomtest(rejected, 40, 0.05).pvalue > 0.001


def test_a_difference_that_is_there_is_seen_for_it_is_paired():
    rng = np.random.default_rng(3)
    hard = rng.normal(0, 10, size=200)  # how hard an example is differs much more than the models do
    first, second = hard + 0.5 + rng.normal(0, 0.1, 200), hard + rng.normal(0, 0.1, 200)
    assert compared(first, second).p_value <= 0.002
    assert compared(first, second[::-1]).p_value > 0.3, "not paired, it is lost in what examples differ by"


def test_equal_answers_have_no_difference():
    values = (np.arange(50) % 2).astype(float)
    result = compared(values, values)
    assert (result.difference, result.low, result.high, result.p_value) == (0, 0, 0, 1)
    assert paired_difference(np.nan, np.zeros(3), np.zeros(3)) is None
    assert paired_difference(0.5, np.array([0.0, np.inf]), np.zeros(2)) is None


def translations(rng, count, right):
    words = list("abcdefg")
    targets = [" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(count)]
    texts = [
        target if rng.random() < right else " ".join(rng.choices(words, k=rng.randint(1, 9))) for target in targets
    ]
    return [{"text": text, "score": 0.0} for text in texts], targets


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1))
def test_bleu_and_exact_match_of_a_sample_are_those_of_the_task(seed, right):
    task = make_task(Run.parse(read_recipe("dates")))
    rng = random.Random(seed)
    answers, targets = translations(rng, 12, right)
    examples = [task.Example(text="x", target=target) for target in targets]
    rows = np.array([rng.randrange(12) for _ in range(12)])
    expected = task.score([answers[row] for row in rows], [examples[row] for row in rows])
    for metric in ("bleu", "exact_match"):
        assert metric_of_answers(task, metric, answers, examples)(rows) == pytest.approx(expected[metric])


def test_no_match_is_no_bleu():
    assert corpus_bleu(np.array([0, 0, 0, 0, 5, 4, 3, 2, 5, 5.0])) == 0
    assert corpus_bleu(np.array([1, 0, 0, 0, 1, 0, 0, 0, 1, 1.0])) == 0, "there are no n-grams of that order"


def test_f1_of_entities_is_computed_again_on_each_sample():
    task = make_task(Run.parse(read_recipe("dateparts", {"task.labels": ["B-DAY", "I-DAY", "O"]})))
    rng = random.Random(0)
    tags = [[rng.choice(["B-DAY", "O"]) for _ in range(rng.randint(1, 5))] for _ in range(20)]
    examples = [task.Example(words=["w"] * len(row), tags=row) for row in tags]
    answers = [{"tags": [tag if rng.random() < 0.7 else "O" for tag in row]} for row in tags]
    metric = metric_of_answers(task, "f1", answers, examples)
    rows = np.array([0, 0, 5, 7, 7, 7])
    assert metric(rows) == task.score([answers[row] for row in rows], [examples[row] for row in rows])["f1"]
    assert metric(np.arange(20)) != pytest.approx(np.mean([metric(np.array([row])) for row in range(20)])), "no mean"


def test_seeds_are_averaged():
    assert mean_of([lambda rows: 1.0, lambda rows: 4.0])(np.arange(2)) == 2.5


def test_a_language_models_metrics_of_a_sample():
    losses = TextLosses(np.array([1.0, 8.0]), np.array([2, 4]), np.array([3, 5]), np.array([0.0, 1.0]))
    assert metric_of_losses(losses, "perplexity")(np.array([1, 1])) == pytest.approx(np.exp(2))
    bits = metric_of_losses(losses, "bits_per_byte")
    assert bits(np.array([0, 1])) == pytest.approx(10 / np.log(2) / 8)
    lost = TextLosses(losses.nats, losses.tokens, losses.bytes, None)
    assert np.isnan(metric_of_losses(lost, "bits_per_byte")(np.array([0])))
