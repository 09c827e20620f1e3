"""Commands that read recipes, data and models, and changes to their words."""

import shlex
from random import Random

from fuzz_mutations import FLOATS, INTS, STRINGS

TRAIN = "train recipe.yaml --out out --quiet"
RESUME = "train run/run.yaml train.steps=3 --out run --resume --quiet"
PREPARE = "data prepare recipe.yaml --out corpus --workers 1"
RECIPE_COMMANDS = [
    *[TRAIN] * 5,
    "train recipe.yaml --plan",
    "data check recipe.yaml",
    "data show recipe.yaml",
    PREPARE,
    "tokenizer train recipe.yaml --out tokenizer",
    "compare recipe.yaml --budget 1 --out compared --quiet",
]
DATA_COMMANDS = [
    *[TRAIN] * 3,
    "train recipe.yaml data.on_bad_rows=skip --out out --quiet",
    *["evaluate {model} {file} --json --quiet"] * 2,
    "predict {model} --file {file} --json --quiet",
    "predict {model} --file {file} --out answers.csv --quiet",
    "predict {model} --json",
    "embed {model} --file {file} --out vectors.npy --quiet",
    "data check {file}",
    "init {file} --out made.yaml",
    PREPARE,
]
MODEL_COMMANDS = [
    *["predict {model} --file {file} --json --quiet"] * 4,
    "predict {model} 'the weft holds' --json",
    *["evaluate {model} {file} --json --quiet"] * 2,
    *["embed {model} 'the weft' --out vectors.npy"] * 2,
    "convert {model} converted",
    "tokenizer show {model} 'the weft holds 東京'",
    "look attention {model} 'the weft holds' --out page.html",
    "average {model} {model} --out mean",
    "vectors neighbours {model} weft",
]
OPTION_COMMANDS = [
    "train recipe.yaml train.lr=0.01 model.width=16 data.max_length=60 --out out --quiet",
    "train recipe.yaml train.accumulate=2 train.seed=3 data.workers=0 --out out --quiet",
    "evaluate {model} {file} --set data.max_length=60 --json --device cpu --precision fp32",
    "evaluate {model} {file} --errors errors.jsonl --report --columns text=0",
    "predict {model} 'the weft' --set beam=2 --set max_length=9 --json",
    "predict {model} 'the weft' --set sample=true --set temperature=0.7 --set top_k=3 --json",
    "predict {model} 'the weft' --set top_p=0.7 --set seed=3 --truncation cut --json",
    "predict {model} --file {file} --columns text=0 --out answers.csv --quiet --strict",
    "predict {model} --stream 'the weft'",
    "embed {model} 'the weft' --pool mean --layers -1 --combine sum --out vectors.npy",
    "embed {model} --file {file} --columns text=0 --normalize --truncate --precision bf16",
    "layers {model} labels.tsv --layers all --pool mean --json",
    "look attention {model} 'the weft' --layers 0 --heads 0 --out page.html",
    "look gradients {model} 'the weft' --out page.html",
    "look neighbours {model} 'the weft' text.txt --word weft --top 3 --out page.html",
    "look positions {model} --out page.html",
    "compare recipe.yaml --budget 1 --set train.lr=0.01 --out compared --quiet",
    "models bert --json",
    "models dates --copy",
    "convert {model} converted",
    "average {model} --out mean --last 2",
    "data show recipe.yaml --split train --rows 3",
    "data check {file} 'data.delimiter=;' --json",
    "data prepare recipe.yaml --out corpus --workers 1 --split train",
    "init {file} --task classify --out made.yaml",
    "tokenizer train recipe.yaml tokenizer.size=300 --out tokenizer",
    "tokenizer show {model} 'the weft' --json",
    "vectors neighbours {model} weft --count 3 --json",
    "vectors analogies {model} weft warp loom --count 2",
    "vectors similarity {model} weft warp --most 100",
    "vectors export {model} vectors.txt --format text",
]


def command(template: str, model: str = "", file: str = "") -> list[str]:
    """Return the words of a command that reads a model and a data file."""
    return [word.format(model=model, file=file) for word in shlex.split(template)]


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
    ".",
    "..",
    "nowhere",
    "--set",
    "--layers",
    "--no-such",
]
WORDS += ["", "x" * 300, "/dev/zero", "/dev/null", "recipe.yaml", "text.txt", "out.parquet"]


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
