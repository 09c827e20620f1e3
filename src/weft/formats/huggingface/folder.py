"""Models in the Hugging Face format, in both directions: a directory of config.json, model.safetensors, tokenizer.json.

A model's `HFMap` says how its configuration and weights are named there; what is here knows no model. What a family has
and ours has not is refused, never left out.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.checkpoint.atomic_io import explained, temporary_in
from weft.checkpoint.contents import run_with_overrides, differences, fill
from weft.checkpoint.manifest import MANIFEST
from weft.config.schema import Named, Run, read_section
from weft.errors import CheckpointError, ConfigError, did_you_mean
from weft.formats.huggingface.families import FAMILIES, MODEL_NAMES
from weft.formats.huggingface.heads import head_for, head_of, read_task, write_task
from weft.formats.huggingface.mapping import HFMap
from weft.formats.huggingface.marian import read_marian, read_translation, write_marian, write_translation
from weft.formats.huggingface.tokenizer import read_json, read_tokenizer, write_json, write_tokenizer
from weft.formats.huggingface.weights import Held, held_weights, read_weights, write_weights
from weft.registry import resolve
from weft.tasks.base import Head, Task
from weft.tasks.factory import build
from weft.tokenization.trainable import Tokenizer


def is_hf(folder: Path) -> bool:
    """Say whether this is a Hugging Face directory."""
    return (folder / "config.json").is_file() and not any((folder / own).exists() for own in (MANIFEST, "run.yaml"))


def load_hf(folder: Path, overrides: Iterable[str] = ()) -> tuple[Run, Task, Head]:
    """Read a Hugging Face directory; nothing is written."""
    run, tokenizer, family, held = _described(folder, overrides)
    with _told_by(folder):
        task, head = build(run, tokenizer)
    fill(head, read_weights(folder, family, run, head, held), folder)
    return run, task, head


def describe_hf(folder: Path) -> tuple[Run, Tokenizer]:
    """Say what a Hugging Face directory holds, with its tokenizer; of its weights only the names are read."""
    run, tokenizer, _, _ = _described(folder)
    return run, tokenizer


def _described(folder: Path, overrides: Iterable[str] = ()) -> tuple[Run, Tokenizer, HFMap, Held]:
    told = read_json(folder / "config.json")
    family = _family_of(folder, told)
    held = held_weights(folder, family)
    tokenizer = (read_marian if _translates(family) else read_tokenizer)(folder, family, _vocab(folder, told))
    section, kind = _section(folder, family, told), head_of(folder, family, told, held)
    room = _room(family, _checked(folder, section), kind, tokenizer)
    more = read_translation(folder, told, tokenizer) if _translates(family) else _questions(kind, room)
    raw = {
        "task": {**read_task(folder, family, kind, told, held), **more},
        "data": {"train": [], "longest": room, "too_long": "window" if kind == "span" else "error"},  # no more is told
        "tokenizer": tokenizer.config.model_dump(mode="json", exclude_none=True),
        "model": section,
        "train": {"steps": 1},
    }
    with _told_by(folder):
        return run_with_overrides(raw, folder, overrides=overrides), tokenizer, family, held


@contextmanager
def _told_by(folder: Path) -> Iterator[None]:
    """Say of what is wrong with a recipe that config.json told it so."""
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None


def _checked(folder: Path, section: Mapping[str, Any]) -> Named:
    """See that the model's section is one."""
    with _told_by(folder):
        found: Named = read_section(resolve("model", section["name"]).Config, section, "model")
        return found


def _room(family: HFMap, model: Named, kind: str, tokenizer: Tokenizer) -> int:
    """Say how many tokens of text there is room for; what frames a text or a pair takes some."""
    positions: int = getattr(model, "longest", 1024) - getattr(model, "offset", 0)
    signs = {"mlm": 0, "embed": 2, "tag": 2}.get(kind, 2 + len(tokenizer.between))  # mlm counts them
    return max(positions - signs, 1) if family.framed else positions - _translates(family)


def _translates(family: HFMap) -> bool:
    """Whether it is a Marian, which has a tokenizer for each side, and says how it decodes."""
    return family.vocabulary == "marian"


def _questions(kind: str, room: int) -> dict[str, int]:
    """Leave a passage half of the room that there is in a small model."""
    return {"longest_question": max(room // 2, 1)} if kind == "span" and room < 128 else {}


def save_hf(folder: Path, run: Run, tokenizer: Tokenizer, head: Head) -> Path:
    """Write a model as a Hugging Face directory, which `transformers` loads by AutoModel and AutoTokenizer."""
    family = family_for(run)
    told, generation = _config(family, run, tokenizer), _ends(tokenizer)
    if _translates(family):
        more, generation = write_translation(run, tokenizer)
        told |= more
    with explained(folder, "cannot be written", "choose a new folder in a place that can be written"):
        if folder.exists():
            raise CheckpointError(f"{folder}: exists already; choose a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_in(folder.parent)
        try:
            temporary.mkdir()
            write_json(temporary / "config.json", told)
            if not family.framed:  # it generates
                write_json(temporary / "generation_config.json", generation)
            reads = told[_first(family.fields["longest"])] - getattr(run.model, "offset", 0)
            (write_marian if _translates(family) else write_tokenizer)(temporary, tokenizer, family, reads)
            write_weights(temporary, family, run, head)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return folder


def family_for(run: Run) -> HFMap:
    """Say as what a model can be written."""
    known = FAMILIES.get(run.model.name, ())
    fits = [one for one in known if _fits(one, run)]
    if not fits:
        able = ", ".join(sorted(FAMILIES))
        other = "; n-grams go to a file that ends in .arpa" if run.model.name == "ngram" else ""
        raise CheckpointError(
            f"model.name: {run.model.name!r}, as configured, has no counterpart in the Hugging Face format; {able} have"
            f"{other}"
        )
    if head_for(run) not in fits[0].tasks.values():
        able = ", ".join(sorted(set(fits[0].tasks.values())))
        what = "task.next_sentence: what it learns" if head_for(run) == "mlm.next" else f"task.name: {run.task.name!r}"
        raise CheckpointError(f"{what} has no counterpart among the heads of {fits[0].model_type}; {able} has")
    return fits[0]


def class_for(run: Run) -> str:
    """Name the class of transformers that a model is."""
    return next(name for name, head in family_for(run).tasks.items() if head == head_for(run))


def _fits(family: HFMap, run: Run) -> bool:
    """Whether a model can be of this family."""
    alike = all(getattr(run.model, key) == value for key, value in family.own.items())
    return alike and all(getattr(run.model, key) != value for key, value in family.never.items())


def _config(family: HFMap, run: Run, tokenizer: Tokenizer) -> dict[str, Any]:
    """Say what config.json says, and see that it reads back as it was meant."""
    model = run.model.model_dump(mode="json", exclude={"weights"})  # what it began from is no matter now
    told = {"architectures": [class_for(run)], "model_type": family.model_type, "vocab_size": len(tokenizer)}
    told |= {"torch_dtype": "float32", **_ends(tokenizer), **write_task(family, run)}
    told |= {**_fields(family, model), **family.must, **family.also}
    _check_padding(family, told, tokenizer.specials.pad)
    back = resolve("model", run.model.name).Config(**_section(Path(), family, told))
    for key, (is_now, would_be) in differences(model, back.model_dump(mode="json", exclude={"weights"})).items():
        raise CheckpointError(
            f"model.{key}: {is_now!r} cannot be said in the format of {family.model_type}, where it is {would_be!r}; "
            "a model with such a part stays weft's own"
        )
    return told


def _check_padding(family: HFMap, told: Mapping[str, Any], pad: int | None) -> None:
    """Refuse positions that would be counted in another way there."""
    if told.get("pad_token_id") != pad:
        offset = "" if pad is None else f"; train it with model.offset: {pad + 1}"
        raise CheckpointError(
            f"model.offset: a {family.model_type} counts positions from the number of its padding on, which must be "
            f"{told['pad_token_id']} then, but is {pad} in this tokenizer{offset}"
        )


def _fields(family: HFMap, model: Mapping[str, Any]) -> dict[str, Any]:
    """Say the fields of a model's section by their keys."""
    said: dict[str, Any] = {}
    for ours, keys in family.fields.items():
        words, value = family.words.get(ours), model[ours]
        if words is not None:
            value = next((one for one in words if words[one] == value), None)
        if value is None and ours in family.unless:
            value = model[family.unless[ours]]
        value = value - family.less[ours] if ours in family.less else value
        said |= dict.fromkeys([keys] if isinstance(keys, str) else keys, value)
    return said


def _ends(tokenizer: Tokenizer) -> dict[str, int | None]:
    ids = {"bos": tokenizer.specials.bos, "eos": tokenizer.specials.eos, "pad": tokenizer.specials.pad}
    return {f"{role}_token_id": id for role, id in ids.items() if role != "pad" or id is not None}


def _family_of(folder: Path, told: Mapping[str, Any]) -> HFMap:
    kind = told.get("model_type")
    if kind not in MODEL_NAMES:
        raise CheckpointError(
            f"{folder / 'config.json'}: model_type is {kind!r}, which weft does not read; "
            f"{did_you_mean(str(kind), MODEL_NAMES)}"
        )
    return next(one for one in FAMILIES[MODEL_NAMES[kind]] if one.model_type == kind)


def _vocab(folder: Path, told: Mapping[str, Any]) -> int:
    vocab = told.get("vocab_size")
    if not isinstance(vocab, int) or vocab < 1:
        raise CheckpointError(f"{folder / 'config.json'}: vocab_size must be a number of tokens, but is {vocab!r}")
    return vocab


def _section(folder: Path, family: HFMap, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's section of a recipe."""
    for key, only in family.must.items():
        if (said := told.get(key, family.defaults.get(key, only))) != only:
            raise CheckpointError(
                f"{folder / 'config.json'}: {key} is {said!r}, but weft's {family.model_type} has {only!r} alone"
            )
    section: dict[str, Any] = {"name": MODEL_NAMES[family.model_type], **family.own}
    for ours, keys in family.fields.items():
        key = _first(keys)
        value: Any = told.get(key) if told.get(key) is not None else family.defaults.get(key)
        words = family.words.get(ours)
        if words is not None and value not in words:
            raise CheckpointError(
                f"{folder / 'config.json'}: {key} is {value!r}, which weft does not have; "
                f"{did_you_mean(str(value), words)}"
            )
        if ours in family.less and not isinstance(value, int):
            raise CheckpointError(f"{folder / 'config.json'}: {key} must be a whole number, but is {value!r}")
        value = value + family.less[ours] if ours in family.less else value
        section |= {} if value is None else {ours: value if words is None else words[value]}
    for ours, other in family.unless.items():
        section[ours] = None if section[ours] == section[other] else section[ours]
    return section


def _first(keys: str | tuple[str, ...]) -> str:
    return keys if isinstance(keys, str) else keys[0]
