"""Models in the Hugging Face format, in both directions: a directory of config.json, model.safetensors, tokenizer.json.

A model's `HFMap` says how its configuration and weights are named there; what is here knows no model. What a family has
and ours has not is refused, never left out.
"""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.disk import explained, temporary_in
from weft.checkpoint.hf_text import read_json, read_tokenizer, write_json, write_tokenizer
from weft.checkpoint.hf_weights import read_weights, write_weights
from weft.checkpoint.manifest import MANIFEST
from weft.checkpoint.snapshot import changed_run, differences, fill
from weft.config import Run
from weft.errors import CheckpointError, ConfigError, did_you_mean
from weft.models.base import HFMap
from weft.registry import resolve
from weft.tasks.base import Head, Task
from weft.tasks.build import build
from weft.text.tokenizer import Tokenizer

FAMILIES = {"gpt2": "gpt", "openai-gpt": "gpt"}  # what config.json calls a model -> our name


def is_hf(folder: Path) -> bool:
    """Say whether this is a Hugging Face directory."""
    return (folder / "config.json").is_file() and not any((folder / own).exists() for own in (MANIFEST, "run.yaml"))


def load_hf(folder: Path, overrides: Iterable[str] = ()) -> tuple[Run, Task, Head]:
    """Read a Hugging Face directory; nothing is written."""
    told = read_json(folder / "config.json")
    family = _family_of(folder, told)
    tokenizer = read_tokenizer(folder, family, _vocab(folder, told))
    section = _section(folder, family, told)
    raw = {
        "task": {"name": _task_of(folder, family, told)},
        "data": {"train": [], "longest": section.get("longest", 1024)},  # what it was trained on is not told
        "tokenizer": tokenizer.config.model_dump(mode="json", exclude_none=True),
        "model": section,
        "train": {"steps": 1},
    }
    try:
        run = changed_run(raw, folder, overrides=overrides)
    except ConfigError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None
    task, head = build(run, tokenizer)
    fill(head, read_weights(folder, family, run, head), folder)
    return run, task, head


def save_hf(folder: Path, run: Run, tokenizer: Tokenizer, head: Head) -> Path:
    """Write a model as a Hugging Face directory, which `transformers` loads by AutoModel and AutoTokenizer."""
    family = family_for(run)
    told = _config(family, run, tokenizer)
    with explained(folder, "cannot be written", "choose a new folder in a place that can be written"):
        if folder.exists():
            raise CheckpointError(f"{folder}: exists already; choose a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_in(folder.parent)
        try:
            temporary.mkdir()
            write_json(temporary / "config.json", told)
            write_json(temporary / "generation_config.json", _ends(tokenizer))
            write_tokenizer(temporary, tokenizer, told[_first(family.fields["longest"])])
            write_weights(temporary, family, run, head)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return folder


def family_for(run: Run) -> HFMap:
    """Say as what a model can be written."""
    known: tuple[HFMap, ...] = resolve("model", run.model.name).hf
    fits = [one for one in known if all(getattr(run.model, key) == value for key, value in one.own.items())]
    if not fits:
        able = ", ".join(sorted(set(FAMILIES.values())))
        other = "; n-grams go to a file that ends in .arpa" if run.model.name == "ngram" else ""
        raise CheckpointError(
            f"model.name: {run.model.name!r}, as configured, has no counterpart in the Hugging Face format; {able} have"
            f"{other}"
        )
    if run.task.name not in fits[0].tasks.values():
        able = ", ".join(sorted(set(fits[0].tasks.values())))
        raise CheckpointError(
            f"task.name: {run.task.name!r} has no counterpart among the heads of {fits[0].model_type}; {able} has"
        )
    return fits[0]


def _config(family: HFMap, run: Run, tokenizer: Tokenizer) -> dict[str, Any]:
    """Say what config.json says, and see that it reads back as it was meant."""
    model = run.model.model_dump(mode="json")
    said: dict[str, Any] = {}
    for ours, keys in family.fields.items():
        words = family.words.get(ours)
        value = model[ours] if words is None else next((one for one in words if words[one] == model[ours]), None)
        said |= dict.fromkeys([keys] if isinstance(keys, str) else keys, value)
    name = next(one for one, task in family.tasks.items() if task == run.task.name)
    told = {"architectures": [name], "model_type": family.model_type, **said, **family.must, **family.also}
    told |= {"vocab_size": len(tokenizer), "torch_dtype": "float32", **_ends(tokenizer)}
    back = resolve("model", run.model.name).Config(**_section(Path(), family, told))
    for key, (is_now, would_be) in differences(model, back.model_dump(mode="json")).items():
        raise CheckpointError(
            f"model.{key}: {is_now!r} cannot be said in the format of {family.model_type}, where it is {would_be!r}; "
            "a model with such a part stays weft's own"
        )
    return told


def _ends(tokenizer: Tokenizer) -> dict[str, int]:
    return {"bos_token_id": tokenizer.specials.bos, "eos_token_id": tokenizer.specials.eos}


def _family_of(folder: Path, told: Mapping[str, Any]) -> HFMap:
    kind = told.get("model_type")
    if kind not in FAMILIES:
        raise CheckpointError(
            f"{folder / 'config.json'}: model_type is {kind!r}, which weft does not read; "
            f"{did_you_mean(str(kind), FAMILIES)}"
        )
    known: tuple[HFMap, ...] = resolve("model", FAMILIES[kind]).hf
    return next(one for one in known if one.model_type == kind)


def _task_of(folder: Path, family: HFMap, told: Mapping[str, Any]) -> str:
    named = told.get("architectures") or list(family.tasks)[:1]
    if not isinstance(named, list) or named[0] not in family.tasks:
        raise CheckpointError(
            f"{folder / 'config.json'}: architectures is {named!r}, which weft does not read; of {family.model_type} "
            f"it reads {', '.join(family.tasks)}"
        )
    return family.tasks[named[0]]


def _vocab(folder: Path, told: Mapping[str, Any]) -> int:
    vocab = told.get("vocab_size")
    if not isinstance(vocab, int) or vocab < 1:
        raise CheckpointError(f"{folder / 'config.json'}: vocab_size must be a number of tokens, but is {vocab!r}")
    return vocab


def _section(folder: Path, family: HFMap, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's section of a recipe."""
    for key, value in family.must.items():
        if told.get(key, value) != value:
            raise CheckpointError(
                f"{folder / 'config.json'}: {key} is {told[key]!r}, but weft's {family.model_type} has {value!r} alone"
            )
    section: dict[str, Any] = {"name": FAMILIES[family.model_type], **family.own}
    for ours, keys in family.fields.items():
        key = _first(keys)
        value = told.get(key) if told.get(key) is not None else family.defaults.get(key)
        words = family.words.get(ours)
        if words is not None and value not in words:
            raise CheckpointError(
                f"{folder / 'config.json'}: {key} is {value!r}, which weft does not have; "
                f"{did_you_mean(str(value), words)}"
            )
        section |= {} if value is None else {ours: value if words is None else words[value]}
    return section


def _first(keys: str | tuple[str, ...]) -> str:
    return keys if isinstance(keys, str) else keys[0]
