"""The table of a comparison: what each entry reaches, and what it costs to train and to use."""

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import shorten
from typing import Literal

from weft.comparison.quantities import (
    MISSING,
    bytes_writer,
    duration_writer,
    format_count,
    format_metric,
    format_operations,
    format_p_value,
    format_spread,
    is_finite,
    metric_name,
)
from weft.comparison.ranking import best_entry, is_within_noise, mean_over_seeds, quality, ranked
from weft.comparison.results import ComparisonResults, Entry
from weft.tasks.metrics import metric_title

Group = Literal["name", "quality", "training", "prediction"]
Table = tuple[list[str], list[list[str]]]  # the headers and rows of a table

REASON = 60  # characters of a failure in a row


@dataclass(frozen=True)
class Column:
    """A column of the table, with a cell for each entry in the order of `ranked`; None where there is nothing."""

    header: str
    group: Group
    cells: list[str | None]


def result_table(results: ComparisonResults) -> Table:
    """Return headers and rows, the best entry first; a column with nothing in it is left out."""
    columns = result_columns(results)
    rows = [[column.cells[row] or MISSING for column in columns] for row in range(len(results.entries))]
    return [column.header for column in columns], rows


def result_columns(results: ComparisonResults) -> list[Column]:
    """Return the columns that have something in them, names first."""
    entries = ranked(results)
    names = Column("entry", "name", [entry.name for entry in entries])
    columns = [_models(entries), *_quality_columns(results, entries), _verdicts(results, entries), *_costs(entries)]
    return [names, *(column for column in columns if any(column.cells))]


def metric_header(results: ComparisonResults, metric: str) -> str:
    """Return the name of a metric; an arrow after the one that orders the entries says which way is better."""
    arrow = f" {'↑' if results.higher_is_better else '↓'}" if metric == results.metric else ""
    label = metric_title(metric, results.positive_label).removeprefix(metric)  # of a binary F1
    return metric_name(metric) + label + arrow


def format_quality(entry: Entry, metric: str) -> str | None:
    """Return the mean over the seeds, `97.3% ± 0.4`; None where there is none that is finite."""
    score = quality(entry, metric)
    if score is None:
        return None
    spread = f" ± {format_spread(metric, score.spread)}" if score.spread is not None else ""
    return format_metric(metric, score.mean) + spread


def verdict(entry: Entry, best: Entry | None, metric: str) -> str | None:
    """Return how an entry stands to the best one of a metric; a difference within noise is not called one."""
    if entry.failure is not None:
        return f"failed: {shorten(entry.failure, REASON, placeholder=' …')}"
    if entry is best:
        return "best"
    if quality(entry, metric) is None:
        return "not finite"
    if entry.versus_best is None:
        return None
    chance = format_p_value(entry.versus_best.p_value)
    return f"not significantly worse, {chance}" if is_within_noise(entry) else f"worse, {chance}"


def _models(entries: list[Entry]) -> Column:
    """Return what each entry is, unless its name says it."""
    cells = [entry.model if entry.kind == "trained" else f"{entry.model} ({entry.kind})" for entry in entries]
    telling = any(cell != entry.name for cell, entry in zip(cells, entries, strict=True))
    return Column("model", "name", list(cells) if telling else [None] * len(cells))


def _quality_columns(results: ComparisonResults, entries: list[Entry]) -> list[Column]:
    names = dict.fromkeys([results.metric, *results.metric_names])
    return [
        Column(metric_header(results, name), "quality", [format_quality(entry, name) for entry in entries])
        for name in names
    ]


def _verdicts(results: ComparisonResults, entries: list[Entry]) -> Column:
    best = best_entry(results)
    cells = [verdict(entry, best, results.metric) for entry in entries]
    alone = all(cell is None or cell == "best" for cell in cells)
    return Column("against the best", "quality", [None] * len(cells) if alone and len(cells) == 1 else cells)


def _costs(entries: list[Entry]) -> list[Column]:
    """Return the columns of what it costs to train, the mean over the seeds, and to predict."""
    Value = Callable[[Entry], float | None]
    Write = Callable[[float], str]

    def column(header: str, group: Group, value: Value, write: Write) -> Column:
        return Column(header, group, [write(v) if is_finite(v) else None for v in map(value, entries)])

    def column_of_unit(header: str, group: Group, value: Value, writer: Callable[[list[float]], Write]) -> Column:
        values = [v for v in map(value, entries) if is_finite(v)]
        return column(header, group, value, writer(values) if values else str)

    def training(name: str) -> Value:
        return lambda entry: mean_over_seeds(entry, lambda run: getattr(run, name))

    return [
        column("parameters", "training", lambda e: e.parameters, format_count),
        column_of_unit("training time", "training", training("seconds"), duration_writer),
        column("steps", "training", training("steps"), format_count),
        column("tokens/s", "training", training("tokens_per_s"), format_count),
        column("MFU", "training", training("mfu"), lambda share: f"{share:.1%}"),
        column_of_unit("peak memory", "training", training("peak_memory"), bytes_writer),
        column("operations", "training", training("flops"), format_operations),
        column_of_unit("disk", "prediction", lambda e: e.disk_bytes, bytes_writer),
        column_of_unit("latency p50", "prediction", lambda e: e.latency_p50, duration_writer),
        column_of_unit("latency p99", "prediction", lambda e: e.latency_p99, duration_writer),
        column("examples/s", "prediction", lambda e: e.throughput, format_count),
    ]
