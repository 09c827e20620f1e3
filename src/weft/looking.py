"""What `weft look` does: from models and texts to one file."""

from pathlib import Path

from weft.console import tell
from weft.errors import ConfigError, RoleError
from weft.inspect.gradients import fresh
from weft.inspect.look import Reached, render_attention, render_gradients, render_positions
from weft.inspect.positions import positions_in, sinusoidal
from weft.pipeline import load


def check_look(
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


def attention(
    model: str,
    texts: list[str],
    ending: str,
    layers: list[int] | None,
    heads: list[int] | None,
    device: str,
    trust: bool,
) -> bytes:
    """Draw where a model looks."""
    pipeline = load(model, device, trust)
    try:
        looks = [pipeline.attention(text, layers, heads) for text in texts]
    except RoleError as error:
        train = "train it with model.attention, or " if hasattr(pipeline.run.model, "attention") else ""
        raise RoleError(f"{error}; {train}look at its --gradients") from None
    return render_attention(looks, ending, f"weft look: {model}", pipeline.about, tell)


def gradients(models: list[str], texts: list[str], ending: str, device: str, trust: bool) -> bytes:
    """Draw how far the last loss of models reaches back; with no model, of fresh cells."""
    if not models:
        title, about = "weft look: gradients", "cells as they are before training, on one random sequence"
        return render_gradients([Reached("", fresh())], ending, title, about, tell)
    short = [Path(name).name for name in models]
    names = short if len(set(short)) == len(short) else models
    pipelines = {name: load(model, device, trust) for name, model in zip(names, models, strict=True)}
    found = [Reached(text, [one for name, p in pipelines.items() for one in p.gradients(text, name)]) for text in texts]
    about = "; ".join(dict.fromkeys(pipeline.about for pipeline in pipelines.values()))
    return render_gradients(found, ending, f"weft look: gradients of {', '.join(pipelines)}", about, tell)


def positions(model: str | None, ending: str, device: str, trust: bool) -> bytes:
    """Draw the positions of a model; with none, sinusoidal ones."""
    if model is None:
        about = "as they are computed (Vaswani et al. 2017, section 3.5); nothing is learned"
        return render_positions([sinusoidal()], ending, "weft look: positions", about, tell)
    pipeline = load(model, device, trust)
    found = positions_in(pipeline.head.body, pipeline.run.model.name)
    return render_positions(found, ending, f"weft look: positions of {model}", pipeline.about, tell)


def numbers(option: str, text: str | None) -> list[int] | None:
    """Read numbers between commas."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"{option}: must be numbers between commas, such as 0,2, but is {text!r} instead")
    return sorted({int(part) for part in parts})
