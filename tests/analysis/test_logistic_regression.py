"""Logistic regression over features in blocks, against scikit-learn's."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from weft.analysis import logistic_regression
from weft.analysis.logistic_regression import LogisticProbe, row_blocks, temporary_array


def clouds(rows=400, width=7, labels=3, seed=0):
    rng = np.random.default_rng(seed)
    right = rng.integers(labels, size=rows)
    centres = rng.normal(size=(labels, width))
    features = centres[right] + rng.normal(size=(rows, width)) * rng.uniform(0.5, 2, width) + 5
    return features.astype(np.float32), right


@pytest.mark.parametrize("labels", [2, 3, 5])
@pytest.mark.parametrize("penalty", [0.1, 1.0, 30.0])
def test_it_is_scikit_learns(labels, penalty, monkeypatch):
    monkeypatch.setattr(logistic_regression, "_GRADIENT", 1e-6)
    features, right = clouds(labels=labels)
    probe = LogisticProbe.fit(features, right, labels, penalty)
    scaler = StandardScaler().fit(features)
    theirs = LogisticRegression(C=1 / penalty, max_iter=1000, tol=1e-8).fit(scaler.transform(features), right)
    scores = features @ probe.weight.numpy().T + probe.bias.numpy()
    likely = np.exp(scores - scores.max(1, keepdims=True))
    likely /= likely.sum(1, keepdims=True)
    # Of two labels scikit-learn has one weight, the difference of ours, which then is penalised twice as much.
    if labels > 2:
        np.testing.assert_allclose(likely, theirs.predict_proba(scaler.transform(features)), atol=2e-3)
    assert (probe.predict(features) == theirs.predict(scaler.transform(features))).mean() > 0.99


def test_blocks_and_files_change_nothing(monkeypatch):
    features, right = clouds()
    whole = LogisticProbe.fit(features, right, 3)
    room = temporary_array(*features.shape)
    room[:] = features
    monkeypatch.setattr(logistic_regression, "_BLOCK", 70)
    assert [part.stop - part.start for part in row_blocks(25, 7)] == [10, 10, 10]
    parts = LogisticProbe.fit(room, right, 3)
    np.testing.assert_allclose(parts.weight, whole.weight, atol=1e-3)
    np.testing.assert_array_equal(parts.predict(room), whole.predict(features))


def test_it_is_the_same_every_time():
    features, right = clouds()
    first, again = LogisticProbe.fit(features, right, 3), LogisticProbe.fit(features, right, 3)
    assert (first.weight == again.weight).all()
    assert (first.bias == again.bias).all()


def test_a_feature_that_is_always_the_same_does_no_harm():
    features, right = clouds()
    wide = np.concatenate([features, np.full((len(features), 1), 0.1, np.float32)], 1)
    probe = LogisticProbe.fit(wide, right, 3)
    assert probe.weight.isfinite().all()
    assert probe.weight[:, -1].abs().max() < 1e-3
    np.testing.assert_array_equal(probe.predict(wide), LogisticProbe.fit(features, right, 3).predict(features))


def test_a_label_that_never_occurs_is_never_answered():
    features, right = clouds(labels=2)
    assert set(LogisticProbe.fit(features, right, 4).predict(features)) <= {0, 1}


def test_it_learns_what_there_is_and_nothing_else():
    features, right = clouds()
    shuffled = np.random.default_rng(1).permutation(right)
    assert (LogisticProbe.fit(features, right, 3).predict(features) == right).mean() > 0.8
    assert (LogisticProbe.fit(features, shuffled, 3).predict(features) == shuffled).mean() < 0.6


def test_a_wrong_slope_is_caught(monkeypatch):
    true = logistic_regression._loss

    def wrong(*given):
        total, slope = true(*given)
        return total, -slope

    monkeypatch.setattr(logistic_regression, "_loss", wrong)
    with pytest.raises(AssertionError):
        test_it_is_scikit_learns(3, 1.0, monkeypatch)
