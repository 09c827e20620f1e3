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
from fuzz_mutations import FLOATS, INTS, STRINGS, Content, mutate_file
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
    data = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
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
    words = rng.choice(
        [
            *[["train", "recipe.yaml", "--out", "out", "--quiet"]] * 5,
            ["train", "recipe.yaml", "--plan"],
            ["data", "check", "recipe.yaml"],
            ["data", "show", "recipe.yaml"],
            ["data", "prepare", "recipe.yaml", "--out", "corpus", "--workers", "1"],
            ["tokenizer", "train", "recipe.yaml", "--out", "tokenizer"],
            ["compare", "recipe.yaml", "--budget", "1", "--out", "compared", "--quiet"],
        ]
    )
    return Input({**seeds.data, "recipe.yaml": text}, words, targets=["recipe.yaml"], sizes=False)


def data_input(seeds: Seeds, rng: Random) -> Input:
    """Return a data file and a command that reads it."""
    name = rng.choice(list(seeds.runs))
    recipe = RECIPES[name]
    file, model = recipe["data"]["train"], str(seeds.folder / key(name))
    text = json.dumps({**recipe, "data": {**recipe["data"], "valid": None}, "train": {"steps": 1, "lr": 0.01}}).encode()
    words = rng.choice(
        [
            *[["train", "recipe.yaml", "--out", "out", "--quiet"]] * 3,
            ["train", "recipe.yaml", "data.on_bad_rows=skip", "--out", "out", "--quiet"],
            *[["evaluate", model, file, "--json", "--quiet"]] * 2,
            ["predict", model, "--file", file, "--json", "--quiet"],
            ["predict", model, "--file", file, "--out", "answers.csv", "--quiet"],
            ["predict", model, "--json"],
            ["embed", model, "--file", file, "--out", "vectors.npy", "--quiet"],
            ["data", "check", file],
            ["init", file, "--out", "made.yaml"],
            ["data", "prepare", "recipe.yaml", "--out", "corpus", "--workers", "1"],
        ]
    )
    return Input({**seeds.data, "recipe.yaml": text}, words, seeds_stdin(seeds, file), [file], sizes=False)


def seeds_stdin(seeds: Seeds, file: str) -> bytes:
    """Return the first lines of a data file, as what is piped in."""
    data = seeds.data[file]
    return b"\n".join(data.splitlines()[:5]) + b"\n" if isinstance(data, bytes) else b""


def checkpoint_input(seeds: Seeds, rng: Random) -> Input:
    """Return a run's directory and a command that reads it."""
    name = rng.choice(list(seeds.runs))
    files = {**seeds.data, **seeds.runs[name]}
    resumed = ["train", "run/run.yaml", "train.steps=3", "--out", "run", "--resume", "--quiet"]
    words = rng.choice([*reading_commands("run", RECIPES[name]), *[resumed] * 4])
    targets = [path for path in files if path.startswith(f"{LAST}/") and not path.endswith("manifest.json")]
    if rng.random() < 0.1:
        targets.append(f"{LAST}/manifest.json")
    return Input(files, words, targets=targets, signed=LAST)


def reading_commands(model: str, recipe: Mapping[str, Any]) -> list[list[str]]:
    """Return commands that read a model."""
    file = recipe["data"]["train"]
    return [
        *[["predict", model, "--file", file, "--json", "--quiet"]] * 4,
        ["predict", model, "the weft holds", "--json"],
        *[["evaluate", model, file, "--json", "--quiet"]] * 2,
        *[["embed", model, "the weft", "--out", "vectors.npy"]] * 2,
        ["convert", model, "converted"],
        ["tokenizer", "show", model, "the weft holds 東京"],
        ["look", "attention", model, "the weft holds", "--out", "page.html"],
        ["average", model, model, "--out", "mean"],
        ["vectors", "neighbours", model, "weft"],
    ]


def folder_input(seeds: Seeds, rng: Random) -> Input:
    """Return a Hugging Face folder and a command that reads it."""
    name = rng.choice(list(seeds.folders))
    recipe = RECIPES[name.partition(",")[0]]
    started = {"name": recipe["model"]["name"], "weights": "hf"}
    fresh = {part: recipe[part] for part in ("task", "data")} | {"model": started, "train": {"steps": 1, "lr": 0.01}}
    words = rng.choice([*reading_commands("hf", recipe), ["train", "recipe.yaml", "--out", "out", "--quiet"]])
    files = {**seeds.data, **seeds.folders[name], "recipe.yaml": json.dumps(fresh).encode()}
    return Input(files, words, targets=[path for path in files if path.startswith("hf/")])


def options_input(seeds: Seeds, rng: Random) -> Input:
    """Return a command line to change."""
    name = rng.choice(list(seeds.runs))
    model, recipe = str(seeds.folder / key(name)), RECIPES[name]
    file = recipe["data"]["train"]
    written = json.dumps({**recipe, "data": {**recipe["data"], "valid": None}, "train": {"steps": 1, "lr": 0.01}})
    words = rng.choice(
        [
            [
                "train",
                "recipe.yaml",
                "train.lr=0.01",
                "model.width=16",
                "data.max_length=60",
                "--out",
                "out",
                "--quiet",
            ],
            ["train", "recipe.yaml", "train.accumulate=2", "train.seed=3", "data.workers=0", "--out", "out", "--quiet"],
            [
                "evaluate",
                model,
                file,
                "--set",
                "data.max_length=60",
                "--json",
                "--device",
                "cpu",
                "--precision",
                "fp32",
            ],
            ["evaluate", model, file, "--errors", "errors.jsonl", "--report", "--columns", "text=0"],
            ["predict", model, "the weft", "--set", "beam=2", "--set", "max_length=9", "--json"],
            [
                "predict",
                model,
                "the weft",
                "--set",
                "sample=true",
                "--set",
                "temperature=0.7",
                "--set",
                "top_k=3",
                "--json",
            ],
            ["predict", model, "the weft", "--set", "top_p=0.7", "--set", "seed=3", "--truncation", "cut", "--json"],
            ["predict", model, "--file", file, "--columns", "text=0", "--out", "answers.csv", "--quiet", "--strict"],
            ["predict", model, "--stream", "the weft"],
            [
                "embed",
                model,
                "the weft",
                "--pool",
                "mean",
                "--layers",
                "-1",
                "--combine",
                "sum",
                "--out",
                "vectors.npy",
            ],
            ["embed", model, "--file", file, "--columns", "text=0", "--normalize", "--truncate", "--precision", "bf16"],
            ["layers", model, "labels.tsv", "--layers", "all", "--pool", "mean", "--json"],
            ["look", "attention", model, "the weft", "--layers", "0", "--heads", "0", "--out", "page.html"],
            ["look", "gradients", model, "the weft", "--out", "page.html"],
            ["look", "neighbours", model, "the weft", "text.txt", "--word", "weft", "--top", "3", "--out", "page.html"],
            ["look", "positions", model, "--out", "page.html"],
            ["compare", "recipe.yaml", "--budget", "1", "--set", "train.lr=0.01", "--out", "compared", "--quiet"],
            ["models", "bert", "--json"],
            ["models", "dates", "--copy"],
            ["convert", model, "converted"],
            ["average", model, "--out", "mean", "--last", "2"],
            ["data", "show", "recipe.yaml", "--split", "train", "--rows", "3"],
            ["data", "check", file, "data.delimiter=;", "--json"],
            ["data", "prepare", "recipe.yaml", "--out", "corpus", "--workers", "1", "--split", "train"],
            ["init", file, "--task", "classify", "--out", "made.yaml"],
            ["tokenizer", "train", "recipe.yaml", "tokenizer.size=300", "--out", "tokenizer"],
            ["tokenizer", "show", model, "the weft", "--json"],
            ["vectors", "neighbours", model, "weft", "--count", "3", "--json"],
            ["vectors", "analogies", model, "weft", "warp", "loom", "--count", "2"],
            ["vectors", "similarity", model, "weft", "warp", "--most", "100"],
            ["vectors", "export", model, "vectors.txt", "--format", "text"],
        ]
    )
    return Input({**seeds.data, "recipe.yaml": written.encode()}, words)


BASES = {
    "recipe": recipe_input,
    "data": data_input,
    "checkpoint": checkpoint_input,
    "huggingface": folder_input,
    "options": options_input,
}

KEYS = ["beam", "sample", "temperature", "top_k", "top_p", "max_length", "length_penalty", "seed", "num", "train.steps"]
KEYS += ["train.lr", "model.layers", "data.format", "data.columns", "task.decode.beam", "tokenizer.size", "a..b", ""]
WORDS = [
    "--json",
    "--quiet",
    "--trust",
    "--resume",
    "--plan",
    "--help",
    "--",
    "-",
    "-1",
    "1e9",
    "--out",
    "",
    ".",
    "..",
    "nowhere",
]
WORDS += [
    "/dev/zero",
    "/dev/null",
    "x" * 300,
    "recipe.yaml",
    "text.txt",
    "out.parquet",
    "--set",
    "--layers",
    "--no-such",
]


def mutate_words(words: list[str], rng: Random) -> list[str]:
    """Change one word of a command."""
    words = list(words)
    at = rng.randrange(len(words))
    action = rng.randrange(8)
    if action == 0:
        del words[at]
    elif action == 1:
        words.insert(at + 1, rng.choice(WORDS))
    elif action == 2:
        words[at] = rng.choice(WORDS)
    elif action == 3:
        words.insert(at, words[rng.randrange(len(words))])
    else:
        given = [index for index, word in enumerate(words) if "=" in word]
        odd = str(
            rng.choice(
                [*STRINGS, *map(str, INTS), *map(str, FLOATS), "9" * 6000, "[" * 3000, "{a: 1}", "[1, a]", "true"]
            )
        )
        odd = odd.replace("\0", "\\0")
        if given and rng.random() < 0.7:
            index = rng.choice(given)
            name = words[index].partition("=")[0] if rng.random() < 0.7 else rng.choice(KEYS)
            words[index] = f"{name}={odd}"
        else:
            words[at] = odd
    return safe(words)


def safe(words: list[str]) -> list[str]:
    """Keep what is written in the input's own folder: no path of a command leads out of it."""
    outside = ("..", "../../etc")
    places = {"--out": 1, "-o": 1, "--errors": 1}
    for index in range(1, len(words)):
        if words[index - 1] in places and (words[index] in outside or words[index].startswith("/")):
            words[index] = "out"
    if words[:1] == ["convert"] or words[:2] == ["vectors", "export"]:
        words[-1] = "out" if words[-1] in outside or words[-1].startswith("/dev") else words[-1]
    return [word.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape") for word in words]
