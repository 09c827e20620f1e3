"""Exact match and F1 of answers in words, as SQuAD's scripts have them, as shares between 0 and 1.

Rajpurkar et al. 2016 (evaluate-v1.1.py) and 2018 (evaluate-v2.0.py). Two answers are the same if they are so in lower
case, without punctuation and articles; F1 is of their words; of several right answers the nearest counts. The two
scripts differ in what of an answer has no words left, such as "the": to the first it is like no other, to the second it
is no answer, which is right where a question has none.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_SIGNS = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Write a text in lower case, without punctuation, articles and spaces that are too many."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_SIGNS)).split())


def word_f1(text: str, right: str, empty: bool = False) -> float:
    """Return the F1 of a text's words against those of the right one; where one has none, `empty` says if two match."""
    given, there = normalize(text).split(), normalize(right).split()
    if empty and not (given and there):
        return float(given == there)
    same = sum((Counter(given) & Counter(there)).values())
    return 2 * same / (len(given) + len(there)) if same else 0.0


@dataclass(frozen=True)
class Judged:
    """How near an answer comes."""

    exact: float
    f1: float


def judge_answer(text: str, answers: Sequence[str], unanswerable: bool) -> Judged:
    """Judge by the nearest of several right answers; `unanswerable`: among questions that may have none (2.0)."""
    right = [one for one in answers if normalize(one)] or [""] if unanswerable else answers
    exact = max(float(normalize(text) == normalize(one)) for one in right)
    return Judged(exact, max(word_f1(text, one, unanswerable) for one in right))


def mean_scores(judged: Sequence[Judged], prefix: str = "") -> dict[str, float]:
    """Return the means over questions."""
    many = max(len(judged), 1)
    exact, f1 = sum(one.exact for one in judged) / many, sum(one.f1 for one in judged) / many
    return {f"{prefix}exact_match": exact, f"{prefix}f1": f1}


def best_threshold(gains: Sequence[float], nulls: Sequence[float], answerable: Sequence[bool]) -> tuple[float, float]:
    """Find up to which `null` a question is best answered: return the mean score that this gives, and the threshold.

    `gains` are the scores of the answers, `nulls` how strongly each question seems to have none.
    """
    score = best = float(sum(not one for one in answerable))
    threshold = 0.0
    for number in sorted(range(len(nulls)), key=nulls.__getitem__):
        score += gains[number] if answerable[number] else -1
        if score > best:
            best, threshold = score, nulls[number]
    return best / max(len(nulls), 1), threshold
