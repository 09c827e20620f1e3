"""A comparison as text: `report.md` for people, `comparison.csv` for programs, a row a training."""

import csv
import io
import re
from collections.abc import Iterable, Sequence

from weft.comparison.answers import distinct_answers
from weft.comparison.findings import findings, title
from weft.comparison.quantities import MISSING, format_budget, is_finite
from weft.comparison.ranking import ranked
from weft.comparison.results import ComparisonResults
from weft.comparison.table import result_table

_SPECIAL = re.compile(r"([\\`*_\[\]|<>#~])")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what begins with one of these, a spreadsheet computes
_EXAMPLES = 20  # in report.md
_OF_SEED = ("seconds", "steps", "tokens_per_s", "mfu", "peak_memory", "flops")
_OF_ENTRY = ("parameters", "disk_bytes", "latency_p50", "latency_p99", "throughput")


def markdown_text(results: ComparisonResults) -> str:
    """Return the findings, the table, the examples and the machine as Markdown."""
    parts = [f"# {_plain(title(results))}", *map(_plain, findings(results)), _table(*result_table(results))]
    parts += [_plain(f"{entry.name} failed: {entry.failure}") for entry in ranked(results) if entry.failure is not None]
    if results.examples:
        parts += ["## The same examples, answered by each", _examples(results)]
    facts = {
        "metric": f"{results.metric}, {results.direction}",
        "split": f"{results.split_name}, {results.num_examples:,} examples",
        "budget": format_budget(results.budget),
        "seeds": ", ".join(map(str, results.seeds)) or MISSING,
        **results.machine,
    }
    lines = "\n".join(f"- {_plain(key)}: {_plain(value)}" for key, value in facts.items())
    return "\n\n".join([*parts, "## What was compared, and how", lines]) + "\n"


def csv_text(results: ComparisonResults) -> str:
    """Return a row for each training of each entry, and one for an entry without any; values have all their digits."""
    metrics = list(dict.fromkeys([results.metric, *results.metric_names]))
    file = io.StringIO()
    writer = csv.writer(file)  # lines end in CR LF, as RFC 4180 asks
    writer.writerow(["entry", "model", "kind", "seed", *metrics, *_OF_SEED, *_OF_ENTRY, "p_value", "failure"])
    for entry in ranked(results):
        rest = [getattr(entry, name) for name in _OF_ENTRY]
        rest += [entry.versus_best.p_value if entry.versus_best else None, entry.failure]
        trainings: list[list[object]] = [
            [run.seed, *map(run.metrics.get, metrics), *(getattr(run, name) for name in _OF_SEED)] for run in entry.runs
        ]
        for values in trainings or [[None] * (1 + len(metrics) + len(_OF_SEED))]:
            writer.writerow(_printable([entry.name, entry.model, entry.kind, *values, *rest]))
    return file.getvalue()


def _printable(cells: Iterable[object]) -> list[object]:
    """Return cells for a CSV file: nothing in place of a number that is not finite, and no text that is a formula."""
    return [_guarded(cell) if isinstance(cell, str) else cell if _is_number(cell) else "" for cell in cells]


def _is_number(cell: object) -> bool:
    return isinstance(cell, int) or (isinstance(cell, float) and is_finite(cell))


def _guarded(text: str) -> str:
    """Return a text with an apostrophe before what a spreadsheet would take for a formula (OWASP, CSV injection)."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _examples(results: ComparisonResults) -> str:
    order = {entry.name: place for place, entry in enumerate(ranked(results))}
    marks = {True: "✓ ", False: "✗ ", None: ""}
    rows = [
        [example.text, example.expected, marks[cell.correct] + cell.text, ", ".join(names)]
        for example in results.examples[:_EXAMPLES]
        for cell, names in distinct_answers(example, order)
    ]
    return _table(["text", "expected", "answer", "entries"], rows)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    cells = ([cell if cell == "---" else _plain(cell) for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _plain(text: str) -> str:
    """Return a text on one line, without what Markdown or HTML would take for its own."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split())).replace("&", "&amp;")
