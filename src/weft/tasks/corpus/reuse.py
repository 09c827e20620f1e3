"""Reuse of a prepared corpus: check that it was prepared as the run would prepare it.

Its tokenizer becomes the run's. A recipe whose tokenizer, task, model or length limit would give other items is
rejected: by its settings, and by a few probe examples in the corpus, which are encoded again and must give the same
items.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from weft.config.schema import Named, Section, read_section
from weft.config.sections import Data
from weft.data.corpus.format import CorpusManifest, CorpusSplit, EncodedExample, find_corpus, open_split, read_manifest
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.tasks.base import Task
from weft.tokenization.trainable import Tokenizer, load_tokenizer


def vocabulary(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 digest of a tokenizer, source and target side."""
    sides = dict.fromkeys([tokenizer, tokenizer.target])
    return hashlib.sha256("\0".join(side.identity for side in sides).encode()).hexdigest()


def prepared_folder(data: Data, split: str) -> Path | None:
    """Return the folder of a prepared split, None if it is not prepared."""
    folder = find_corpus(getattr(data, split)) if data.sample is None else None
    if folder and split == "train" and data.validation_fraction is not None:
        raise ConfigError(
            f"data.validation_fraction: {folder} is prepared: it has tokens, but no rows that can be held out; "
            "prepare validation data as well, and give it as data.valid"
        )
    return folder


def prepared_tokenizer(config: Named, data: Data) -> Tokenizer | None:
    """Return the tokenizer of the training data, if that is a prepared corpus."""
    folder = prepared_folder(data, "train")
    if folder is None:
        return None
    manifest = read_manifest(folder)
    for key, was, now in changed_keys(config, manifest.tokenizer, f"{folder}: tokenizer"):
        raise ConfigError(
            f"tokenizer.{key}: {folder} was prepared with {was!r}, but it is {now!r} here; set it so, or prepare the "
            "text again, in another folder"
        )
    return load_saved_tokenizer(config, folder, manifest)


def load_saved_tokenizer(config: Named, folder: Path, manifest: CorpusManifest) -> Tokenizer:
    """Return the tokenizer in a prepared folder; raise if it has changed since."""
    tokenizer = load_tokenizer(config, folder)
    if vocabulary(tokenizer) != manifest.vocabulary:
        raise DataError(
            f"{folder}/tokenizer.json: has changed since the text was prepared with it; put the old one back, or "
            "delete the folder and prepare it again"
        )
    return tokenizer


def changed_keys(section: Section, saved: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key of a section that differs from the manifest, with its saved and its current value."""
    current = section.model_dump(mode="json")
    if saved.get("name") != current.get("name"):  # the other keys are not comparable
        yield "name", saved.get("name"), current.get("name")
        return
    previous = read_section(type(section), saved, place).model_dump(mode="json")  # with the defaults of newer keys
    yield from ((key, previous[key], current[key]) for key in current if previous[key] != current[key])


def prepared_task(data: Data, task: Task) -> Task:
    """Return the task with what was resolved from the training data at preparation; raise for another task."""
    folder = prepared_folder(data, "train")
    if folder is None:
        return task
    manifest, place = read_manifest(folder), f"{folder}: task"
    changed = {key for key, _, _ in changed_keys(task.config, manifest.task, place)}
    if "name" in changed:
        raise ConfigError(
            f"task.name: {folder} was prepared for {manifest.task.get('name')!r}, but it is {task.config.name!r} here; "
            "prepare the text again, in another folder"
        )
    resolved_config = read_section(type(task.config), manifest.resolved_task, place)
    resolved = {key for key, _, _ in changed_keys(resolved_config, manifest.task, place)}
    update = {key: getattr(resolved_config, key) for key in resolved - changed}
    return type(task)(task.config.model_copy(update=update))


def refuse_prepared(data: Data, split: str) -> Iterator[Any]:
    """Raise, as an iterator: the texts of a prepared split are not kept."""
    raise ConfigError(
        f"data.{split}: {prepared_folder(data, split)} is prepared: it has tokens, but not the texts, which are "
        "needed here; give the text itself"
    )
    yield


def prepared_split(data: Data, split: str, task: Task, tokenizer: Tokenizer) -> tuple[CorpusSplit, str] | None:
    """Return a prepared split, with the report of what was skipped or cut at preparation; None if not prepared."""
    folder = prepared_folder(data, split)
    if folder is None:
        return None
    items, manifest = open_split(folder, split, task.num_token_arrays), read_manifest(folder)
    if vocabulary(tokenizer) != manifest.vocabulary:
        raise DataError(f"data.{split}: {folder} was prepared with another tokenizer than the run's; prepare it again")
    _check_documents(folder, manifest, data)
    _check_limit(folder, manifest, split, data)
    check_probes(folder, manifest, data, task, tokenizer)
    return items, manifest.splits[split].notice


def _check_documents(folder: Path, manifest: CorpusManifest, data: Data) -> None:
    documents = read_section(Data, manifest.data, f"{folder}: data").documents
    if documents != data.documents:
        raise ConfigError(
            f"data.documents: {folder} was prepared with {documents!r}, but it is {data.documents!r} here; set it so, "
            "or prepare the text again, in another folder"
        )


def _check_limit(folder: Path, manifest: CorpusManifest, split: str, data: Data) -> None:
    saved, longest = read_section(Data, manifest.data, f"{folder}: data"), manifest.splits[split].longest
    if (saved.max_length, saved.truncation) != (data.max_length, data.truncation) and longest > min(
        saved.max_length, data.max_length
    ):
        raise ConfigError(
            f"data.max_length: {folder} was prepared with max_length={saved.max_length}, "
            f"truncation={saved.truncation}, and has sequences of up to {longest:,} tokens, but here it is "
            f"max_length={data.max_length}, truncation={data.truncation}; set both so, or prepare the text again"
        )


def check_probes(folder: Path, manifest: CorpusManifest, data: Data, task: Task, tokenizer: Tokenizer) -> None:
    """Raise if the recipe encodes the probe examples to other items."""
    for probe in manifest.probes:
        if make_probe(probe.example, data, task, tokenizer) != probe:
            raise ConfigError(
                f"task: {folder} was prepared in another way: of one and the same example this recipe makes other "
                "items; prepare the text with this task, its settings and its model, in another folder"
            )


def make_probe(example: str, data: Data, task: Task, tokenizer: Tokenizer) -> EncodedExample:
    """Return the items that a task encodes an example (JSON) to; none if it raises."""
    try:
        items = task.encode(
            task.Example.model_validate_json(example), tokenizer, TruncationPolicy(data.max_length, data.truncation)
        )
    except (DataError, ValidationError):
        items = []
    return EncodedExample(example=example, items=[[part.tolist() for part in item] for item in items])
