"""Paired bootstrap: is one model better than another on these test examples, or is it noise?

    d   = metric(a) - metric(b)              on all n test examples
    d_r = metric(a) - metric(b)              on n examples drawn from them with replacement, r = 1 … R
    interval: the 2.5th and 97.5th percentiles of d_r
    p = (1 + number of r with |d_r - mean of d_r| >= |d|) / (R + 1)

Both models are computed on the same draws (Koehn 2004); shifted to the mean 0, the d_r are the distribution of the
difference where there is none (Berg-Kirkpatrick et al. 2012, Efron & Tibshirani 1993, section 16.4). It holds for any
metric that can be computed on a sample: a mean over examples, perplexity, BLEU, F1. With several seeds the metric of a
sample is the mean over the seeds' models.

What it does not say: whether another training, with other seeds, would differ. That is the spread over the seeds.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from weft.comparison.results import Significance
from weft.tasks.base import Answer, Task
from weft.tasks.lm.text_losses import TextLosses
from weft.tasks.translate import Translate

RESAMPLES = 1000  # so that the smallest p is 0.001
MIN_EXAMPLES = 10  # of fewer, a sample says nothing of texts in general

MetricOfSample = Callable[[np.ndarray], float]  # from the numbers of examples, with repetitions, to the metric


def resample(systems: Sequence[MetricOfSample], size: int, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """Return the metric of each system on the same bootstrap samples of `size` examples, (resamples, systems)."""
    rng = np.random.default_rng(seed)
    rows = (rng.integers(size, size=size) for _ in range(resamples))
    return np.array([[system(sample) for system in systems] for sample in rows])


def paired_difference(difference: float, first: np.ndarray, second: np.ndarray) -> Significance | None:
    """Return the significance of a difference, given both metrics on the same samples; None if one is undefined."""
    differences = first - second
    if not (math.isfinite(difference) and np.isfinite(differences).all()):
        return None
    low, high = np.percentile(differences, [2.5, 97.5])
    # Rounding of a mean must not turn "equally far" into "nearer".
    as_far = np.abs(differences - differences.mean()) >= abs(difference) * (1 - 1e-9) - 1e-12
    p_value = (1 + int(as_far.sum())) / (len(differences) + 1)
    return Significance(difference=difference, low=float(low), high=float(high), p_value=p_value)


def mean_of(systems: Sequence[MetricOfSample]) -> MetricOfSample:
    """Return the mean of several systems, such as the models of several seeds."""
    return lambda rows: sum(system(rows) for system in systems) / len(systems)


def metric_of_answers(task: Task, metric: str, answers: Sequence[Answer], examples: Sequence[object]) -> MetricOfSample:
    """Return a metric of answers as a function of the sample.

    It is computed from sums over the examples where it can be, since `Task.score` on a thousand samples takes minutes:
    where it is the mean of the examples' own scores, which is tried, and for BLEU.
    """
    if metric == "bleu" and isinstance(task, Translate):
        return _bleu_of_sample(task, answers, examples)
    alone = np.array(
        [task.score([answer], [example])[metric] for answer, example in zip(answers, examples, strict=True)]
    )
    if np.isfinite(alone).all() and math.isclose(alone.mean(), task.score(answers, examples)[metric], rel_tol=1e-12):
        half = slice(0, max(1, len(answers) // 2))  # that it is the mean of all may be chance, such as 0
        if math.isclose(alone[half].mean(), task.score(answers[half], examples[half])[metric], rel_tol=1e-12):
            return lambda rows: float(alone[rows].mean())
    return lambda rows: task.score([answers[row] for row in rows], [examples[row] for row in rows])[metric]


def metric_of_losses(losses: TextLosses, metric: str) -> MetricOfSample:
    """Return a language model's metric as a function of the sample of texts."""
    return lambda rows: losses.metric(metric, rows)


def _bleu_of_sample(task: Translate, answers: Sequence[Answer], examples: Sequence[object]) -> MetricOfSample:
    from sacrebleu.metrics import BLEU

    lower, scorer = task.config.lowercase, BLEU(effective_order=True)
    statistics = []
    for answer, example in zip(answers, examples, strict=True):
        text, target = str(answer["text"]), getattr(example, "target", None) or ""
        score = scorer.sentence_score(text.lower() if lower else text, [target.lower() if lower else target])
        statistics.append([*score.counts, *score.totals, score.sys_len, score.ref_len])
    table = np.array(statistics, np.float64)
    return lambda rows: corpus_bleu(table[rows].sum(0))


def corpus_bleu(statistics: np.ndarray) -> float:
    """Return BLEU, 0 to 100, of the matches and n-grams of each order, and of the lengths of texts and references.

    As in sacreBLEU by default, the precision of an order without a match is smoothed: 1 / (2^k n-grams) for the kth.
    """
    order = (len(statistics) - 2) // 2
    matches, ngrams, length, reference = statistics[:order], statistics[order:-2], statistics[-2], statistics[-1]
    if not matches.any() or not ngrams.all():
        return 0.0
    halvings = 2.0 ** np.cumsum(matches == 0)
    precisions = np.where(matches > 0, matches, 1 / halvings) / ngrams
    brevity = 0.0 if length >= reference else 1 - reference / length
    return float(100 * np.exp(np.log(precisions).mean() + brevity))
