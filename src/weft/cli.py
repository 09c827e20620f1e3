"""The command line. Answers go to stdout, progress and errors to stderr; a user's mistake exits with 2."""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft import __version__
from weft.errors import ConfigError, RoleError, WeftError
from weft.training.signals import Interrupted

if TYPE_CHECKING:
    from weft.pipeline import Pipeline
    from weft.tasks.metrics import Confusion

MOST_LABELS = 30  # whose confusion is shown as a table

app = typer.Typer(
    name="weft",
    help="Train, compare, inspect and serve sequence models, from n-grams to BERT.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="List and show data.", no_args_is_help=True)
tokenizer_app = typer.Typer(help="Train a tokenizer, or see what one does.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A run's directory or a checkpoint.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as train.lr=3e-4.")
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON, one object a line.")]
Trust = Annotated[bool, typer.Option("--trust", help="Let the checkpoint run classes from outside weft.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.")]


def main() -> None:
    """Run the command line, and turn what a user can cause into one line and an exit code."""
    sys.path.insert(0, "")  # a recipe may name a class in a file beside it: my_model:MyModel
    try:
        app()
    except WeftError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("alloc|memory", str(error), re.IGNORECASE):
            raise
        told = str(error).splitlines()[0] if str(error) else "no more can be had"
        sys.stderr.write(f"error: out of memory: {told}; try a smaller model, train.batch_tokens or beam\n")
        sys.exit(2)
    except Interrupted as stop:
        sys.stderr.write(f"{stop}\n")
        sys.exit(stop.exit_code)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # which typer takes for a failure
            raise
        # The reader, such as head, has seen enough. What is still in the buffer must go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or the name of a recipe: see weft models.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's directory; runs/NAME if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint there.")] = False,
) -> None:
    """Train a recipe; end with the evaluation of its best model."""
    from weft.pipeline import run_name
    from weft.pipeline import train as run_training
    from weft.training.progress import ProgressBar

    folder = out or Path("runs") / run_name(recipe)
    try:
        pipeline = run_training(recipe, overrides or [], folder, resume, ProgressBar(run_name(recipe)))
    except Interrupted as stop:
        sys.stderr.write(f"{stop} in {folder}: go on with --resume\n")
        raise typer.Exit(stop.exit_code) from None
    if int(os.environ.get("RANK", "0")) == 0:
        if pipeline.has_data:
            _print_metrics(pipeline.evaluate(tell=_tell))
        typer.echo(f"the best model is in {folder / 'best'}: weft predict {folder}", err=True)


@app.command()
def evaluate(
    model: Model,
    data: Annotated[
        str | None, typer.Argument(metavar="[DATA]", help="A file, or a sample such as dates:valid.")
    ] = None,
    as_json: Json = False,
    trust: Trust = False,
    device: Device = "auto",
) -> None:
    """Score a model, on its recipe's test data if no other is given; for labels, show which was taken for which."""
    found = _load(model, device, trust).judge(data, _tell)
    if as_json:
        matrix = {"confusion": found.confusion.to_dict()} if found.confusion else {}
        typer.echo(json.dumps({**found.metrics, **matrix}, ensure_ascii=False))
        return
    _print_metrics(found.metrics)
    if found.confusion:
        _print_confusion(found.confusion)


@app.command()
def predict(
    model: Model,
    texts: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Read from stdin if none.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="An example a line; .jsonl has objects.")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="How to decode: beam=5, sample=true, …")
    ] = None,
    as_json: Json = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print each answer while it is generated.")] = False,
    trust: Trust = False,
    device: Device = "auto",
) -> None:
    """Do what the model's task does, for texts, a file or stdin."""
    from weft.feed import arriving, read_input

    if texts and file:
        raise ConfigError(
            f"--file: takes the place of texts, but both are given: {file} and {texts[0]!r}; leave one out"
        )
    if stream and as_json:
        raise ConfigError("--stream: prints text as it is generated, and --json whole answers; leave one out")
    pipeline, chosen = _load(model, device, trust), _options(options or [])
    examples: Iterator[Any] = iter(texts) if texts else read_input(file)
    if stream:
        for number, example in enumerate(examples):
            for piece in pipeline.stream(example, chosen, number):
                typer.echo(piece, nl=False)
            typer.echo()
        return
    done = 0
    for chunk in arriving(examples):
        for answer in pipeline.answers(chunk, chosen, start=done):
            typer.echo(json.dumps(answer, ensure_ascii=False) if as_json else pipeline.task.line(answer))
        done += len(chunk)
        sys.stdout.flush()


@app.command()
def compare(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE...", help="Files or names of recipes.")],
    budget: Annotated[str, typer.Option("--budget", help="For each: 60s, 5m, or a number of steps.")] = "60s",
    out: Annotated[Path, typer.Option("--out", help="Where the runs and report.html go.")] = Path("compared"),
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A change to every recipe.")
    ] = None,
) -> None:
    """Train recipes at one budget each; print one table, and write a page."""
    from weft.comparison import compare as run_comparison
    from weft.training.progress import ProgressBar

    result = run_comparison(recipes, budget, out, changes or [], ProgressBar)
    _print_table(*result.table(), title=f"{budget} of training each")
    _print_table(*result.answers(), title="answers to unseen examples")
    typer.echo(f"learning curves and alignments: {out / 'report.html'}")


@app.command()
def look(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A run's directory or a checkpoint; see --gradients.")
    ] = None,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="What it is to read.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="A page (.html), a picture (.png) or data (.json).")] = Path(
        "look.html"
    ),
    layers: Annotated[str | None, typer.Option("--layers", metavar="0,2,…", help="All if not given.")] = None,
    heads: Annotated[str | None, typer.Option("--heads", metavar="0,2,…", help="All if not given.")] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="How far the last loss reaches back; with no MODEL, in fresh cells.")
    ] = False,
    beside: Annotated[
        list[str] | None, typer.Option("--beside", metavar="MODEL", help="Another model for the same gradients.")
    ] = None,
    trust: Trust = False,
    device: Device = "auto",
) -> None:
    """Show where a model looks, or how far its gradients reach: one file that needs no network."""
    from weft.inspect.look import check_out, save

    check_out(out)
    _check_look(model, texts, gradients, beside, layers or heads)
    if gradients:
        content = _gradients([*([model] if model else []), *(beside or [])], texts or [], out.suffix, device, trust)
    else:
        content = _attention(
            model or "",
            texts or [],
            out.suffix,
            _numbers("--layers", layers),
            _numbers("--heads", heads),
            device,
            trust,
        )
    save(out, content)
    typer.echo(out)


@app.command()
def models(as_json: Json = False) -> None:
    """List what is ready to use: recipes, models, tasks, tokenizers."""
    from weft.config import read_recipe, recipe_names
    from weft.registry import TABLE

    ready = {name: read_recipe(name) for name in recipe_names()}
    if as_json:
        typer.echo(json.dumps({"recipes": ready, **{f"{kind}s": list(table) for kind, table in TABLE.items()}}))
        return
    rows = [[name, *(raw[kind]["name"] for kind in ("task", "model", "tokenizer"))] for name, raw in ready.items()]
    _print_table(["recipe", "task", "model", "tokenizer"], rows)
    for kind, table in TABLE.items():
        typer.echo(f"{kind}s: {', '.join(table)}")


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """List the data sets that ship with weft."""
    from weft.data.samples import SAMPLES

    if as_json:
        typer.echo(json.dumps([{"name": s.name, "task": s.task, "about": s.about} for s in SAMPLES.values()]))
        return
    _print_table(
        ["sample", "task", "fields", "about"], [[s.name, s.task, " ".join(s.fields), s.about] for s in SAMPLES.values()]
    )


@data_app.command("show")
def data_show(
    name: Annotated[str, typer.Argument(metavar="SAMPLE|RECIPE", help="A sample, or a recipe's file or name.")],
    split: Annotated[str, typer.Option("--split", help="train, valid or test.")] = "train",
    rows: Annotated[int, typer.Option("--rows", "-n", help="How many; 0 for all.", min=0)] = 10,
) -> None:
    """Print rows of a split as JSON, one a line: the examples as the task reads them."""
    from itertools import islice

    if split not in ("train", "valid", "test"):
        raise ConfigError(f"--split: must be train, valid or test, but is {split!r} instead")
    for row in islice(_rows(name, split), rows or None):
        typer.echo(json.dumps(row, ensure_ascii=False))


@tokenizer_app.command("train")
def tokenizer_train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A file or name: its task, data and tokenizer count.")
    ],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", help="The folder for tokenizer.json.")] = Path("tokenizer"),
) -> None:
    """Train a recipe's tokenizer alone."""
    from weft.config import Run, read_recipe
    from weft.tasks.build import make_task
    from weft.tasks.prepare import fit_tokenizer

    run = Run.parse(read_recipe(recipe, overrides or []))
    tokenizer = fit_tokenizer(run.tokenizer, run.data, make_task(run))
    try:
        out.mkdir(parents=True, exist_ok=True)
        tokenizer.save(out)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}") from None
    typer.echo(f"{len(tokenizer):,} tokens in {out / 'tokenizer.json'}")


@tokenizer_app.command("show")
def tokenizer_show(
    model: Model,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to cut.")],
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Show how a model's tokenizer cuts a text: tokens, ids, and where they stand in it."""
    tokenizer = _load(model, "cpu", trust).tokenizer
    found = tokenizer.encode(text)
    rows = list(zip(found.tokens, found.ids, found.offsets, strict=True))
    if as_json:
        typer.echo(
            json.dumps([{"token": t, "id": i, "start": a, "end": b} for t, i, (a, b) in rows], ensure_ascii=False)
        )
        return
    _print_table(
        ["token", "id", "start", "end", "text"], [[t, str(i), str(a), str(b), text[a:b]] for t, i, (a, b) in rows]
    )


def _rows(name: str, split: str) -> Iterator[dict[str, Any]]:
    from weft.config import Run, read_recipe
    from weft.data.records import Skipped
    from weft.data.samples import SAMPLES, read_sample
    from weft.tasks.build import make_task
    from weft.tasks.prepare import read_split

    if name in SAMPLES:
        return (row for _, row in read_sample(name, split))
    run = Run.parse(read_recipe(name))
    examples = read_split(run.data, split, make_task(run), Skipped())
    return (example.model_dump(exclude_none=True) for _, example in examples)


def _check_look(
    model: str | None, texts: list[str] | None, gradients: bool, beside: list[str] | None, chosen: str | None
) -> None:
    if model is None and (not gradients or beside):
        raise ConfigError("look: needs a MODEL and a TEXT; only --gradients alone goes without")
    if model is not None and not texts:
        raise ConfigError(f"look: needs a TEXT for {model} to read")
    if beside and not gradients:
        raise ConfigError("--beside: compares gradients, so it goes with --gradients; for attention, look at one model")
    if chosen and gradients:
        raise ConfigError("--layers, --heads: choose attention, so they do not go with --gradients")
    named = [Path(name).resolve() for name in (model or "", *(beside or ()))]
    if len(set(named)) < len(named):
        twice = next(name for name, path in zip(beside or (), named[1:], strict=True) if named.count(path) > 1)
        raise ConfigError(f"--beside: {twice} is there already, and would give the same line; name another model")


def _attention(
    model: str,
    texts: list[str],
    ending: str,
    layers: list[int] | None,
    heads: list[int] | None,
    device: str,
    trust: bool,
) -> bytes:
    from weft.inspect.look import render_attention

    pipeline = _load(model, device, trust)
    try:
        looks = [pipeline.attention(text, layers, heads) for text in texts]
    except RoleError as error:
        train = "train it with model.attention, or " if hasattr(pipeline.run.model, "attention") else ""
        raise RoleError(f"{error}; {train}look at its --gradients") from None
    return render_attention(looks, ending, f"weft look: {model}", pipeline.about, _tell)


def _gradients(models: list[str], texts: list[str], ending: str, device: str, trust: bool) -> bytes:
    from weft.inspect.gradients import fresh
    from weft.inspect.look import Reached, render_gradients

    if not models:
        title, about = "weft look: gradients", "cells as they are before training, on one random sequence"
        return render_gradients([Reached("", fresh())], ending, title, about, _tell)
    short = [Path(name).name for name in models]
    names = short if len(set(short)) == len(short) else models
    pipelines = {name: _load(model, device, trust) for name, model in zip(names, models, strict=True)}
    found = [Reached(text, [one for name, p in pipelines.items() for one in p.gradients(text, name)]) for text in texts]
    about = "; ".join(dict.fromkeys(pipeline.about for pipeline in pipelines.values()))
    return render_gradients(found, ending, f"weft look: gradients of {', '.join(pipelines)}", about, _tell)


def _numbers(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"{option}: must be numbers between commas, such as 0,2, but is {text!r} instead")
    return sorted({int(part) for part in parts})


def _tell(notice: str) -> None:
    typer.echo(notice, err=True)


def _load(model: str, device: str, trust: bool) -> "Pipeline":
    from weft.pipeline import load

    return load(model, device, trust)


def _options(pairs: Iterable[str]) -> dict[str, Any]:
    from weft.config import apply_override

    chosen: dict[str, Any] = {}
    for pair in pairs:
        apply_override(chosen, pair)
    return chosen


def _print_metrics(metrics: Mapping[str, float]) -> None:
    _print_table(["metric", "value"], [[name, f"{value:.4f}"] for name, value in metrics.items()])


def _print_confusion(found: "Confusion") -> None:
    if len(found.labels) > MOST_LABELS:  # a matrix that nobody can read: --json has it
        rows = [[right, given, str(times)] for right, given, times in found.mistakes()[:MOST_LABELS]]
        _print_table(["is", "said", "times"], rows, title="most confused")
        return
    rows = [[label, *map(str, counts)] for label, counts in zip(found.labels, found.counts, strict=True)]
    _print_table(["is \\ said", *found.labels], rows, title="which label was taken for which")


def _print_table(headers: list[str], rows: list[list[str]], title: str | None = None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A name may look like rich's markup, such as [red].
    table = Table(title=Text(title) if title else None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    numeric = [all(_is_number(row[column]) for row in rows) for column in range(len(headers))]
    for header, right in zip(headers, numeric, strict=True):
        table.add_column(Text(header), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    # In a pipe a table is as wide as it needs to be: no terminal is there to fit.
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").replace("-", "").rstrip("% s").isdigit()
