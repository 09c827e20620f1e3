"""The command line. Answers go to stdout, progress and errors to stderr; a user's mistake exits with 2."""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft import __version__
from weft.console import print_confusion, print_metrics, print_table, tell
from weft.errors import ConfigError, WeftError
from weft.training.signals import Interrupted

if TYPE_CHECKING:
    from weft.pipeline import Pipeline

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
            print_metrics(pipeline.evaluate(tell=tell))
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
    found = _load(model, device, trust).judge(data, tell)
    if as_json:
        matrix = {"confusion": found.confusion.to_dict()} if found.confusion else {}
        typer.echo(json.dumps({**found.metrics, **matrix}, ensure_ascii=False))
        return
    print_metrics(found.metrics)
    if found.confusion:
        print_confusion(found.confusion)


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
    print_table(*result.table(), title=f"{budget} of training each")
    print_table(*result.answers(), title="answers to unseen examples")
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
    from weft import looking
    from weft.inspect.look import check_out, save

    check_out(out)
    looking.check_look(model, texts, gradients, beside, layers or heads)
    if gradients:
        content = looking.gradients(
            [*([model] if model else []), *(beside or [])], texts or [], out.suffix, device, trust
        )
    else:
        content = looking.attention(
            model or "",
            texts or [],
            out.suffix,
            looking.numbers("--layers", layers),
            looking.numbers("--heads", heads),
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
    print_table(["recipe", "task", "model", "tokenizer"], rows)
    for kind, table in TABLE.items():
        typer.echo(f"{kind}s: {', '.join(table)}")


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """List the data sets that ship with weft."""
    from weft.data.samples import SAMPLES

    if as_json:
        typer.echo(json.dumps([{"name": s.name, "task": s.task, "about": s.about} for s in SAMPLES.values()]))
        return
    print_table(
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
    print_table(
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


def _load(model: str, device: str, trust: bool) -> "Pipeline":
    from weft.pipeline import load

    return load(model, device, trust)


def _options(pairs: Iterable[str]) -> dict[str, Any]:
    from weft.config import apply_override

    chosen: dict[str, Any] = {}
    for pair in pairs:
        apply_override(chosen, pair)
    return chosen
