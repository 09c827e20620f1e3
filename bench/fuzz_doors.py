"""The five doors of weft with valid inputs to change: recipes, data, checkpoints, Hugging Face folders, options.

An input is a folder of files and a command line that is run in it. It follows from a seed, a door and a number alone:
the number chooses a valid input, a command and a few mutations, each of which can be left out.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

import weft
from fuzz_commands import (
    DATA_COMMANDS,
    MODEL_COMMANDS,
    OPTION_COMMANDS,
    RECIPE_COMMANDS,
    RESUME,
    TRAIN,
    command,
    mutate_words,
)
from fuzz_mutations import Content, mutate_file
from tiny_runs import RECIPES, write_data
from weft.conversion.convert import convert

DOORS = ["recipe", "data", "checkpoint", "huggingface", "options"]
Files = dict[str, Content]


@dataclass(frozen=True)
class Input:
    """Files, the command that reads them, and which of the files and words may be changed."""

    files: Files
    words: list[str]
    stdin: bytes = b"the weft holds\n"
    targets: list[str] = field(default_factory=list)
    sizes: bool = True  # numbers may be large: weights beside them show that they are wrong
    signed: str | None = None  # the folder of a checkpoint whose manifest is written anew

    def command(self) -> str:
        """Return the command as a shell takes it."""
        return shlex.join(["weft", *self.words])


@dataclass(frozen=True)
class Seeds:
    """Valid inputs, in memory, and a folder of models that are read and not changed."""

    folder: Path
    data: Files
    runs: dict[str, Files]
    folders: dict[str, Files]


TRAINED = ["word2vec lm", "rnn (lstm) lm", "rnn (lstm) tag", "cnn classify", "seq2seq translate", "elmo lm"]
TRAINED += ["transformer translate", "gpt lm", "bert mlm", "bert classify", "bert span", "bert choice"]
LAST = "run/checkpoints/step-00000002"  # a run that is copied without its links is read by its newest checkpoint
CONVERTED = ["gpt lm", "bert mlm", "bert classify", "bert span"]


def make_seeds(folder: Path, few: bool = False) -> Seeds:
    """Train small models and convert some to Hugging Face folders; with `few`, a third of them."""
    os.chdir(folder)
    torch.set_num_threads(1)
    write_data(folder, rows=20)
    chosen = ["rnn (lstm) lm", "cnn classify", "seq2seq translate", "bert mlm"] if few else TRAINED
    runs, folders = {}, {}
    for name in chosen:
        place = folder / key(name)
        weft.train(RECIPES[name], short(RECIPES[name]) | {"train.save_every": 1}, place)
        last = max((place / "checkpoints").iterdir())
        runs[name] = {f"{LAST}/{path}": data for path, data in read_folder(last).items()}
        runs[name] |= {f"run/{file}": (place / file).read_bytes() for file in ("run.yaml", "metrics.jsonl")}
        if name in CONVERTED:
            convert(place, folder / f"hf-{key(name)}")
            folders[name] = {f"hf/{path}": data for path, data in read_folder(folder / f"hf-{key(name)}").items()}
    if "bert mlm" in folders:
        folders["bert mlm, vocab.txt"] = with_vocabulary(folders["bert mlm"])
    data: Files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return Seeds(folder, data, runs, folders)


def key(name: str) -> str:
    """Return a case's name as the name of a folder."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def short(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes that make a training of two steps."""
    changes = {"train.steps": 2, "data.valid": None}
    return changes if "save_every" not in recipe["train"] else {**changes, "train.eval_every": 2}


def read_folder(folder: Path) -> Files:
    """Read the files of a folder, by their paths in it."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def with_vocabulary(files: Files) -> Files:
    """Return a BERT whose tokenizer is vocab.txt, as the first ones were published."""
    told = json.loads(files["hf/tokenizer.json"])
    words = sorted(told["model"]["vocab"].items(), key=lambda pair: pair[1])
    left = {name: data for name, data in files.items() if name != "hf/tokenizer.json"}
    return {**left, "hf/vocab.txt": "".join(f"{word}\n" for word, _ in words).encode()}


def make_input(seeds: Seeds, door: str, number: int, seed: int, keep: Collection[int] | None = None) -> Input:
    """Return input `number` of a door; `keep` chooses some of its mutations."""
    rng = Random(f"{seed} {door} {number}")
    made = BASES[door](seeds, rng)
    count = rng.choice([1, 1, 1, 2, 2, 3])
    resign = rng.random() < 0.9
    for index in range(count):
        if keep is None or index in keep:
            made = mutate(made, Random(f"{seed} {door} {number} {index}"))
    return sign(made) if made.signed and resign else made


def mutations(door: str, number: int, seed: int, seeds: Seeds) -> int:
    """Return how many mutations an input has."""
    rng = Random(f"{seed} {door} {number}")
    BASES[door](seeds, rng)
    return rng.choice([1, 1, 1, 2, 2, 3])


def mutate(made: Input, rng: Random) -> Input:
    """Change one file, or one word of the command."""
    if not made.targets:
        return replace(made, words=mutate_words(made.words, rng))
    name = rng.choice(made.targets)
    data = made.files.get(name)
    if not isinstance(data, bytes):
        return made  # it was taken away before
    changed = mutate_file(name, data, rng, made.sizes)
    if changed == "fifo" and made.signed is None and not name.startswith("hf/"):
        changed = b""  # data may come from a pipe, which is waited for
    files = {other: content for other, content in made.files.items() if other != name}
    return replace(made, files=files if changed is None else {**files, name: changed})


def sign(made: Input) -> Input:
    """Write the manifest of a checkpoint for its files as they are now, so that what is in them is read."""
    prefix = f"{made.signed}/"
    name = prefix + "manifest.json"
    inside = {path: data for path, data in made.files.items() if path.startswith(prefix) and path != name}
    listed = {
        path.removeprefix(prefix): {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        for path, data in inside.items()
        if isinstance(data, bytes)
    }
    manifest = made.files.get(name)
    try:
        told = json.loads(manifest) if isinstance(manifest, bytes) else None
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        return made
    return replace(made, files={**made.files, name: json.dumps({**told, "files": listed}).encode()})


def recipe_input(seeds: Seeds, rng: Random) -> Input:
    """Return a recipe, with its data, and a command that reads it."""
    recipe = RECIPES[rng.choice(list(RECIPES))]
    train = {**recipe["train"], "steps": 1, **({"eval_every": 1} if "eval_every" in recipe["train"] else {})}
    if rng.random() < 0.5:  # not only the keys that the small recipes have
        train |= {"schedule": "cosine", "warmup": 0.1, "optimizer": "adam", "clip": 1.0, "patience": 2, "average": 2}
        train |= {"accumulate": 2, "precision": "fp32", "seed": 3, "freeze": None, "keep": 1, "weight_decay": 0.1}
    data = {**recipe["data"], "columns": None, "format": None, "workers": 0, "on_bad_rows": "error", "header": None}
    text = json.dumps({**recipe, "train": train, "data": data}).encode()
    words = command(rng.choice(RECIPE_COMMANDS))
    return Input({**seeds.data, "recipe.yaml": text}, words, targets=["recipe.yaml"], sizes=False)


def data_input(seeds: Seeds, rng: Random) -> Input:
    """Return a data file and a command that reads it."""
    name = rng.choice(list(seeds.runs))
    recipe = RECIPES[name]
    file, model = recipe["data"]["train"], str(seeds.folder / key(name))
    text = json.dumps({**recipe, "data": {**recipe["data"], "valid": None}, "train": {"steps": 1, "lr": 0.01}}).encode()
    words = command(rng.choice(DATA_COMMANDS), model, file)
    return Input({**seeds.data, "recipe.yaml": text}, words, seeds_stdin(seeds, file), [file], sizes=False)


def seeds_stdin(seeds: Seeds, file: str) -> bytes:
    """Return the first lines of a data file, as what is piped in."""
    data = seeds.data[file]
    return b"\n".join(data.splitlines()[:5]) + b"\n" if isinstance(data, bytes) else b""


def checkpoint_input(seeds: Seeds, rng: Random) -> Input:
    """Return a run's directory and a command that reads it."""
    name = rng.choice(list(seeds.runs))
    files = {**seeds.data, **seeds.runs[name]}
    words = command(rng.choice([*MODEL_COMMANDS, *[RESUME] * 4]), "run", RECIPES[name]["data"]["train"])
    targets = [path for path in files if path.startswith(f"{LAST}/") and not path.endswith("manifest.json")]
    if rng.random() < 0.1:
        targets.append(f"{LAST}/manifest.json")
    return Input(files, words, targets=targets, signed=LAST)


def folder_input(seeds: Seeds, rng: Random) -> Input:
    """Return a Hugging Face folder and a command that reads it."""
    name = rng.choice(list(seeds.folders))
    recipe = RECIPES[name.partition(",")[0]]
    started = {"name": recipe["model"]["name"], "weights": "hf"}
    fresh = {part: recipe[part] for part in ("task", "data")} | {"model": started, "train": {"steps": 1, "lr": 0.01}}
    words = command(rng.choice([*MODEL_COMMANDS, TRAIN]), "hf", recipe["data"]["train"])
    files = {**seeds.data, **seeds.folders[name], "recipe.yaml": json.dumps(fresh).encode()}
    return Input(files, words, targets=[path for path in files if path.startswith("hf/")])


def options_input(seeds: Seeds, rng: Random) -> Input:
    """Return a command line to change."""
    name = rng.choice(list(seeds.runs))
    model, recipe = str(seeds.folder / key(name)), RECIPES[name]
    file = recipe["data"]["train"]
    written = json.dumps({**recipe, "data": {**recipe["data"], "valid": None}, "train": {"steps": 1, "lr": 0.01}})
    words = command(rng.choice(OPTION_COMMANDS), model, file)
    return Input({**seeds.data, "recipe.yaml": written.encode()}, words)


BASES = {
    "recipe": recipe_input,
    "data": data_input,
    "checkpoint": checkpoint_input,
    "huggingface": folder_input,
    "options": options_input,
}
