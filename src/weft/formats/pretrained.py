"""Starting from a model that was trained before: `model.weights` names it, ours or a Hugging Face directory.

What it is fills in the recipe, so that a fine-tuning need say no more than where the weights are: the section of the
model, and that of the tokenizer, which comes with it. What the recipe says itself must fit. Then its body's weights
are copied; what the new task alone has starts afresh. It is so when a training starts, and only then: a checkpoint is
whole in itself.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from weft.checkpoint import contents
from weft.checkpoint.store import Store, resolve_checkpoint, verify
from weft.config.schema import Run, expand_preset, read_recipe, read_section
from weft.data.readers.lines import count
from weft.errors import CheckpointError, ConfigError, WeftError
from weft.formats.huggingface.folder import describe_hf, is_hf, load_hf
from weft.formats.huggingface.hub import find_model
from weft.formats.sentence_transformers import transformer_folder
from weft.registry import resolve
from weft.tasks.base import Head, Task
from weft.tasks.factory import build
from weft.tokenization.trainable import Tokenizer, load_tokenizer

T = TypeVar("T")
OWN = ("weights", "vectors")  # how a model began is its own affair
FREE = ("drop", "heads_off", "pooler")  # what may differ from what the weights were trained with


def open_model(path: str | Path, trust: bool = False, overrides: Iterable[str] = ()) -> tuple[Run, Task, Head]:
    """Read a run's directory, one of its checkpoints, a Hugging Face directory, or one that a name on the hub has."""
    folder = _found(path)
    if is_hf(folder):
        return load_hf(folder, overrides)
    verify(folder)
    run = contents.read_run(folder, trust, overrides)
    task, head = build(run, load_tokenizer(run.tokenizer, folder))
    contents.load_weights(folder, head)
    return run, task, head


def describe_model(path: str | Path) -> tuple[Run, Tokenizer]:
    """Say what a model is, with its tokenizer; no weight is read."""
    folder = _found(path)
    if is_hf(folder):
        return describe_hf(folder)
    run = contents.read_run(folder)
    return run, load_tokenizer(run.tokenizer, folder)


def _found(path: str | Path) -> Path:
    folder = transformer_folder(find_model(path))
    return folder if is_hf(folder) else resolve_checkpoint(folder)


def read_run(recipe: str | Path | Mapping[str, Any], overrides: Iterable[str] = (), resumed: Path | None = None) -> Run:
    """Read a recipe and check it; what it leaves to `model.weights` is filled in.

    If its training goes on in the directory `resumed`, what is there fills it in: the weights may be gone by now.
    """
    raw = read_recipe(recipe, overrides)
    model = raw.get("model")
    if isinstance(model, Mapping) and model.get("weights") is not None:
        run = _begun(resumed) or _named(model["weights"], describe_model)[0]
        raw = {**raw, "model": _model(expand_preset(model), run), "tokenizer": _tokenizer(raw.get("tokenizer"), run)}
    return Run.parse(raw)


def _begun(out: Path | None) -> Run | None:
    """Return the recipe of the last checkpoint in a directory, if there is one that can be read."""
    with suppress(WeftError):  # who goes on with it will say what is wrong
        last = None if out is None else Store(out).last()
        return None if last is None else contents.read_run(last)
    return None


def started_tokenizer(run: Run) -> Tokenizer | None:
    """Return the tokenizer of the model that a run starts from; None where it starts from nothing."""
    path = getattr(run.model, "weights", None)
    return None if path is None else _named(path, describe_model)[1]


def start_from_weights(run: Run, head: Head) -> str | None:
    """Copy the weights of the body, and say what was copied; None where the run starts from nothing."""
    path = getattr(run.model, "weights", None)
    if path is None:
        return None
    then, _, other = _named(path, open_model)
    found = contents.prune_heads(contents.weights(other), head)
    own = contents.weights(head)
    same = _same_task(then, run)
    shared = {name: found[name] for name in own if name in found and (same or name.startswith("body."))}
    for name, value in shared.items():
        if value.shape != own[name].shape:
            raise CheckpointError(
                f"model.weights: {path}: {name} must be {tuple(own[name].shape)}, but is {tuple(value.shape)} instead"
            )
        with torch.no_grad():
            own[name].copy_(value)
    fresh = sorted({name.rpartition(".")[0] for name in own if name not in shared})
    rest = f"; fresh: {', '.join(fresh)}" if fresh else ""
    return f"model.weights: {count(len(shared), 'weight')} from {path}{rest}"


def _same_task(then: Run, now: Run) -> bool:
    """Whether what stands on the body means the same, so that it is gone on with."""
    return then.task.name == now.task.name and getattr(then.task, "labels", 0) == getattr(now.task, "labels", 0)


def _named(path: object, read: Callable[[str], T]) -> T:
    """Read what `model.weights` names, and say of every error that it is that."""
    if not isinstance(path, str) or not path:
        raise ConfigError(f"model.weights: must name a model, by its directory or on the hub, but is {path!r} instead")
    try:
        return read(path)
    except WeftError as error:
        raise type(error)(f"model.weights: {error}") from None


def _model(own: Mapping[str, Any], then: Run) -> dict[str, Any]:
    """Fill in what the model's section leaves out, and refuse what its weights were not trained with."""
    theirs = {key: value for key, value in then.model.model_dump(mode="json").items() if key not in OWN}
    if own.get("name", theirs["name"]) != theirs["name"]:
        raise ConfigError(
            f"model.name: is {own['name']!r}, but model.weights is a {theirs['name']!r}; name that, or leave it out"
        )
    whole: dict[str, Any] = {**theirs, **own}
    settled = read_section(resolve("model", theirs["name"]).Config, whole, "model").model_dump(mode="json")
    for key, (was, is_now) in contents.differences(theirs, settled).items():
        if not key.startswith(OWN) and not any(free in key for free in FREE):
            raise ConfigError(
                f"model.{key}: is {is_now!r}, but model.weights was trained with {was!r}; leave it out, or train "
                "without the weights"
            )
    return whole


def _tokenizer(own: object, then: Run) -> dict[str, Any]:
    """Take the tokenizer of the weights: their words are its tokens."""
    theirs = then.tokenizer.model_dump(mode="json", exclude_none=True)
    for key, value in own.items() if isinstance(own, Mapping) else ():
        if value != theirs.get(key):
            raise ConfigError(
                f"tokenizer.{key}: is {value!r}, but the tokenizer of model.weights has {theirs.get(key)!r}, and it "
                "comes with them; leave the section out"
            )
    return theirs
