"""The report of a comparison, made from its results alone: `report.html`, `report.md` and `comparison.csv`."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.analysis.render.page import caption, cards, details, escaped, heading, page, paragraph, table
from weft.checkpoint.atomic_io import write_atomic
from weft.comparison.answers import attention_parts, class_parts, example_parts, surprise_parts
from weft.comparison.figures import cost_figures, curve_figures, length_figures
from weft.comparison.findings import findings, title
from weft.comparison.quantities import MISSING, format_budget, format_metric, format_p_value, plural
from weft.comparison.ranking import best_entry, ranked
from weft.comparison.results import ComparisonResults
from weft.comparison.table import REASON, Group, metric_header, result_columns
from weft.comparison.text_files import csv_text, markdown_text
from weft.errors import ConfigError

_MAX_SETTINGS = 8  # columns; more settings are written in one


def write_report(results: ComparisonResults, folder: Path) -> Path:
    """Write `report.html`, `report.md` and `comparison.csv` into a folder; return the path of the page."""
    path = folder / "report.html"
    texts = {path: report_page(results), folder / "report.md": markdown_text(results)}
    texts[folder / "comparison.csv"] = csv_text(results)
    for file, text in texts.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(file, text.encode("utf-8", "replace"))
        except OSError as error:
            raise ConfigError(f"{file}: cannot be written: {error.strerror}; choose another --out") from None
    return path


def report_page(results: ComparisonResults) -> str:
    """Return the report as one HTML page that needs no network."""
    sections = {
        "Results": [*map(paragraph, findings(results)), *_tables(results)],
        "Quality against cost": cost_figures(results),
        "Learning curves": curve_figures(results),
        "Quality by length of the input": length_figures(results),
        f"F1 by {results.class_unit}": class_parts(results),
        "The same examples, answered by each": example_parts(results),
        "The same text, shaded by surprise": surprise_parts(results),
        "Attention": attention_parts(results),
        "What was compared, and how": [*_settings(results), *_method(results)],
    }
    parts = [part for name, section in sections.items() if section for part in (heading(name), *section)]
    facts = cards(_facts(results))
    return page(
        title(results),
        [facts, *parts],
        f"weft compare: the same training data, a budget of {format_budget(results.budget)} each, the same "
        f"{results.split_name} examples",
    )


def _facts(results: ComparisonResults) -> dict[str, object]:
    best = best_entry(results)
    facts: dict[str, object] = {} if best is None or len(results.entries) == 1 else {"best": best.name}
    facts |= {"budget of each": format_budget(results.budget), f"{results.split_name} examples": results.num_examples}
    return facts | {"seed" if len(results.seeds) == 1 else "seeds": ", ".join(map(str, results.seeds))}


def _tables(results: ComparisonResults) -> list[str]:
    """Return the table in three: quality, cost of training, cost of prediction."""
    has_mfu = any(run.mfu is not None for entry in results.entries for run in entry.runs)
    captions: dict[Group, str] = {
        "quality": _quality_caption(results),
        "training": "What training took"
        + (", the mean over the seeds." if len(results.seeds) > 1 else ".")
        + " Operations are those of floating point, forward and backward. MFU (model FLOPs utilization) is how many of "
        "them there are in a second, in percent of the machine's peak." * has_mfu,
        "prediction": "What prediction takes on this machine: size on disk, the latency of one example at a time (the "
        "median and the 99th percentile), and the throughput in batches.",
    }
    parts = []
    for group, text in captions.items():
        headers, rows = _group_table(results, group)
        if len(headers) > 1:
            best = {(0, 1 + ("model" in headers))} if group == "quality" and best_entry(results) else set()
            parts += [caption(text, "table"), table(headers, rows, best if len(rows) > 1 else ())]
    return [*parts, *_differences(results), *_failures(results)]


def _group_table(results: ComparisonResults, group: Group) -> tuple[list[str], list[list[object]]]:
    """Return the columns of a group beside the names, and of entries those that have any of them."""
    columns = [column for column in result_columns(results) if column.group in ("name", group)]
    if group != "quality":
        columns = [column for column in columns if column.header != "model"]
    rows: list[list[object]] = [list(row) for row in zip(*(column.cells for column in columns), strict=True)]
    shown = [row for row in rows if group == "quality" or any(cell is not None for cell in row[1:])]
    return [column.header for column in columns], shown


def _quality_caption(results: ComparisonResults) -> str:
    name = metric_header(results, results.metric).rstrip(" ↑↓")
    seeds = f"; mean ± standard deviation over {plural(len(results.seeds), 'seed')}" if len(results.seeds) > 1 else ""
    against = (
        " An entry is called worse than the best only if the difference is significant: p < 0.05, by a paired "
        "bootstrap over the examples."
    )
    tested = against if any(entry.versus_best for entry in results.entries) else ""
    examples = plural(results.num_examples, f"{results.split_name} example")
    return f"Quality on {examples}, by {name} ({results.direction}){seeds}.{tested}"


def _differences(results: ComparisonResults) -> list[str]:
    """Return the differences from the best entry with their confidence intervals."""
    best, rows = best_entry(results), []
    for entry in ranked(results):
        if (test := entry.versus_best) is not None and best is not None:
            low, high = (format_metric(results.metric, end, sign=True) for end in (test.low, test.high))
            difference = format_metric(results.metric, test.difference, sign=True)
            rows.append([entry.name, difference, f"{low} to {high}", format_p_value(test.p_value)])
    if best is None or not rows:
        return []
    headers = ["entry", f"difference from {best.name}", "95 % confidence interval", "p-value"]
    return [details("Differences from the best, with confidence intervals", [table(headers, rows)])]


def _failures(results: ComparisonResults) -> list[str]:
    """Return in full why entries failed, where the table has no room for it."""
    failures = ((entry.name, entry.failure) for entry in ranked(results) if entry.failure is not None)
    return [paragraph(f"{name} failed: {failure}") for name, failure in failures if len(failure) > REASON]


def _settings(results: ComparisonResults) -> list[str]:
    """Return the keys in which entries differ, with the value of each."""
    keys = list(dict.fromkeys(key for entry in results.entries for key in entry.settings))
    if not keys:
        return []
    settings = {e.name: {key: _setting(value) for key, value in e.settings.items()} for e in ranked(results)}
    text = "The keys in which the entries differ."
    if len(keys) <= _MAX_SETTINGS:
        rows = [[name, *map(own.get, keys)] for name, own in settings.items()]
        return [caption(text, "table"), table(["entry", *keys], rows)]
    common = _common(list(settings.values()))
    own_alone = {name: {k: v for k, v in own.items() if common.get(k) != v} for name, own in settings.items()}
    rows = [[name, ", ".join(f"{k}={v}" for k, v in own.items()) or None] for name, own in own_alone.items()]
    if common:
        text += " The first row is what most of them have, the others are where an entry departs from it."
        rows.insert(0, ["(most entries)", ", ".join(f"{key}={value}" for key, value in common.items())])
    return [caption(text, "table"), table(["entry", "settings"], rows)]


def _common(settings: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the settings that more than half of the entries have."""
    counts = Counter(pair for own in settings for pair in own.items())
    return {key: value for (key, value), count in counts.items() if 2 * count > len(settings)}


def _setting(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _method(results: ComparisonResults) -> list[str]:
    """Return the task, the budget and the machine as a list of facts."""
    facts = {
        "task": results.task,
        "metric": f"{metric_header(results, results.metric).rstrip(' ↑↓')}, {results.direction}",
        "split": f"{results.split_name}, {plural(results.num_examples, 'example')}",
        "budget": format_budget(results.budget),
        "seeds": ", ".join(map(str, results.seeds)) or MISSING,
        **results.machine,
    }
    items = (f'<dt dir="auto">{escaped(key)}</dt><dd dir="auto">{escaped(value)}</dd>' for key, value in facts.items())
    return [f'<dl class="facts">{"".join(items)}</dl>']
