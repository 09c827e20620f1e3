"""The figures of a comparison's page: quality against cost, learning curves, quality by length of the input."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.analysis.render.charts import line_chart
from weft.analysis.render.page import caption, details, panels, table
from weft.analysis.render.scatter import ScatterPoint, scatter_chart
from weft.comparison.quantities import (
    format_count,
    format_duration,
    format_metric,
    format_operations,
    is_finite,
    is_share,
    metric_name,
)
from weft.comparison.ranking import mean_over_seeds, on_frontier, quality, ranked
from weft.comparison.results import ComparisonResults, CurvePoint, Entry, LengthGroup

_LOG_RATIO = 20  # from this ratio of the largest to the smallest value, an axis is logarithmic


@dataclass(frozen=True)
class _Cost:
    """A cost of an entry, on a horizontal axis."""

    label: str
    axis: str
    value: Callable[[Entry], float | None]
    write: Callable[[float], str]


_COSTS = (
    _Cost(
        "training time", "training time, seconds", lambda e: mean_over_seeds(e, lambda r: r.seconds), format_duration
    ),
    _Cost("parameters", "parameters", lambda e: e.parameters, format_count),
    _Cost("operations", "operations of training", lambda e: mean_over_seeds(e, lambda r: r.flops), format_operations),
    _Cost("latency", "latency (p50) of one example, seconds", lambda e: e.latency_p50, format_duration),
)


@dataclass(frozen=True)
class _Progress:
    """The horizontal axis of a learning curve: steps, seconds or operations so far."""

    label: str
    axis: str
    value: Callable[[CurvePoint], float | None]


_PROGRESS = (
    _Progress("by steps", "steps", lambda point: point.step),
    _Progress("by seconds", "seconds of training", lambda point: point.seconds),
    _Progress("by operations", "floating-point operations", lambda point: point.flops),
)


def numbers(results: ComparisonResults) -> dict[str, int]:
    """Return the number that gives an entry its colour, the same in all figures: its place in the table."""
    return {entry.name: place for place, entry in enumerate(ranked(results))}


def cost_figures(results: ComparisonResults) -> list[str]:
    """Return quality against training time, parameters, operations and latency, with the Pareto frontier."""
    charts = {cost.label: chart for cost in _COSTS if (chart := _cost_chart(results, cost))}
    if not charts:
        return []
    bars = " Bars are one standard deviation over the seeds." if len(results.seeds) > 1 else ""
    text = (
        f"{_title(results)} on the {results.split_name} examples against cost. Filled points, "
        "joined by the dashed line, are on the Pareto frontier: no other entry is both better and as cheap. Hollow "
        f"points are beaten by an entry that costs no more.{bars} "
        "An entry whose cost was not measured has no point."
    )
    return [panels("cost", "Cost", charts), caption(text, "figure")]


def _cost_chart(results: ComparisonResults, cost: _Cost) -> str:
    places, points = numbers(results), {}
    for entry in ranked(results):
        score, value = quality(entry, results.metric), cost.value(entry)
        if score is not None and value is not None and is_finite(value) and value > 0:
            points[entry.name] = ScatterPoint(value, score.mean, score.spread, places[entry.name])
    names, coordinates = list(points), [(_rounded(point.x), point.y) for point in points.values()]
    if len({x for x, _ in coordinates}) < 2:
        return ""
    frontier = [names[index] for index in on_frontier(coordinates, results.higher_is_better)]
    heights = [point.y for point in points.values()]
    title = f"{_title(results)} against {cost.label}"
    percent, log_y = _is_percent(results, heights), _spans_decades(results, heights)
    return scatter_chart(points, cost.axis, _axis(results), title, percent, log_y, frontier, cost.write)


def _rounded(cost: float) -> float:
    """Return a cost with two digits: entries of one budget are as cheap, whose last step ended a little later."""
    return float(f"{cost:.2g}")


def curve_figures(results: ComparisonResults) -> list[str]:
    """Return the training loss and the metric on the validation data, each by steps, seconds and operations."""
    order = sorted(_PROGRESS, key=lambda progress: progress.label != _budgeted(results.budget))
    several = " The line is the mean over the seeds, the shade from the lowest to the highest." * (
        len(results.seeds) > 1
    )
    parts: list[str] = []
    for name, title, value in (
        ("loss", "Training loss", lambda point: point.loss),
        ("valid", f"{_title(results)} on the validation data", lambda point: point.valid),
    ):
        charts = {p.label: chart for p in order if (chart := _curve_chart(results, title, p, value, name == "loss"))}
        if charts:
            scale = " The scale of the loss is logarithmic." * (name == "loss")
            text = f"{title}, in the course of training.{several}{scale}"
            parts += [panels(name, f"{title}: horizontal axis", charts), caption(text, "figure")]
    return parts


def _curve_chart(
    results: ComparisonResults,
    title: str,
    progress: _Progress,
    value: Callable[[CurvePoint], float | None],
    is_loss: bool,
) -> str:
    merged = {entry.name: _merge_seeds(entry, progress.value, value) for entry in ranked(results)}
    merged = {name: points for name, points in merged.items() if points}
    heights = [mean for points in merged.values() for _, mean, _, _ in points]
    if not heights:
        return ""
    lines = {name: [(x, mean) for x, mean, _, _ in points] for name, points in merged.items()}
    bands = {name: [(x, low, high) for x, _, low, high in points] for name, points in merged.items()}
    ends = [points[-1][0] for points in merged.values()]
    percent = not is_loss and _is_percent(results, heights)
    log_y = is_loss or _spans_decades(results, heights)
    log_x = min(ends) > 0 and max(ends) / min(ends) > _LOG_RATIO
    y = "loss" if is_loss else _axis(results)
    several = {name: band for name, band in bands.items() if any(low < high for _, low, high in band)}
    return line_chart(
        lines, progress.axis, y, title, log_y, percent, log_x=log_x, numbers=numbers(results), bands=several
    )


def _merge_seeds(
    entry: Entry, x: Callable[[CurvePoint], float | None], y: Callable[[CurvePoint], float | None]
) -> list[tuple[float, float, float, float]]:
    """Return (mean x, mean y, lowest y, highest y) at the steps that all seeds have reported.

    Seeds that share no two steps, such as those of a budget of time, are not merged: the first stands for them.
    """
    curves = []
    for run in entry.runs:
        pairs = {point.step: (x(point), y(point)) for point in run.curve}
        curves.append({step: (float(a), float(b)) for step, (a, b) in pairs.items() if is_finite(a) and is_finite(b)})
    curves = [curve for curve in curves if curve]
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    if len(shared) < 2:
        curves, shared = curves[:1], sorted(curves[0]) if curves else []
    merged = []
    for step in shared:
        xs, ys = zip(*(curve[step] for curve in curves), strict=True)
        merged.append((sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys)))
    return merged


def length_figures(results: ComparisonResults) -> list[str]:
    """Return the metric by the length of the input, after figure 2 of Bahdanau et al. 2015, and its numbers."""
    entries = [entry for entry in ranked(results) if any(is_finite(group.value) for group in entry.lengths)]
    spans = sorted({(group.shortest, group.longest) for entry in entries for group in entry.lengths})
    if len(spans) < 2:
        return []
    values = {entry.name: {(group.shortest, group.longest): group for group in entry.lengths} for entry in entries}
    lines = {
        name: [(float(spans.index(span)), group.value) for span, group in groups.items() if group.value is not None]
        for name, groups in values.items()
    }
    heights = [value for points in lines.values() for _, value in points if is_finite(value)]
    labels = [f"{low:,}" if low == high else f"{low:,}–{high:,}" for low, high in spans]
    title, axis = f"{_title(results)} by length of the input", f"length in {results.length_unit}"
    percent, log_y = _is_percent(results, heights), _spans_decades(results, heights)
    chart = line_chart(lines, axis, _axis(results), title, log_y, percent, numbers=numbers(results), groups=labels)
    text = (
        f"{_title(results)} on the {results.split_name} examples by the number of "
        f"{results.length_unit} of their input, as in figure 2 of Bahdanau et al. (2015). The groups have about "
        "the same number of examples."
    )
    rows = [
        _length_row(results, label, [values[e.name].get(span) for e in entries])
        for label, span in zip(labels, spans, strict=True)
    ]
    numeric = table([results.length_unit, "examples", *(entry.name for entry in entries)], rows)
    return [chart, caption(text, "figure"), details("In numbers", [numeric])]


def _length_row(results: ComparisonResults, label: str, groups: Sequence[LengthGroup | None]) -> list[object]:
    examples = max(group.examples for group in groups if group is not None)
    cells = [
        None if group is None or group.value is None else format_metric(results.metric, group.value) for group in groups
    ]
    return [label, examples, *cells]


def _title(results: ComparisonResults) -> str:
    """Return the name of the metric as the beginning of a sentence."""
    name = metric_name(results.metric)
    return name[:1].upper() + name[1:]


def _axis(results: ComparisonResults) -> str:
    return f"{metric_name(results.metric)} ({results.direction})"


def _is_percent(results: ComparisonResults, values: Sequence[float]) -> bool:
    return is_share(results.metric) and all(abs(value) <= 1 for value in values)


def _spans_decades(results: ComparisonResults, values: Sequence[float]) -> bool:
    """Return whether values are drawn on a logarithmic axis: far apart, and without an upper bound, as perplexities."""
    if results.higher_is_better or not values or min(values) <= 0:
        return False
    return max(values) / min(values) > _LOG_RATIO


def _budgeted(budget: str) -> str:
    """Return the label of what was spent: the charts by it are shown first."""
    if budget.endswith("flops"):
        return "by operations"
    return "by steps" if budget.removesuffix("steps").isdigit() else "by seconds"
