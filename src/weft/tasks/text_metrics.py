"""Metrics of generated texts, each against one reference or several, of which the best counts.

A metric takes the candidates of each example, best first, and its references. It is between 0 and 1, except BLEU,
between 0 and 100 as in sacreBLEU, and the token error rate, which may exceed 1.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import zip_longest
from typing import Any

Texts = Sequence[Sequence[str]]  # several for each example: its candidates, or its references


def exact_match(candidates: Texts, references: Texts) -> float:
    """Return the share of examples whose best candidate equals a reference."""
    return _mean([texts[0] in own for texts, own in zip(candidates, references, strict=True)])


def recall(candidates: Texts, references: Texts) -> float:
    """Return the share of all references that are among the candidates of their example: recall@k of k candidates."""
    return _mean([text in texts for texts, own in zip(candidates, references, strict=True) for text in own])


def bleu(candidates: Texts, references: Texts, order: int = 4) -> float:
    """Return corpus BLEU (Papineni et al. 2002) by sacreBLEU with its defaults (13a, exponential smoothing).

    N-grams have up to `order` words. One counts as often as it occurs in one reference, and the length compared is
    that of the nearest.
    """
    if not references:
        return 0.0
    from sacrebleu.metrics import BLEU

    streams = [list(stream) for stream in zip_longest(*references)]  # None where an example has fewer
    return float(BLEU(max_ngram_order=order).corpus_score([texts[0] for texts in candidates], streams).score)


def sentence_bleu(text: str, references: Sequence[str]) -> float:
    """Return the BLEU of one text by sacreBLEU; n-grams longer than the text are left out, as there."""
    return float(_sentence_scorer().sentence_score(text, list(references)).score)


@cache
def _sentence_scorer() -> Any:
    from sacrebleu.metrics import BLEU

    return BLEU(effective_order=True)


def rouge_n(candidates: Texts, references: Texts, order: int) -> float:
    """Return the mean F1 of n-grams, ROUGE-N (Lin 2004, section 2), of the reference with the highest."""
    return _mean(
        [
            max(_ngram_f1(texts[0], reference, order) for reference in own)
            for texts, own in zip(candidates, references, strict=True)
        ]
    )


def rouge_l(candidates: Texts, references: Texts) -> float:
    """Return the mean F1 of the longest common subsequence, ROUGE-L (Lin 2004, section 3.1): the highest as above."""
    return _mean(
        [
            max(_subsequence_f1(texts[0], reference) for reference in own)
            for texts, own in zip(candidates, references, strict=True)
        ]
    )


def token_error_rate(candidates: Texts, references: Texts) -> float:
    """Return all edits over the length of all references, in words between spaces: of the reference with fewest edits.

    An edit inserts, deletes or substitutes a word. Of phonemes it is the phoneme error rate.
    """
    edits = length = 0
    for texts, own in zip(candidates, references, strict=True):
        words = texts[0].split()
        fewest, size = min((edit_distance(words, reference.split()), len(reference.split())) for reference in own)
        edits, length = edits + fewest, length + size
    return edits / max(length, 1)


# By the name of a metric in a recipe.
TEXT_METRICS: Mapping[str, Callable[[Texts, Texts], float]] = {
    "exact_match": exact_match,
    "bleu": bleu,
    "rouge1": partial(rouge_n, order=1),
    "rouge2": partial(rouge_n, order=2),
    "rougeL": rouge_l,
    "token_error_rate": token_error_rate,
    "recall": recall,
}


def edit_distance(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the fewest insertions, deletions and substitutions that make one sequence the other (Levenshtein 1966)."""
    distances = list(range(len(second) + 1))
    for row, item in enumerate(first, 1):
        diagonal, distances[0] = distances[0], row
        for column, other in enumerate(second, 1):
            substituted = diagonal + (item != other)
            diagonal = distances[column]
            distances[column] = min(substituted, diagonal + 1, distances[column - 1] + 1)
    return distances[-1]


def _words(text: str) -> list[str]:
    """Return a text's words as the library rouge_score does: runs of a-z and 0-9 in lower case, without stemming."""
    return re.findall(r"[a-z0-9]+", text.lower())


def _ngram_f1(text: str, reference: str, order: int) -> float:
    sides = [_words(side) for side in (text, reference)]
    counts = [Counter(zip(*(words[start:] for start in range(order)), strict=False)) for words in sides]
    return 2 * (counts[0] & counts[1]).total() / max(counts[0].total() + counts[1].total(), 1)


def _subsequence_f1(text: str, reference: str) -> float:
    words, other = _words(text), _words(reference)
    return 2 * common_subsequence(words, other) / max(len(words) + len(other), 1)


def common_subsequence(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the longest common subsequence, a bit for each place of `first` (Hyyrö 2004, figure 2)."""
    places: dict[object, int] = {}
    for place, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << place
    every = row = (1 << len(first)) - 1
    for item in second:
        matches = row & places.get(item, 0)
        row = ((row + matches) | (row - matches)) & every
    return len(first) - row.bit_count()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
