"""What is ready to use: `weft models`, `weft data` and `weft tokenizer`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.console import EngineOption, JsonOption, ModelArg, OverridesArg, TrustOption, print_table, read_path, tell
from weft.cli.data_check import data_check
from weft.cli.describe import copy_recipe, show
from weft.config.json import write_json
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.config.run import Run
    from weft.tasks.corpus.build import SplitProgress

data_app = typer.Typer(help="List, check, show and prepare data.", no_args_is_help=True)
data_app.command("check")(data_check)
tokenizer_app = typer.Typer(help="Train a tokenizer, or show the tokens of a text.", no_args_is_help=True)


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A trained model, recipe, preset, model, task, tokenizer, or the section data or train.",
        ),
    ] = None,
    copy: Annotated[
        Path | None,
        typer.Option("--copy", parser=read_path, metavar="FILE", help="Write the recipe NAME to a file, to change it."),
    ] = None,
    as_json: JsonOption = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="List what computes each operation on this machine instead, and why.")
    ] = False,
) -> None:
    """List what is ready to use: trained models, recipes, sizes (presets), models, tasks, tokenizers; or show one.

    Of a trained model, its card; of a recipe or a preset, its YAML; of a model, a task, a tokenizer or a section, its
    options.
    """
    if kernels and (name or copy):
        raise ConfigError(f"--kernels: lists operations, but {name or copy} is given as well; leave one out")
    if kernels:
        _print_kernels(as_json)
        return
    if copy:
        copy_recipe(name, copy)
        return
    if name:
        show(name, as_json)
        return
    from weft.config.recipes import expand_preset, preset_names, read_preset, read_recipe, recipe_names
    from weft.config.yaml import write_yaml
    from weft.registry import TABLE

    ready = {name: read_recipe(name) for name in recipe_names()}
    ready = {name: {**raw, "model": expand_preset(raw["model"])} for name, raw in ready.items()}
    presets = {name: read_preset(name) for name in preset_names()}
    if as_json:
        known = {f"{kind}s": list(table) for kind, table in TABLE.items()}
        typer.echo(write_json({"trained": _trained_models(), "recipes": ready, "presets": presets, **known}))
        return
    print_table(
        ["trained model", "task", "model", "MB", "about"],
        [[str(cell) for cell in row.values()] for row in _trained_models()],
    )
    kinds = ("task", "model", "tokenizer")
    ready_kinds = {
        name: {**raw, "task": {"name": "multitask"}} if "tasks" in raw else raw for name, raw in ready.items()
    }
    rows = [
        [name, *(raw.get(kind, {}).get("name", "that of the weights") for kind in kinds)]
        for name, raw in ready_kinds.items()
        if "compare" not in raw
    ]
    compared = [
        [name, raw["task"]["name"], ", ".join(raw["compare"])] for name, raw in ready.items() if "compare" in raw
    ]
    print_table(["recipe", "task", "model", "tokenizer"], rows)
    print_table(["comparison", "task", "variants"], compared)
    sizes = [[name, raw.pop("name"), ", ".join(write_yaml(raw).splitlines())] for name, raw in presets.items()]
    print_table(["preset", "model", "settings"], sizes)
    for kind, table in TABLE.items():
        typer.echo(f"{kind}s: {', '.join(table)}")


def _trained_models() -> list[dict[str, Any]]:
    """Return a row for each model that ships with weft."""
    from weft.checkpoint.contents import read_recipe_of
    from weft.zoo import ROOT, bundled_models, summary

    rows = []
    for name in bundled_models():
        recipe, size = read_recipe_of(ROOT / name), (ROOT / name / "model.safetensors").stat().st_size
        kinds = {kind: recipe[kind]["name"] for kind in ("task", "model")}
        rows.append({"name": name, **kinds, "MB": round(size / 1e6, 1), "about": summary(name)})
    return rows


def _print_kernels(as_json: bool) -> None:
    from weft.nn.kernels.report import KernelChoice, choices

    rows = choices()
    if as_json:
        for row in rows:
            typer.echo(write_json(row._asdict()))
        return
    print_table(list(KernelChoice._fields), [list(row) for row in rows])
    if all(row.device == "cpu" for row in rows):
        tell("no GPU is visible: Triton kernels are for CUDA alone")


@data_app.command("list")
def data_list(as_json: JsonOption = False) -> None:
    """List the data sets that ship with weft."""
    from weft.data.samples.datasets import SAMPLES

    if as_json:
        typer.echo(write_json([{"name": s.name, "task": s.task, "about": s.about} for s in SAMPLES.values()]))
        return
    print_table(
        ["sample", "task", "fields", "about"], [[s.name, s.task, " ".join(s.fields), s.about] for s in SAMPLES.values()]
    )


@data_app.command("show")
def data_show(
    name: Annotated[str, typer.Argument(metavar="SAMPLE|RECIPE", help="A sample, or a recipe's file or name.")],
    overrides: OverridesArg = None,
    split: Annotated[str, typer.Option("--split", help="train, valid or test.")] = "train",
    rows: Annotated[int, typer.Option("--rows", "-n", help="How many; 0 for all.", min=0, max=1 << 31)] = 10,
) -> None:
    """Print rows of a split as JSON, one a line: the examples as the task reads them."""
    if split not in ("train", "valid", "test"):
        raise ConfigError(f"--split: must be train, valid or test, but is {split!r} instead")
    for row in islice(_read_rows(name, split, overrides or []), rows or None):
        typer.echo(write_json(row))


@data_app.command("prepare")
def data_prepare(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A file or name; its task, data, tokenizer and model are used.")
    ],
    out: Annotated[
        Path, typer.Option("--out", parser=read_path, help="The folder for the corpus, which data.train can name.")
    ],
    overrides: OverridesArg = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Processes; all cores if not given.", min=1, max=1024)
    ] = None,
    split: Annotated[str, typer.Option("--split", help="train, valid, test or all.")] = "all",
    engine: EngineOption = "local",
) -> None:
    """Turn text into token arrays that training memory-maps; if it was stopped before, continue."""
    from weft.data.samples.datasets import SPLITS
    from weft.formats.pretrained import started_tokenizer
    from weft.tasks.corpus.build import prepare
    from weft.tasks.prepare import has_split

    run = _read_untrained(recipe, overrides or [])
    if split not in (*SPLITS, "all"):
        raise ConfigError(f"--split: must be train, valid, test or all, but is {split!r} instead")
    if split != "all" and not has_split(run.data, split):
        raise ConfigError(f"--split: the recipe has no data.{split}; add it, or prepare another split")
    try:
        with _progress_bars() as report:
            splits = SPLITS if split == "all" else (split,)
            result = prepare(run, out, splits, workers, report, tokenizer=started_tokenizer(run), engine=engine)
    except KeyboardInterrupt:
        tell(f"stopped; the finished parts are in {out}: run the command again to continue")
        raise typer.Exit(130) from None
    rows = [
        [name, *(f"{count:,}" for count in (part.documents, part.tokens, part.bytes, part.size))]
        for name, part in result.splits.items()
    ]
    print_table(["split", "documents", "tokens", "bytes of text", "bytes on disk"], rows)
    for name, part in result.splits.items():
        if part.notice:
            tell(f"data.{name}: {part.notice}")


@contextmanager
def _progress_bars() -> Iterator[Callable[["SplitProgress"], None]]:
    """Yield a function that draws the progress of each split, where stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=16), TaskProgressColumn(), TimeRemainingColumn())
    status = TextColumn("{task.fields[tokens]:,} tokens")
    bars: dict[str, Progress] = {}

    def show(stage: "SplitProgress") -> None:
        if stage.split not in bars:  # not earlier: drawing starts a thread, and workers are forked before
            bars[stage.split] = Progress(*columns, status, console=console, disable=not console.is_terminal)
            bars[stage.split].add_task(stage.split, total=stage.total, tokens=stage.tokens)
            bars[stage.split].start()
        bar = bars[stage.split]
        bar.update(bar.task_ids[0], completed=stage.done, tokens=stage.tokens)
        if stage.done == stage.total:
            bar.stop()

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.stop()


@tokenizer_app.command("train")
def tokenizer_train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A file or name; its task, data and tokenizer are used.")
    ],
    overrides: OverridesArg = None,
    out: Annotated[Path, typer.Option("--out", parser=read_path, help="The folder for tokenizer.json.")] = Path(
        "tokenizer"
    ),
) -> None:
    """Train a recipe's tokenizer alone."""
    from weft.tasks.factory import make_task
    from weft.training.run import make_tokenizer

    run = _read_untrained(recipe, overrides or [])
    tokenizer = make_tokenizer(run, make_task(run))
    try:
        out.mkdir(parents=True, exist_ok=True)
        tokenizer.save(out)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}") from None
    typer.echo(f"{len(tokenizer):,} tokens in {out / 'tokenizer.json'}")


@tokenizer_app.command("show")
def tokenizer_show(
    model: ModelArg,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text to tokenize.")],
    as_json: JsonOption = False,
    trust: TrustOption = False,
) -> None:
    """Show the tokens of a text, their ids and their character offsets."""
    from weft.pipeline import load

    tokenizer = load(model, "cpu", trust).tokenizer
    encoding = tokenizer.encode(text)
    rows = list(zip(encoding.tokens, encoding.ids, encoding.offsets, strict=True))
    if as_json:
        typer.echo(write_json([{"token": t, "id": i, "start": a, "end": b} for t, i, (a, b) in rows]))
        return
    print_table(
        ["token", "id", "start", "end", "text"], [[t, str(i), str(a), str(b), text[a:b]] for t, i, (a, b) in rows]
    )


def _read_rows(name: str, split: str, overrides: Sequence[str]) -> Iterator[dict[str, Any]]:
    from weft.data.readers.examples import Skipped
    from weft.data.samples.datasets import SAMPLES, read_sample
    from weft.tasks.factory import make_task
    from weft.tasks.prepare import read_split

    if name in SAMPLES and not overrides:
        return (row for _, row in read_sample(name, split))
    run = _read_untrained(name, overrides)
    examples = read_split(run.data, split, make_task(run), Skipped())
    return (example.model_dump(exclude_none=True) for _, example in examples)


def _read_untrained(recipe: str, overrides: Sequence[str]) -> "Run":
    """Read a recipe that is not trained here, so that it needs no budget."""
    from weft.formats.pretrained import read_run

    return read_run(recipe, ["train.steps=1", *overrides])
