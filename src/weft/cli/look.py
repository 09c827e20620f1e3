"""`weft look`: from models and texts to one file."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.console import Device, Trust, tell
from weft.errors import ConfigError, RoleError

if TYPE_CHECKING:
    from weft.pipeline import Pipeline


def look(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A run's directory or a checkpoint.")] = None,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="What it is to read; of --neighbours, corpus files.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="A page (.html), a picture (.png) or data (.json).")] = Path(
        "look.html"
    ),
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="0,2,…", help="All if not given; of --neighbours, the last.")
    ] = None,
    heads: Annotated[str | None, typer.Option("--heads", metavar="0,2,…", help="All if not given.")] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="How far the last loss reaches back; with no MODEL, in fresh cells.")
    ] = False,
    positions: Annotated[
        bool, typer.Option("--positions", help="The position encodings; with no MODEL, sinusoidal ones.")
    ] = False,
    beside: Annotated[
        list[str] | None, typer.Option("--beside", metavar="MODEL", help="Another model for the same gradients.")
    ] = None,
    neighbours: Annotated[
        str | None, typer.Option("--neighbours", metavar="TEXT", help="Where a corpus uses a word as this text does.")
    ] = None,
    word: Annotated[str | None, typer.Option("--word", help="The word of --neighbours that is looked for.")] = None,
    top: Annotated[int, typer.Option("--top", help="How many neighbours.")] = 10,
    trust: Trust = False,
    device: Device = "auto",
) -> None:
    """Show where a model looks, how far its gradients reach, its positions, or a word's nearest contexts."""
    from weft.analysis.render.export import check_out, save

    check_out(out)
    if neighbours is not None or word is not None:
        _check_neighbours(neighbours, model, out, bool(gradients or positions or beside or heads))
        content = _neighbours(model or "", neighbours or "", word, texts or [], out.suffix, top, layers, device, trust)
    else:
        _check_look(model, texts, gradients, positions, beside, layers or heads)
        chosen = _numbers("--layers", layers), _numbers("--heads", heads)
        if positions:
            content = _positions(model, out.suffix, device, trust)
        elif gradients:
            models = [*([model] if model else []), *(beside or [])]
            content = _gradients(models, texts or [], out.suffix, device, trust)
        else:
            content = _attention(model or "", texts or [], out.suffix, *chosen, device, trust)
    save(out, content)
    typer.echo(out)


def _check_look(
    model: str | None,
    texts: list[str] | None,
    gradients: bool,
    positions: bool,
    beside: list[str] | None,
    chosen: str | None,
) -> None:
    """Refuse options that do not go together."""
    if positions:
        _check_positions(texts, gradients, beside, chosen)
        return
    if model is None and (not gradients or beside):
        raise ConfigError("look: needs a MODEL and a TEXT; only --gradients or --positions alone goes without")
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


def _check_positions(texts: list[str] | None, gradients: bool, beside: list[str] | None, chosen: str | None) -> None:
    if gradients:
        raise ConfigError("--positions, --gradients: each is a page of its own; leave one out")
    if texts:
        raise ConfigError(f"--positions: are the same for every text, but {texts[0]!r} is given; leave it out")
    if beside or chosen:
        raise ConfigError("--positions: takes a MODEL or none, and no --beside, --layers or --heads; leave them out")


def _check_neighbours(text: str | None, model: str | None, out: Path, others: bool) -> None:
    if text is None:
        raise ConfigError("--word: is a word of a text; give that with --neighbours")
    if model is None:
        raise ConfigError("--neighbours: needs a MODEL that gives words their vectors")
    if others:
        raise ConfigError(
            "--neighbours: is a page of its own; leave --gradients, --positions, --beside and --heads out"
        )
    if out.suffix == ".png":
        raise ConfigError(f"--out: neighbours are words, for a page (.html) or data (.json), but {str(out)!r} is asked")


def _attention(
    model: str,
    texts: list[str],
    ending: str,
    layers: list[int] | None,
    heads: list[int] | None,
    device: str,
    trust: bool,
) -> bytes:
    """Draw where a model looks."""
    from weft.analysis.render.export import render_attention
    from weft.pipeline import load

    pipeline = load(model, device, trust)
    try:
        looks = [pipeline.attention(text, layers, heads) for text in texts]
    except RoleError as error:
        train = "train it with model.attention, or " if hasattr(pipeline.run.model, "attention") else ""
        raise RoleError(f"{error}; {train}see whether it has --gradients") from None
    return render_attention(looks, ending, f"weft look: {model}", pipeline.about, tell)


def _gradients(models: list[str], texts: list[str], ending: str, device: str, trust: bool) -> bytes:
    """Draw how far the last loss of models reaches back; with no model, of fresh cells."""
    from weft.analysis.gradients import fresh
    from weft.analysis.render.export import Reached, render_gradients
    from weft.pipeline import load

    if not models:
        title, about = "weft look: gradients", "cells as they are before training, on one random sequence"
        return render_gradients([Reached("", fresh())], ending, title, about, tell)
    short = [Path(name).name for name in models]
    names = short if len(set(short)) == len(short) else models
    pipelines = {name: load(model, device, trust) for name, model in zip(names, models, strict=True)}
    found = [Reached(text, [one for name, p in pipelines.items() for one in p.gradients(text, name)]) for text in texts]
    about = "; ".join(dict.fromkeys(pipeline.about for pipeline in pipelines.values()))
    return render_gradients(found, ending, f"weft look: gradients of {', '.join(pipelines)}", about, tell)


def _positions(model: str | None, ending: str, device: str, trust: bool) -> bytes:
    """Draw the positions of a model; with none, sinusoidal ones."""
    from weft.analysis.positions import positions_in, sinusoidal
    from weft.analysis.render.export import render_positions
    from weft.pipeline import load

    if model is None:
        about = "as they are computed (Vaswani et al. 2017, section 3.5); nothing is learned"
        return render_positions([sinusoidal()], ending, "weft look: positions", about, tell)
    pipeline = load(model, device, trust)
    found = positions_in(pipeline.head.body, pipeline.run.model.name)
    return render_positions(found, ending, f"weft look: positions of {model}", pipeline.about, tell)


def _neighbours(
    model: str,
    text: str,
    word: str | None,
    files: list[str],
    ending: str,
    top: int,
    layers: str | None,
    device: str,
    trust: bool,
) -> bytes:
    """List where a corpus, or else the training text of a model, uses a word most as a text does."""
    from weft.analysis.neighbours import Finder, check_word
    from weft.analysis.render.export import render_neighbours
    from weft.pipeline import load

    word, chosen = check_word(text, word, top), _numbers("--layers", layers) or [-1]
    pipeline = load(model, device, trust)
    finder = Finder(pipeline.task, pipeline.head, pipeline.run.data.longest, chosen)
    found = finder.nearest(text, word, _corpus(pipeline, files), top)
    return render_neighbours(found, ending, f"weft look: neighbours in {model}", pipeline.about)


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
        raise ConfigError("--neighbours: the model does not say what it was trained on; name a corpus, a text file")
    for place, example in () if files else read_split(data, "train", pipeline.task, Skipped()):
        yield str(place), pipeline.task.preview(example)[0]


def _numbers(option: str, text: str | None) -> list[int] | None:
    """Read numbers between commas."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"{option}: must be numbers between commas, such as 0,2, but is {text!r} instead")
    return sorted({int(part) for part in parts})
