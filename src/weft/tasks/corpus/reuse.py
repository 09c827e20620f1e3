"""What a run needs of a corpus that was prepared before: that it was made the way the run would make it.

Its tokenizer is the run's. A recipe whose tokenizer, task, model or limit of lengths would give other items is refused:
by its settings, and by some examples that the corpus keeps, which are encoded again and must come out as they did.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from weft.config.schema import Data, Named, Section, read_section
from weft.data.corpus.format import Manifest, Probe, Shards, find_corpus, open_shards, read_manifest
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.tasks.base import Task
from weft.tokenization.trainable import Tokenizer, load_tokenizer


def vocabulary(tokenizer: Tokenizer) -> str:
    """Return the digest of a tokenizer, both sides."""
    sides = dict.fromkeys([tokenizer, tokenizer.target])
    return hashlib.sha256("\0".join(side.identity for side in sides).encode()).hexdigest()


def prepared_folder(data: Data, split: str) -> Path | None:
    """Return the folder where a split lies prepared, if it does."""
    return find_corpus(getattr(data, split)) if data.sample is None else None


def prepared_tokenizer(config: Named, data: Data) -> Tokenizer | None:
    """Load the tokenizer of the corpus that the training data is, if it is one."""
    folder = prepared_folder(data, "train")
    if folder is None:
        return None
    found = read_manifest(folder)
    for key, was, now in changes(config, found.tokenizer, f"{folder}: tokenizer"):
        raise ConfigError(
            f"tokenizer.{key}: {folder} was prepared with {was!r}, but it is {now!r} here; set it so, or prepare the "
            "text again, in another folder"
        )
    return load_saved(config, folder, found)


def load_saved(config: Named, folder: Path, found: Manifest) -> Tokenizer:
    """Load the tokenizer in a prepared folder; one that was changed since is refused."""
    tokenizer = load_tokenizer(config, folder)
    if vocabulary(tokenizer) != found.vocabulary:
        raise DataError(
            f"{folder}/tokenizer.json: has changed since the text was prepared with it; put the old one back, or "
            "delete the folder and prepare it again"
        )
    return tokenizer


def changes(now: Section, then: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key of a section that is not as a manifest has it, with what it was and is."""
    after = now.model_dump(mode="json")
    if then.get("name") != after.get("name"):  # the rest is not of one kind
        yield "name", then.get("name"), after.get("name")
        return
    before = read_section(type(now), then, place).model_dump(mode="json")  # with keys that are newer than it
    yield from ((key, before[key], after[key]) for key in after if before[key] != after[key])


def prepared_task(data: Data, task: Task) -> Task:
    """Return the task with what the training data had settled when it was prepared; another task is refused."""
    folder = prepared_folder(data, "train")
    if folder is None:
        return task
    found, place = read_manifest(folder), f"{folder}: task"
    changed = {key for key, _, _ in changes(task.config, found.task, place)}
    if "name" in changed:
        raise ConfigError(
            f"task.name: {folder} was prepared for {found.task.get('name')!r}, but it is {task.config.name!r} here; "
            "prepare the text again, in another folder"
        )
    settled = read_section(type(task.config), found.settled, place)
    open_then = {key for key, _, _ in changes(settled, found.task, place)}
    update = {key: getattr(settled, key) for key in open_then - changed}
    return type(task)(task.config.model_copy(update=update))


def refused(data: Data, split: str) -> Iterator[Any]:
    """Raise where the texts of a prepared split are asked for: they are not kept."""
    raise ConfigError(
        f"data.{split}: {prepared_folder(data, split)} is prepared: it has tokens, but not the texts, which are "
        "needed here; give the text itself"
    )
    yield


def prepared_split(data: Data, split: str, task: Task, tokenizer: Tokenizer) -> tuple[Shards, str] | None:
    """Open the split, if it is a prepared one, with a report of what was skipped or cut when it was made."""
    folder = prepared_folder(data, split)
    if folder is None:
        return None
    shards, found = open_shards(folder, split, task.num_token_arrays), read_manifest(folder)
    if vocabulary(tokenizer) != found.vocabulary:
        raise DataError(f"data.{split}: {folder} was prepared with another tokenizer than the run's; prepare it again")
    _check_documents(folder, found, data)
    _check_limit(folder, found, split, data)
    check_probes(folder, found, data, task, tokenizer)
    return shards, found.splits[split].told


def _check_documents(folder: Path, found: Manifest, data: Data) -> None:
    then = read_section(Data, found.data, f"{folder}: data").documents
    if then != data.documents:
        raise ConfigError(
            f"data.documents: {folder} was prepared with {then!r}, but it is {data.documents!r} here; set it so, or "
            "prepare the text again, in another folder"
        )


def _check_limit(folder: Path, found: Manifest, split: str, data: Data) -> None:
    then, seen = read_section(Data, found.data, f"{folder}: data"), found.splits[split].longest
    if (then.longest, then.too_long) != (data.longest, data.too_long) and seen > min(then.longest, data.longest):
        raise ConfigError(
            f"data.longest: {folder} was prepared with longest={then.longest}, too_long={then.too_long}, and has "
            f"sequences of up to {seen:,} tokens, but here it is longest={data.longest}, too_long={data.too_long}; set "
            "both so, or prepare the text again"
        )


def check_probes(folder: Path, found: Manifest, data: Data, task: Task, tokenizer: Tokenizer) -> None:
    """Refuse a recipe that makes other items of the same text."""
    for probe in found.probes:
        if probed(probe.example, data, task, tokenizer) != probe:
            raise ConfigError(
                f"task: {folder} was prepared in another way: of one and the same example this recipe makes other "
                "items; prepare the text with this task, its settings and its model, in another folder"
            )


def probed(example: str, data: Data, task: Task, tokenizer: Tokenizer) -> Probe:
    """Say what a task makes of an example, given as JSON; nothing, if it refuses it."""
    try:
        items = task.encode(
            task.Example.model_validate_json(example), tokenizer, TruncationPolicy(data.longest, data.too_long)
        )
    except (DataError, ValidationError):
        items = []
    return Probe(example=example, items=[[part.tolist() for part in item] for item in items])
