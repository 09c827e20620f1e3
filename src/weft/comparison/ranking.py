"""Mean and spread over the seeds of an entry, the order of entries, and the Pareto frontier."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.comparison.quantities import is_finite
from weft.comparison.results import ComparisonResults, Entry, SeedResult

ALPHA = 0.05  # a difference whose p-value is not below it is not called one


@dataclass(frozen=True)
class Quality:
    """A metric over the seeds of an entry: the mean, and the standard deviation where there are several."""

    mean: float
    spread: float | None
    seeds: int


def quality(entry: Entry, metric: str) -> Quality | None:
    """Return a metric over the seeds; None if there is no result, or if it is not finite for one of the seeds."""
    values = [run.metrics.get(metric) for run in entry.runs]
    finite = [value for value in values if value is not None and is_finite(value)]
    if entry.failure is not None or not values or len(finite) < len(values):
        return None
    mean = math.fsum(finite) / len(finite)
    squares = math.fsum((value - mean) ** 2 for value in finite)
    spread = math.sqrt(squares / (len(finite) - 1)) if len(finite) > 1 else None
    return Quality(mean, spread, len(finite))


def ranked(results: ComparisonResults) -> list[Entry]:
    """Return the entries with the best first; those whose metric is not finite follow, and last those that failed."""
    sign = -1 if results.higher_is_better else 1

    def key(entry: Entry) -> tuple[bool, bool, float]:
        score = quality(entry, results.metric)
        return entry.failure is not None, score is None, sign * score.mean if score else 0.0

    return sorted(results.entries, key=key)


def best_entry(results: ComparisonResults) -> Entry | None:
    """Return the entry with the best mean; None if none has a finite metric."""
    first = next(iter(ranked(results)), None)
    return first if first is not None and quality(first, results.metric) else None


def is_within_noise(entry: Entry) -> bool | None:
    """Return whether the entry's difference from the best may be chance; None where that was not computed."""
    return None if entry.versus_best is None else not entry.versus_best.p_value < ALPHA


def mean_over_seeds(entry: Entry, cost: Callable[[SeedResult], float | None]) -> float | None:
    """Return the mean of a cost of training over the seeds that have it."""
    values = [value for value in map(cost, entry.runs) if value is not None and is_finite(value)]
    return math.fsum(values) / len(values) if values else None


def on_frontier(points: Sequence[tuple[float, float]], higher_is_better: bool) -> list[int]:
    """Return which of the points (cost, quality) are Pareto-optimal, by rising cost: none is better at no more cost."""
    sign = 1 if higher_is_better else -1
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -sign * points[i][1]))
    frontier: list[int] = []
    for i in order:
        if not frontier or sign * points[i][1] > sign * points[frontier[-1]][1]:
            frontier.append(i)
    return frontier
