"""What commands share: their arguments, and tables and notices in a terminal or a pipe."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.tasks.lm.minimal_pairs import MinimalPairsResult
    from weft.tasks.metrics import ConfusionMatrix

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run, a checkpoint, a Hugging Face directory or hub name.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes: train.lr=3e-4, data.valid=dev.tsv, …")
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON, one object a line.")]
Trust = Annotated[bool, typer.Option("--trust", help="Let the checkpoint run classes from outside weft.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.")]
Precision = Annotated[str, typer.Option("--precision", help="fp32, bf16, or on the CPU int8.")]

MOST_LABELS = 30  # whose confusion is shown as a table


def tell(notice: str) -> None:
    """Print a notice where it does not mix with answers."""
    typer.echo(notice, err=True)


def check_source(texts: Sequence[str] | None, file: Path | None) -> None:
    """Refuse texts beside a file of them."""
    if texts and file:
        raise ConfigError(
            f"--file: takes the place of texts, but both are given: {file} and {texts[0]!r}; leave one out"
        )


def print_metrics(metrics: Mapping[str, float]) -> None:
    """Print a table of metrics."""
    print_table(["metric", "value"], [[name, f"{value:.4f}"] for name, value in metrics.items()])


def print_pairs(found: "MinimalPairsResult", as_json: bool) -> None:
    """Print how often the right one of two sentences was the likelier, by phenomenon."""
    if as_json:
        paradigms = {one.name: one.accuracy for one in found.paradigms}
        typer.echo(json.dumps({"accuracy": found.accuracy, "phenomena": found.phenomena, "paradigms": paradigms}))
        return
    rows = [[name.replace("_", " "), f"{share:.1%}"] for name, share in found.phenomena.items()]
    title = f"the likelier of two sentences is the right one, in {len(found.paradigms)} paradigms"
    print_table(["phenomenon", "accuracy"], [*rows, ["all paradigms", f"{found.accuracy:.1%}"]], title=title)


def print_confusion(found: "ConfusionMatrix") -> None:
    """Print which label was taken for which; of many labels, those most confused."""
    if len(found.labels) > MOST_LABELS:  # a matrix that nobody can read: --json has it
        rows = [[right, given, str(times)] for right, given, times in found.mistakes()[:MOST_LABELS]]
        print_table(["is", "said", "times"], rows, title="most confused")
        return
    rows = [[label, *map(str, counts)] for label, counts in zip(found.labels, found.counts, strict=True)]
    print_table(["is \\ said", *found.labels], rows, title="which label was taken for which")


def print_table(headers: list[str], rows: list[list[str]], title: str | None = None) -> None:
    """Print a table; a column of numbers goes to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A name may look like rich's markup, such as [red].
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    numeric = [all(_is_number(row[column]) for row in rows) for column in range(len(headers))]
    for header, right in zip(headers, numeric, strict=True):
        table.add_column(Text(header), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    # In a pipe a table is as wide as it needs to be: no terminal is there to fit.
    console = Console(width=None if sys.stdout.isatty() else 10_000)
    if title:  # not the table's own, which would be broken to its width
        console.print(Text(title, style="italic"))
    console.print(table)


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").replace("-", "").rstrip("% s").isdigit()
