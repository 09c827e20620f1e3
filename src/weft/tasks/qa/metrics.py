"""Exact match and word F1 of SQuAD's evaluation scripts, between 0 and 1.

Rajpurkar et al. 2016 (evaluate-v1.1.py) and 2018 (evaluate-v2.0.py). Answers are compared in lower case, without
punctuation and articles; F1 is of their words; of several gold answers the closest counts. The scripts differ on an
answer that has no words left, such as "the": in v1.1 it matches nothing, in v2.0 it is no answer, which is correct for
an unanswerable question.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and superfluous spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def word_f1(text: str, gold: str, empty: bool = False) -> float:
    """Return the F1 of a text's words against the gold answer's; with `empty`, two texts without words match."""
    predicted, expected = normalize(text).split(), normalize(gold).split()
    if empty and not (predicted and expected):
        return float(predicted == expected)
    common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0


@dataclass(frozen=True)
class AnswerScore:
    """Exact match and F1 of one answer."""

    exact: float
    f1: float


def score_answer(text: str, answers: Sequence[str], unanswerable: bool) -> AnswerScore:
    """Score against the closest of several gold answers; `unanswerable`: by the rules of SQuAD 2.0."""
    gold = [answer for answer in answers if normalize(answer)] or [""] if unanswerable else answers
    exact = max(float(normalize(text) == normalize(answer)) for answer in gold)
    return AnswerScore(exact, max(word_f1(text, answer, unanswerable) for answer in gold))


def mean_scores(scores: Sequence[AnswerScore], prefix: str = "") -> dict[str, float]:
    """Return the means over questions."""
    count = max(len(scores), 1)
    exact, f1 = sum(score.exact for score in scores) / count, sum(score.f1 for score in scores) / count
    return {f"{prefix}exact_match": exact, f"{prefix}f1": f1}


def best_threshold(scores: Sequence[float], nulls: Sequence[float], answerable: Sequence[bool]) -> tuple[float, float]:
    """Return the best mean score over all thresholds on `nulls`, and that threshold: up to it, questions are answered.

    `scores` are those of the answers, `nulls` the score of no answer minus that of the best span.
    """
    total = best = float(sum(not has_answer for has_answer in answerable))
    threshold = 0.0
    for index in sorted(range(len(nulls)), key=nulls.__getitem__):
        total += scores[index] if answerable[index] else -1
        if total > best:
            best, threshold = total, nulls[index]
    return best / max(len(nulls), 1), threshold
