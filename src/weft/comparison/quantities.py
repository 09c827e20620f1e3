"""Quantities as the tables and the page write them: metrics, durations, bytes, operations, probabilities."""

import math
from collections.abc import Callable, Sequence
from typing import TypeGuard

from weft.analysis.render.axes import LIMIT
from weft.analysis.render.page import number

MISSING = "–"

# Decimals of the metrics that are not shares of 1.
_DECIMALS = {
    **{"bleu": 1, "perplexity": 2, "backward_perplexity": 2, "pseudo_perplexity": 2, "bits_per_byte": 3, "loss": 3},
    **{"spearman": 3, "pearson": 3, "matthews": 3, "alignment": 3, "uniformity": 3},
}
_NAMES = {"bleu": "BLEU", "f1": "F1", "rouge": "ROUGE"}  # in place of a part of a metric's name
_DURATIONS = [(7200, 3600, "h"), (600, 60, "min"), (1, 1, "s"), (1e-3, 1e-3, "ms"), (0, 1e-6, "µs")]
_BYTES = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (0, "B")]


def is_finite(value: float | None) -> TypeGuard[float]:
    """Return whether a value is there and can be drawn."""
    return value is not None and abs(value) < LIMIT  # false for a NaN, too


def is_share(metric: str) -> bool:
    """Return whether a metric is between 0 and 1, and is written as a percentage."""
    return metric not in _DECIMALS


def metric_name(metric: str) -> str:
    """Return a metric's name in words: `exact match`, `BLEU`, `macro F1`."""
    return " ".join(_NAMES.get(part, part) for part in metric.split("_"))


def format_metric(metric: str, value: float | None, sign: bool = False) -> str:
    """Return a metric as a percentage, or with the decimals customary for it; with `sign`, a difference."""
    if value is None or not is_finite(value):
        return "not finite"
    decimals = _DECIMALS.get(metric)
    plus = "+" if sign and value > 0 else ""
    if decimals is None and abs(value) < 100:
        return plus + f"{value:.1%}".replace("-", "−")
    text = f"{value:,.{decimals or 0}f}" if abs(value) < 1e6 else number(value)
    return plus + text.replace("-", "−")


def format_spread(metric: str, spread: float) -> str:
    """Return a standard deviation in the unit of its metric, without a percent sign."""
    return format_metric(metric, spread).removesuffix("%")


def format_budget(budget: str) -> str:
    """Return a budget in words: `1,000 steps`, `1e15 operations`, or the time as given."""
    steps = budget.removesuffix("steps").strip()
    if steps.isdigit():
        return f"{int(steps):,} steps"
    return f"{budget.removesuffix('flops').strip()} operations" if budget.endswith("flops") else budget


def format_duration(seconds: float) -> str:
    """Return seconds in the unit that reads best: `4.2 ms`, `45 s`, `3.4 min`, `2.1 h`."""
    return duration_writer([seconds])(seconds)


def duration_writer(values: Sequence[float]) -> Callable[[float], str]:
    """Return a function that writes seconds in the unit that suits the larger of `values`: a column has one unit."""
    size, unit = next((size, unit) for least, size, unit in _DURATIONS if _typical(values) >= least or not least)
    return lambda seconds: f"{_three_digits(seconds / size)} {unit}"


def bytes_writer(values: Sequence[float]) -> Callable[[float], str]:
    """Return a function that writes numbers of bytes in the decimal unit that suits the larger of `values`."""
    size, unit = next((least or 1, unit) for least, unit in _BYTES if _typical(values) >= least or not least)
    return lambda count: f"{_three_digits(count / size)} {unit}"


def format_count(value: float) -> str:
    """Return a count, or a rate, as a whole number, or a small one with three digits."""
    return _three_digits(value) if abs(value) < 100 and value != int(value) else number_of_digits(value)


def format_operations(flops: float) -> str:
    """Return a number of floating-point operations as recipes write it: `1.2e15`."""
    return f"{flops:.2g}".replace("e+", "e")


def format_p_value(p_value: float) -> str:
    """Return `p = 0.21`, or `p < 0.001`."""
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.2g}"


def number_of_digits(value: float) -> str:
    """Return a whole number with thousands separators; one that is too long for that, in scientific notation."""
    return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3g}".replace("e+", "e")


def listed(names: Sequence[str]) -> str:
    """Return names as an enumeration: `a, b and c`."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 seed`, `3 seeds`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _typical(values: Sequence[float]) -> float:
    """Return the value that chooses the unit: of several, a quarter of the largest, lest it has too many digits."""
    return max(values) / (4 if len(values) > 1 else 1)


def _three_digits(value: float) -> str:
    if value and not math.isfinite(value):
        return MISSING
    return number_of_digits(value) if abs(value) >= 99.95 else f"{value:.3g}"
