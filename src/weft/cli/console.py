"""Arguments and options that several commands have; tables and notices, in a terminal or a pipe."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.config.json import write_json
from weft.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from weft.tasks.classification_report import ClassificationReport
    from weft.tasks.length_report import LengthReport
    from weft.tasks.lm.minimal_pairs import MinimalPairsResult
    from weft.tasks.metrics import ConfusionMatrix


def read_path(text: str) -> Path:
    """Parse a path; an empty one, such as a shell variable that is not set, would be the current folder."""
    return Path(read_name(text))


def read_name(text: str) -> str:
    """Parse the name or the path of a model or a file."""
    if not text:
        raise ConfigError("a path is empty, '': name a file or a folder; this folder is .")
    return text


MODEL_HELP = "A run, a checkpoint, a Hugging Face directory or hub name."
ModelArg = Annotated[str, typer.Argument(parser=read_name, metavar="MODEL", help=MODEL_HELP)]
OverridesArg = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes: train.lr=3e-4, data.valid=dev.tsv, …")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON, one object a line.")]
TrustOption = Annotated[bool, typer.Option("--trust", help="Let the checkpoint run classes from outside weft.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.")]
ColumnsOption = Annotated[
    list[str] | None,
    typer.Option("--columns", metavar="FIELD=COLUMN,…", help="The file's columns, by name or number: text=review."),
]
TextsArg = Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Read from stdin if none.")]
FileOption = Annotated[
    str | None,
    typer.Option("--file", "-f", parser=read_name, help="Rows like the training data's, or a text a line: .txt."),
]
TaskOption = Annotated[
    str | None, typer.Option("--task", metavar="NAME", help="Of a model of several tasks, the one that is meant.")
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Stop at the first row that has an error.")]
EngineOption = Annotated[
    str,
    typer.Option("--engine", help="local, or ray: the cluster of RAY_ADDRESS, else this machine."),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress: notices and results alone.")]
PrecisionOption = Annotated[str, typer.Option("--precision", help="fp32, bf16, or on the CPU int8.")]

MAX_LABELS = 30  # of a confusion matrix that is printed whole


def tell(notice: str) -> None:
    """Print a notice to stderr."""
    typer.echo(notice, err=True)


def check_source(texts: Sequence[str] | None, file: str | None, out: Path | None, engine: str) -> None:
    """Raise an error if both texts and a file of texts are given, or if Ray has no file to read or to write."""
    from weft.ray_engine import is_ray

    if texts and file:
        raise ConfigError(f"--file: replaces TEXT, but both are given: {file} and {texts[0]!r}; leave one out")
    if is_ray(engine) and (file is None or out is None):
        raise ConfigError("--engine ray: reads a file and writes a file; give --file and --out")


def print_metrics(metrics: Mapping[str, float], positive_label: str | None = None) -> None:
    """Print a table of metrics; a binary F1 has the label that it is of, the positive one, beside its name."""
    from weft.tasks.metrics import metric_title

    rows = [[metric_title(name, positive_label), f"{value:.4f}"] for name, value in metrics.items()]
    print_table(["metric", "value"], rows)


def print_report(report: "ClassificationReport | LengthReport") -> None:
    """Print precision, recall, F1 and support of each class, and their averages; or the metrics by length of input."""
    from weft.tasks.length_report import LengthReport

    if isinstance(report, LengthReport):
        print_table(*report.table(), title="by the length of the input")
    else:
        print_table(*report.table(), title=f"classification report, by {report.unit}", section=len(report.classes))


def print_pairs(result: "MinimalPairsResult", as_json: bool) -> None:
    """Print the share of minimal pairs whose acceptable sentence is the likelier, by phenomenon."""
    if as_json:
        paradigms = {paradigm.name: paradigm.accuracy for paradigm in result.paradigms}
        typer.echo(write_json({"accuracy": result.accuracy, "phenomena": result.phenomena, "paradigms": paradigms}))
        return
    rows = [[name.replace("_", " "), f"{accuracy:.1%}"] for name, accuracy in result.phenomena.items()]
    title = f"minimal pairs whose acceptable sentence is the likelier, in {len(result.paradigms)} paradigms"
    print_table(["phenomenon", "accuracy"], [*rows, ["all paradigms", f"{result.accuracy:.1%}"]], title=title)


def print_confusion(matrix: "ConfusionMatrix") -> None:
    """Print a confusion matrix; of many labels, or if it is too wide for the terminal, the most frequent errors."""
    headers = ["true \\ predicted", *matrix.labels]
    rows = [[label, *map(str, counts)] for label, counts in zip(matrix.labels, matrix.counts, strict=True)]
    if len(matrix.labels) <= MAX_LABELS and fit_columns([headers, *rows], _terminal_width()) is not None:
        print_table(headers, rows, title="confusion matrix")
        return
    mistakes = matrix.mistakes()
    shown = [[true, predicted, str(count)] for true, predicted, count in mistakes[:MAX_LABELS]]
    title = f"most confused pairs, {len(shown)} of {len(mistakes):,}; --json has the confusion matrix of all labels"
    print_table(["true", "predicted", "count"], shown, title=title)


def print_table(headers: list[str], rows: list[list[str]], title: str | None = None, section: int = 0) -> None:
    """Print a table; columns of numbers are right-aligned, and a blank line follows row number `section`.

    In a narrow terminal cells are wrapped at words.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=_terminal_width())
    if title:  # not the table's own title, which is wrapped to the table's width
        console.print(Text(title, style="italic"))
    widths = fit_columns([headers, *rows], console.width)
    if widths is None:
        _print_records(console, headers, rows)
        return
    # Text, not str: a name may look like rich's markup, such as [red].
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    numeric = [all(_is_number(row[column]) for row in rows) for column in range(len(headers))]
    for header, right, width in zip(headers, numeric, widths, strict=True):
        table.add_column(Text(header), justify="right" if right else "left", overflow="fold", width=width)
    for number, row in enumerate(rows, 1):
        table.add_row(*(Text(cell) for cell in row), end_section=number == section)
    console.print(table)


def _terminal_width() -> int:
    """Return the width of the terminal; in a pipe there is none to fit, so rows are not wrapped."""
    from rich.console import Console

    return Console().width if sys.stdout.isatty() else 10_000


def fit_columns(rows: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Return a width for each column of a table, so that it fits `room` and no word is broken; None if it cannot."""
    from rich.cells import cell_len

    columns = list(zip(*rows, strict=True))
    widest = [max(map(cell_len, column)) for column in columns]
    least = [max((cell_len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    free = room - 3 * len(columns) - sum(least)  # three: a space on each side, and one between
    if free < 0:
        return None
    wanted = [most - fewest for most, fewest in zip(widest, least, strict=True)]
    share = min(1.0, free / max(1, sum(wanted)))
    return [fewest + int(share * more) for fewest, more in zip(least, wanted, strict=True)]


def _print_records(console: "Console", headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table that is too wide for the terminal row by row, a line a cell."""
    from rich.text import Text

    for row in rows:
        for header, cell in zip(headers, row, strict=True):
            console.print(Text.assemble((f"{header}: ", "bold"), cell))
        console.print()


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").replace("-", "").rstrip("% s").isdigit()
