"""Scores that people can cite. Shares are between 0 and 1; BLEU is between 0 and 100, as sacreBLEU has it."""

from collections.abc import Sequence


def exact_match(texts: Sequence[str], targets: Sequence[str]) -> float:
    """The share of texts that are their target, letter for letter."""
    return sum(text == target for text, target in zip(texts, targets, strict=True)) / max(len(targets), 1)


def bleu(texts: Sequence[str], targets: Sequence[str]) -> float:
    """Corpus BLEU (Papineni et al. 2002) by sacreBLEU with its standard settings (13a, exponential smoothing)."""
    if not targets:
        return 0.0
    from sacrebleu.metrics import BLEU

    return float(BLEU().corpus_score(list(texts), [list(targets)]).score)
