"""Pretrained models: loading, and fine-tuning from `model.weights`, a weft checkpoint or a Hugging Face directory.

The pretrained model completes the recipe's sections of model and tokenizer, so that a fine-tuning recipe only needs the
path of the weights; what the recipe itself sets must be compatible. Then the body's weights are copied; the new task's
own weights are initialized. This happens only when a training starts: a checkpoint is self-contained.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.checkpoint import contents
from weft.checkpoint.store import Store, resolve_checkpoint, verify_checkpoint
from weft.config.overrides import Overrides
from weft.config.recipes import expand_preset, read_recipe
from weft.config.run import Run
from weft.config.schema import Pretrained, read_section
from weft.data.readers.lines import plural
from weft.errors import CheckpointError, ConfigError, WeftError
from weft.formats.huggingface.folder import describe_hf, is_hf, load_hf
from weft.formats.huggingface.hub import find_model
from weft.formats.sentence_transformers import transformer_folder
from weft.registry import resolve
from weft.tasks.base import Task
from weft.tasks.head import Head
from weft.tokenization.trainable import Tokenizer, load_tokenizer

_T = TypeVar("_T")
NOT_INHERITED = ("weights", "vectors", "keep_layers")  # where a model's weights came from; not inherited
OVERRIDABLE = ("drop", "pruned_heads", "pooler")  # settings that may differ from those of the weights


def open_model(path: str | Path, trust: bool = False, overrides: Overrides = ()) -> tuple[Run, Task, Head]:
    """Load a run's directory, a checkpoint, a Hugging Face directory, or a model by its name on the hub."""
    folder = _resolve_folder(path)
    if is_hf(folder):
        return load_hf(folder, overrides)
    verify_checkpoint(folder)
    run = contents.read_saved_run(folder, trust, overrides)
    return run, *contents.load_head(run, load_tokenizer(run.tokenizer, folder), folder)


def describe_model(path: str | Path) -> tuple[Run, Tokenizer]:
    """Return recipe and tokenizer of a model; no weights are read."""
    folder = _resolve_folder(path)
    if is_hf(folder):
        return describe_hf(folder)
    run = contents.read_saved_run(folder)
    return run, load_tokenizer(run.tokenizer, folder)


def _resolve_folder(path: str | Path) -> Path:
    folder = transformer_folder(find_model(path))
    return folder if is_hf(folder) else resolve_checkpoint(folder)


def read_run(recipe: str | Path | Mapping[str, Any], overrides: Overrides = (), resumed: Path | None = None) -> Run:
    """Read and validate a recipe; what it leaves out is completed from `model.weights`.

    If its training resumes in the directory `resumed`, that completes it: the weights may no longer exist.
    """
    raw = read_recipe(recipe, overrides)
    model = raw.get("model")
    if isinstance(model, Mapping) and model.get("weights") is not None:
        run, tokenizer = _describe_resumed(resumed) or _read_weights_key(model["weights"], describe_model)
        raw = {
            **raw,
            "model": _complete_model(expand_preset(model), run),
            "tokenizer": _complete_tokenizer(raw.get("tokenizer"), run),
        }
        return _with_max_length(Run.parse(raw), tokenizer)
    teacher = _teacher_of(raw)
    if teacher is not None and "tokenizer" not in raw:
        raw["tokenizer"] = read_teacher(teacher, describe_model)[0].tokenizer.model_dump(exclude_none=True)
    return Run.parse(raw)


def _teacher_of(raw: Mapping[str, Any]) -> object:
    """Return `train.distill.teacher` of a recipe that is not yet validated; None without it."""
    section: object = raw
    for key in ("train", "distill", "teacher"):
        section = section.get(key) if isinstance(section, Mapping) else None
    return section


def _describe_resumed(out: Path | None) -> tuple[Run, Tokenizer] | None:
    """Return recipe and tokenizer of the last checkpoint in a directory; None if there is none that can be read."""
    with suppress(WeftError):  # resuming will raise it
        last = None if out is None else Store(out).last()
        return None if last is None else describe_model(last)
    return None


def _with_max_length(run: Run, tokenizer: Tokenizer) -> Run:
    """Set `data.max_length` to what the weights allow where it is not given, or larger and long texts may be cut."""
    if run.task_names:
        tasks = {name: _with_max_length(run.for_task(name), tokenizer).data for name in run.task_names}
        return run.model_copy(update={"data": run.data.model_copy(update={"tasks": tasks})})
    limit, data = max_length_of_weights(run, tokenizer), run.data
    given = "max_length" in data.model_fields_set
    if limit is None or (given and (data.max_length <= limit or data.truncation == "error")):
        return run
    return run.model_copy(update={"data": data.model_copy(update={"max_length": limit})})


def max_length_of_weights(run: Run, tokenizer: Tokenizer) -> int | None:
    """Return the largest `data.max_length` for the positions of pretrained weights; None where there is no limit."""
    positions = run.model.position_limit if isinstance(run.model, Pretrained) and run.model.weights else None
    task_class = resolve("task", run.task.name)
    if positions is None or not issubclass(task_class, Task):
        return None
    task: Task = task_class(run.task)
    task.tokenizer = tokenizer
    return max(1, positions - task.num_special_tokens)


def started_tokenizer(run: Run) -> Tokenizer | None:
    """Return the tokenizer of a run's pretrained model; None without one."""
    path = getattr(run.model, "weights", None)
    return None if path is None else _read_weights_key(path, describe_model)[1]


def start_from_weights(run: Run, head: Head) -> str | None:
    """Copy pretrained weights into a head, and return a message about them; None without a pretrained model."""
    path = getattr(run.model, "weights", None)
    if path is None:
        return None
    pretrained_run, _, pretrained = _read_weights_key(path, open_model)
    tensors = contents.prune_heads(_kept_layers(contents.weights(pretrained), run, pretrained_run), head)
    weights = contents.weights(head)
    same_task = _same_task(pretrained_run, run)
    shared = {name: tensors[name] for name in weights if name in tensors and (same_task or name.startswith("body."))}
    for name, value in shared.items():
        if value.shape != weights[name].shape:
            expected, shape = tuple(weights[name].shape), tuple(value.shape)
            raise CheckpointError(f"model.weights: {path}: {name} must be {expected}, but is {shape} instead")
        with torch.no_grad():
            weights[name].copy_(value)
    initialized = sorted({_module_name(name) for name in weights if name not in shared})
    note = f"; initialized: {', '.join(initialized)}" if initialized else ""
    return f"model.weights: {plural(len(shared), 'weight')} from {path}{note}"


def _kept_layers(tensors: dict[str, Tensor], run: Run, pretrained: Run) -> dict[str, Tensor]:
    """Return weights with the layers that `model.keep_layers` names, numbered from 0; all of them without."""
    kept = getattr(run.model, "keep_layers", None)
    if kept is None:
        return tensors
    blocks, count = f"body.{getattr(run.model, 'place', '')}.blocks.", getattr(pretrained.model, "layers", 0)
    if kept[-1] >= count:
        raise ConfigError(f"model.keep_layers: model.weights has the layers 0 to {count - 1}, but {kept[-1]} is kept")
    numbers = {str(old): str(new) for new, old in enumerate(kept)}
    chosen: dict[str, Tensor] = {}
    for name, value in tensors.items():
        number, _, rest = name.removeprefix(blocks).partition(".")
        if not name.startswith(blocks):
            chosen[name] = value
        elif number in numbers:
            chosen[f"{blocks}{numbers[number]}.{rest}"] = value
    return chosen


def _module_name(weight: str) -> str:
    """Return the module of a weight; of the layers that a task adds, the one that holds them all."""
    return weight.rpartition(".")[0] if weight.startswith("body.") else weight.partition(".")[0]


def _same_task(pretrained: Run, run: Run) -> bool:
    """Return whether the task's own weights can be copied: same task, same labels; of several tasks none are."""
    old, new = pretrained.task, run.task
    return not run.task_names and old.name == new.name and getattr(old, "labels", 0) == getattr(new, "labels", 0)


def _read_weights_key(path: object, read: Callable[[str], _T], key: str = "model.weights") -> _T:
    """Read the model that `model.weights`, or another `key`, names, with that key in every error."""
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{key}: must name a model, by its directory or on the hub, but is {path!r} instead")
    try:
        return read(path)
    except WeftError as error:
        raise type(error)(f"{key}: {error}") from None


def read_teacher(path: object, read: Callable[[str], _T]) -> _T:
    """Read the model that `train.distill.teacher` names, with that key in every error."""
    return _read_weights_key(path, read, "train.distill.teacher")


def _complete_model(section: Mapping[str, Any], pretrained: Run) -> dict[str, Any]:
    """Complete the model's section; raise an error for settings that the weights were not trained with."""
    inherited = {
        key: value for key, value in pretrained.model.model_dump(mode="json").items() if key not in NOT_INHERITED
    }
    if isinstance(section.get("keep_layers"), list | tuple):
        inherited["layers"] = len(section["keep_layers"])
    if section.get("name", inherited["name"]) != inherited["name"]:
        raise ConfigError(
            f"model.name: is {section['name']!r}, but model.weights is a {inherited['name']!r}; name that, or leave it "
            "out"
        )
    merged: dict[str, Any] = {**inherited, **section}
    parsed = read_section(resolve("model", inherited["name"]).Config, merged, "model").model_dump(mode="json")
    for key, (pretrained_value, value) in contents.differences(inherited, parsed).items():
        if not key.startswith(NOT_INHERITED) and not any(free in key for free in OVERRIDABLE):
            raise ConfigError(
                f"model.{key}: is {value!r}, but model.weights was trained with {pretrained_value!r}; leave it out, or "
                "train without the weights"
            )
    return merged


def _complete_tokenizer(section: object, pretrained: Run) -> dict[str, Any]:
    """Return the tokenizer section of the weights; raise an error for other settings."""
    inherited = pretrained.tokenizer.model_dump(mode="json", exclude_none=True)
    for key, value in section.items() if isinstance(section, Mapping) else ():
        if value != inherited.get(key):
            raise ConfigError(
                f"tokenizer.{key}: is {value!r}, but the tokenizer of model.weights has {inherited.get(key)!r}, and it "
                "comes with them; leave the section out"
            )
    return inherited
