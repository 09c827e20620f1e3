"""`weft look`: attention, gradients, positions and neighbours of a model, each a command that writes one file."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from weft.cli.console import Device, Trust, tell
from weft.errors import ConfigError, RoleError

if TYPE_CHECKING:
    from weft.pipeline import Pipeline

_OPTIONS_BEFORE = {  # options of `weft look` that became commands -> how these are called
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
                if option in _OPTIONS_BEFORE:
                    raise ConfigError(f"{option}: is a command now: {_OPTIONS_BEFORE[option]}")
            args = ["attention", *args]
        return list(super().parse_args(ctx, args))


look_app = typer.Typer(
    cls=_AttentionByDefault,
    no_args_is_help=True,
    help="Show what a model attends to, its gradients, its positions, or a word's nearest contexts. "
    "`weft look MODEL TEXT` is `weft look attention MODEL TEXT`.",
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A run's directory or a checkpoint.")]
AnyModel = Annotated[str | None, typer.Argument(metavar="MODEL", help="A run's directory or a checkpoint.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="A page (.html), a picture (.png) or data (.json).")]
Layers = Annotated[str | None, typer.Option("--layers", metavar="0,2,…", help="Which layers, counted from 0.")]
_OUT = Path("look.html")


@look_app.command()
def attention(
    model: Model,
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help="What the model reads.")],
    out: Out = _OUT,
    layers: Layers = None,
    heads: Annotated[str | None, typer.Option("--heads", metavar="0,2,…", help="Which heads, counted from 0.")] = None,
    trust: Trust = False,
    device: Device = "auto",
) -> None:
    """Show the attention weights of every layer and head."""
    from weft.analysis.render.export import check_out, render_attention

    check_out(out)
    chosen = _numbers("--layers", layers), _numbers("--heads", heads)
    pipeline = _load(model, device, trust)
    try:
        maps = [pipeline.attention(text, *chosen) for text in texts]
    except RoleError as error:
        train = "train it with model.attention, or " if hasattr(pipeline.run.model, "attention") else ""
        raise RoleError(f"{error}; {train}see its gradients: weft look gradients") from None
    _save(out, render_attention(maps, out.suffix, f"weft look: {model}", pipeline.about, tell))


@look_app.command()
def gradients(
    model: AnyModel = None,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="What the model reads.")] = None,
    beside: Annotated[
        list[str] | None, typer.Option("--beside", metavar="MODEL", help="Another model, for the same texts.")
    ] = None,
    out: Out = _OUT,
    trust: Trust = False,
    device: Device = "auto",
) -> None:
    """Show how strongly the last loss depends on each earlier step; without MODEL, in untrained cells."""
    from weft.analysis.render.export import check_out

    check_out(out)
    if model is None and beside:
        raise ConfigError("--beside: needs a MODEL and a TEXT to compare with")
    if model is not None and not texts:
        raise ConfigError(f"look gradients: needs a TEXT for {model} to read")
    models = [*([model] if model else []), *(beside or [])]
    _check_distinct(models)
    _save(out, _gradients(models, texts or [], out.suffix, device, trust))


@look_app.command()
def positions(model: AnyModel = None, out: Out = _OUT, trust: Trust = False, device: Device = "auto") -> None:
    """Show the position encodings of a model and their similarities; without MODEL, sinusoidal ones."""
    from weft.analysis.positions import positions_in, sinusoidal
    from weft.analysis.render.export import check_out, render_positions

    check_out(out)
    if model is None:
        encodings, title = [sinusoidal()], "weft look: positions"
        about = "as they are computed (Vaswani et al. 2017, section 3.5); nothing is learned"
    else:
        pipeline = _load(model, device, trust)
        encodings = positions_in(pipeline.head.body, pipeline.run.model.name)
        title, about = f"weft look: positions of {model}", pipeline.about
    _save(out, render_positions(encodings, out.suffix, title, about, tell))


@look_app.command()
def neighbours(
    model: Model,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="A text that uses the word.")],
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="The corpus; the training text if not given.")
    ] = None,
    word: Annotated[str | None, typer.Option("--word", help="Which word of TEXT; needed where it has several.")] = None,
    top: Annotated[int, typer.Option("--top", help="How many neighbours.")] = 10,
    layers: Layers = None,
    out: Out = _OUT,
    trust: Trust = False,
    device: Device = "auto",
) -> None:
    """List the places of a corpus where a word has the contextual embeddings nearest to those it has in TEXT."""
    from weft.analysis.contextual_neighbours import NeighbourSearch, check_word
    from weft.analysis.render.export import check_out, render_neighbours

    check_out(out)
    if out.suffix == ".png":
        raise ConfigError(f"--out: neighbours are words, for a page (.html) or data (.json), but {str(out)!r} is asked")
    word, chosen = check_word(text, word, top), _numbers("--layers", layers) or [-1]
    pipeline = _load(model, device, trust)
    finder = NeighbourSearch(pipeline.task, pipeline.head, pipeline.run.data.max_length, chosen)
    nearest = finder.nearest(text, word, _corpus(pipeline, files or []), top)
    _save(out, render_neighbours(nearest, out.suffix, f"weft look: neighbours in {model}", pipeline.about))


def _load(model: str, device: str, trust: bool) -> "Pipeline":
    from weft.pipeline import load

    return load(model, device, trust)


def _save(out: Path, content: bytes) -> None:
    """Write the file, and print its name."""
    from weft.analysis.render.export import save

    save(out, content)
    typer.echo(out)


def _check_distinct(models: list[str]) -> None:
    """Refuse a model that is given twice."""
    paths = [Path(name).resolve() for name in models]
    for name, path in zip(models[1:], paths[1:], strict=True):
        if paths.count(path) > 1:
            raise ConfigError(f"--beside: {name} is there already, and would give the same line; name another model")


def _gradients(models: list[str], texts: list[str], suffix: str, device: str, trust: bool) -> bytes:
    """Return the page, picture or data of the gradients of models; without models, of untrained cells."""
    from weft.analysis.gradient_flow import fresh
    from weft.analysis.render.export import Reached, render_gradients

    if not models:
        title, about = "weft look: gradients", "cells as they are before training, on one random sequence"
        return render_gradients([Reached("", fresh())], suffix, title, about, tell)
    short = [Path(name).name for name in models]
    names = short if len(set(short)) == len(short) else models
    pipelines = {name: _load(model, device, trust) for name, model in zip(names, models, strict=True)}
    results = [
        Reached(text, [norms for name, pipeline in pipelines.items() for norms in pipeline.gradients(text, name)])
        for text in texts
    ]
    about = "; ".join(dict.fromkeys(pipeline.about for pipeline in pipelines.values()))
    return render_gradients(results, suffix, f"weft look: gradients of {', '.join(pipelines)}", about, tell)


def _corpus(pipeline: "Pipeline", files: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the lines of files or, where there are none, the training texts, each with its place."""
    from weft.data.readers.examples import Skipped
    from weft.data.readers.lines import read_lines
    from weft.tasks.prepare import read_split

    data = pipeline.run.data
    for path in files:
        for number, line in read_lines(path, data.max_line_bytes):
            if isinstance(line, str):
                yield f"{path}:{number}", line
    if not files and not (data.sample or data.train):
        raise ConfigError(
            "look neighbours: the model does not say what it was trained on; name a corpus, a text file, after TEXT"
        )
    for place, example in () if files else read_split(data, "train", pipeline.task, Skipped()):
        yield str(place), pipeline.task.preview(example)[0]


def _numbers(option: str, text: str | None) -> list[int] | None:
    """Return the numbers between commas."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"{option}: must be numbers between commas, such as 0,2, but is {text!r} instead")
    return sorted({int(part) for part in parts})
