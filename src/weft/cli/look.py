"""`weft look`: attention, gradients, positions and neighbours of a model; each command writes one file."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from weft.cli.console import (
    MODEL_HELP,
    ColumnsOption,
    DeviceOption,
    ModelArg,
    TaskOption,
    TrustOption,
    read_path,
    tell,
)
from weft.errors import ConfigError, DataError, RoleError

if TYPE_CHECKING:
    from weft.data.readers.column_mapping import ColumnSpec
    from weft.pipeline import Pipeline

_REMOVED_OPTIONS = {  # former options of `weft look` -> the command in its place
    "--gradients": "weft look gradients MODEL TEXT",
    "--positions": "weft look positions MODEL",
    "--neighbours": "weft look neighbours MODEL TEXT --word WORD",
}


class _AttentionByDefault(TyperGroup):
    """A group whose command is `attention` where none is named: `weft look MODEL TEXT`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            for option in args:
                if option in _REMOVED_OPTIONS:
                    raise ConfigError(f"{option}: is a command now: {_REMOVED_OPTIONS[option]}")
            args = ["attention", *args]
        return list(super().parse_args(ctx, args))


look_app = typer.Typer(
    cls=_AttentionByDefault,
    no_args_is_help=True,
    help="Show what a model attends to, its gradients, its positions, or a word's nearest contexts. "
    "`weft look MODEL TEXT` is `weft look attention MODEL TEXT`.",
)

OptionalModelArg = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
OutOption = Annotated[
    Path, typer.Option("--out", "-o", parser=read_path, help="A page (.html), a picture (.png) or data (.json).")
]
LayersOption = Annotated[str | None, typer.Option("--layers", metavar="0,2,…", help="Which layers, counted from 0.")]
_DEFAULT_OUT = Path("look.html")


@look_app.command("attention")
def look_attention(
    model: ModelArg,
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help="The model's input.")],
    out: OutOption = _DEFAULT_OUT,
    layers: LayersOption = None,
    heads: Annotated[str | None, typer.Option("--heads", metavar="0,2,…", help="Which heads, counted from 0.")] = None,
    task: TaskOption = None,
    trust: TrustOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Show the attention weights of every layer and head."""
    from weft.analysis.render.export import check_writable, render_attention

    check_writable(out)
    layer_numbers, head_numbers = _parse_numbers("--layers", layers), _parse_numbers("--heads", heads)
    pipeline = _load(model, device, trust, task)
    try:
        maps = [pipeline.attention(text, layer_numbers, head_numbers) for text in texts]
    except RoleError as error:
        remedy = "train it with model.attention, or " if hasattr(pipeline.run.model, "attention") else ""
        raise RoleError(f"{error}; {remedy}see its gradients: weft look gradients") from None
    _save(out, render_attention(maps, out.suffix, f"weft look: {model}", pipeline.about, tell))


@look_app.command("gradients")
def look_gradients(
    model: OptionalModelArg = None,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="The model's input.")] = None,
    beside: Annotated[
        list[str] | None, typer.Option("--beside", metavar="MODEL", help="Another model, for the same texts.")
    ] = None,
    out: OutOption = _DEFAULT_OUT,
    task: TaskOption = None,
    trust: TrustOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Show the gradient norm of the last step's loss at each input step; without MODEL, of untrained cells."""
    from weft.analysis.render.export import check_writable

    check_writable(out)
    if model is None and beside:
        raise ConfigError("--beside: needs a MODEL and a TEXT to compare with")
    if model is not None and not texts:
        raise ConfigError(f"look gradients: needs a TEXT for {model} to read")
    models = [*([model] if model else []), *(beside or [])]
    _check_distinct(models)
    _save(out, _gradients(models, texts or [], out.suffix, device, trust, task))


@look_app.command("positions")
def look_positions(
    model: OptionalModelArg = None,
    out: OutOption = _DEFAULT_OUT,
    trust: TrustOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Show the position encodings of a model and their similarities; without MODEL, sinusoidal ones."""
    from weft.analysis.positions import positions_in, sinusoidal
    from weft.analysis.render.export import check_writable, render_positions
    from weft.pipeline import load

    check_writable(out)
    if model is None:
        encodings, title = [sinusoidal()], "weft look: positions"
        about = "as they are computed (Vaswani et al. 2017, section 3.5); nothing is learned"
    else:
        pipeline = load(model, device, trust)
        encodings = positions_in(pipeline.head.body, pipeline.run.model.name)
        title, about = f"weft look: positions of {model}", pipeline.about
    _save(out, render_positions(encodings, out.suffix, title, about, tell))


@look_app.command("neighbours")
def look_neighbours(
    model: ModelArg,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="A text that uses the word.")],
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="The corpus; the training text if not given.")
    ] = None,
    word: Annotated[str | None, typer.Option("--word", help="The word of TEXT; required where it has several.")] = None,
    top: Annotated[int, typer.Option("--top", help="How many neighbours.")] = 10,
    columns: ColumnsOption = None,
    layers: LayersOption = None,
    out: OutOption = _DEFAULT_OUT,
    task: TaskOption = None,
    trust: TrustOption = False,
    device: DeviceOption = "auto",
) -> None:
    """List the uses of a word in a corpus whose contextual embeddings are nearest to its embedding in TEXT."""
    from weft.analysis.contextual_neighbours import NeighbourSearch, check_word
    from weft.analysis.render.export import check_writable, render_neighbours
    from weft.cli.inputs import parse_columns

    check_writable(out)
    if out.suffix == ".png":
        raise ConfigError(f"--out: must end in .html or .json for neighbours, but is {str(out)!r} instead")
    column_names = parse_columns(columns, files or None)
    word, layer_numbers = check_word(text, word, top), _parse_numbers("--layers", layers) or [-1]
    pipeline = _load(model, device, trust, task)
    search = NeighbourSearch(pipeline.task, pipeline.head, pipeline.run.data.max_length, layer_numbers)
    nearest = search.nearest(text, word, _corpus(pipeline, files or [], column_names), top)
    _save(out, render_neighbours(nearest, out.suffix, f"weft look: neighbours in {model}", pipeline.about))


def _load(model: str, device: str, trust: bool, task: str | None) -> "Pipeline":
    from weft.pipeline import load

    return load(model, device, trust).for_task(task)


def _load_each(models: dict[str, str], device: str, trust: bool, task: str | None) -> "dict[str, Pipeline]":
    """Return the pipelines of models by name; `task` is of those that have several."""
    from weft.pipeline import load

    loaded = {name: load(model, device, trust) for name, model in models.items()}
    several = {name for name, pipeline in loaded.items() if pipeline.run.task_names} or set(loaded)
    return {name: pipeline.for_task(task) if name in several else pipeline for name, pipeline in loaded.items()}


def _save(out: Path, content: bytes) -> None:
    """Write the file, and print its name."""
    from weft.analysis.render.export import write_file

    write_file(out, content)
    typer.echo(out)


def _check_distinct(models: list[str]) -> None:
    """Raise an error if a model is given twice."""
    paths = [Path(name).resolve() for name in models]
    for name, path in zip(models[1:], paths[1:], strict=True):
        if paths.count(path) > 1:
            raise ConfigError(f"--beside: {name} is given twice; name another model")


def _gradients(models: list[str], texts: list[str], suffix: str, device: str, trust: bool, task: str | None) -> bytes:
    """Return the gradient norms of models, or of untrained cells without any, as HTML, PNG or JSON."""
    from weft.analysis.gradient_flow import untrained_cell_norms
    from weft.analysis.render.export import TextGradients, render_gradients

    if not models:
        title, about = "weft look: gradients", "untrained cells, on one random sequence"
        return render_gradients([TextGradients("", untrained_cell_norms())], suffix, title, about, tell)
    base_names = [Path(name).name for name in models]
    names = base_names if len(set(base_names)) == len(models) else models
    pipelines = _load_each(dict(zip(names, models, strict=True)), device, trust, task)
    results = [
        TextGradients(text, [norms for name, pipeline in pipelines.items() for norms in pipeline.gradients(text, name)])
        for text in texts
    ]
    about = "; ".join(dict.fromkeys(pipeline.about for pipeline in pipelines.values()))
    return render_gradients(results, suffix, f"weft look: gradients of {', '.join(pipelines)}", about, tell)


def _corpus(pipeline: "Pipeline", files: list[str], columns: "ColumnSpec | None") -> Iterator[tuple[str, str]]:
    """Yield the texts of files or, without files, the training texts, each with its file and line number."""
    from weft.cli.embed import text_of, text_rows
    from weft.data.readers.examples import Skipped
    from weft.tasks.prepare import read_split

    data = pipeline.run.data
    for path in files:
        for record in text_rows(str(path), pipeline.task, pipeline.run.data, columns):
            if not isinstance(record.request, DataError):
                yield record.place, text_of(record)
    if not files and not (data.sample or data.train):
        raise ConfigError(
            "look neighbours: the model's training data is unknown; name a text file as corpus, after TEXT"
        )
    for location, example in () if files else read_split(data, "train", pipeline.task, Skipped()):
        yield str(location), pipeline.task.preview(example)[0]


def _parse_numbers(option: str, text: str | None) -> list[int] | None:
    """Return the comma-separated numbers of an option; None without it."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part) < 10 for part in parts):
        raise ConfigError(f"{option}: must be comma-separated numbers, such as 0,2, but is {text!r} instead")
    return sorted({int(part) for part in parts})
