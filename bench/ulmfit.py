"""ULMFiT as in its paper: error against the number of labelled sentences, with each of its parts and without.

    python bench/ulmfit.py models DATA OUT --general writer-en  # adapt a general language model to the sentences
    python bench/ulmfit.py models DATA OUT                      # train an AWD-LSTM on WikiText-2, and adapt that
    python bench/ulmfit.py run DATA OUT [--sizes 100 1000] [--only NAME ...] [--seeds 1]
    python bench/ulmfit.py table OUT [--chart error.png]

DATA has sst2/train.tsv and dev.tsv, text and label; without --general also wikitext2/train.txt and valid.txt. --general
is an AWD-LSTM or a GPT: a model that ships, or a run. All on the CPU; `models` takes --minutes of one core for
WikiText-2, and --epochs on the sentences, which it reads without their labels. A classifier is trained for as many
epochs as its `Settings` give its number of sentences. What counts is the accuracy on dev.tsv after the last step: dev
chooses nothing. OUT keeps the runs; results.jsonl has a line for each classifier. Needs matplotlib: `pip install
'weft[plot]'`.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

import weft
from weft.config.schema import Run
from weft.formats.pretrained import describe_model

SIZES = (100, 500, 1000, 6920)
BATCH = 32  # sentences
AWD = {
    "name": "rnn",
    "cell": "lstm",
    "width": 320,
    "layers": 2,
    "embedding": 200,
    "tie": True,
    "variational": True,
    "dropout_embed": 0.05,
    "dropout": 0.1,
    "dropout_recurrent": 0.1,
}


@dataclass(frozen=True)
class Settings:
    """The rates of a kind of language model, and how long its classifiers learn."""

    adapt: float  # the highest rate on the sentences without labels
    scratch: float  # the constant rate of a classifier from scratch
    plain: float  # that of one rate for all layers
    top: float  # the rate of the top with discriminative rates
    layer_decay: float
    unfreeze: float | None  # the share of the updates after which all layers learn; None: a layer an epoch
    betas: tuple[float, float]
    clip: float
    epochs: Mapping[int, int]  # by the number of sentences
    model: Mapping[str, Any]

    def unfreeze_every(self, size: int, layers: int) -> str | int:
        """Return `train.unfreeze` of a body with so many layers above its embeddings."""
        updates = ceil(size / BATCH) * self.epochs[size]
        return "epoch" if self.unfreeze is None else max(1, round(updates * self.unfreeze / (layers + 1)))


# The paper's for its AWD-LSTM. In a GPT, which is deeper, 1 / 2.6 a layer would leave the lowest group 1 / 5400 of the
# rate, and a layer an epoch would never come to it; there it has 1 / 13, and all layers learn in the second half.
SETTINGS = {
    "rnn": Settings(
        adapt=4e-3,
        scratch=4e-3,
        plain=1e-3,
        top=4e-3,
        layer_decay=1 / 2.6,
        unfreeze=None,
        betas=(0.7, 0.99),
        clip=0.25,
        epochs={100: 30, 500: 15, 1000: 10, 6920: 3},
        model={},
    ),
    "gpt": Settings(
        adapt=4e-4,
        scratch=4e-4,
        plain=2e-4,
        top=6e-4,
        layer_decay=0.75,
        unfreeze=0.5,
        betas=(0.9, 0.99),
        clip=1.0,
        epochs={100: 15, 500: 8, 1000: 6, 6920: 2},
        model={"dropout": 0.1},
    ),
}
LINEAR = "TF-IDF of words and bigrams, logistic regression"
PARTS = ("pooling", "layer_decay", "schedule", "unfreeze")
# The start of the layers, and the parts of ULMFiT with which they are trained.
ROWS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    LINEAR: (None, ()),
    "from scratch": (None, ()),
    "general LM, fine-tuned plainly": ("general", ()),
    "adapted LM, fine-tuned plainly": ("adapted", ()),
    "general LM, ULMFiT": ("general", PARTS),
    "ULMFiT": ("adapted", PARTS),
    "without discriminative rates": ("adapted", ("pooling", "schedule", "unfreeze")),
    "without the slanted triangle": ("adapted", ("pooling", "layer_decay", "unfreeze")),
    "without unfreezing": ("adapted", ("pooling", "layer_decay", "schedule")),
    "without concat pooling": ("adapted", ("layer_decay", "schedule", "unfreeze")),
}


def train_general(data: Path, out: Path, minutes: float) -> None:
    """Train an AWD-LSTM on WikiText-2."""
    recipe = {
        "task": {"name": "lm", "sequences": "bptt", "bptt": 70},
        "data": {
            "train": str(data / "wikitext2/train.txt"),
            "valid": str(data / "wikitext2/valid.txt"),
            "documents": "every-line",
        },
        "tokenizer": {"name": "bpe", "size": 6000, "lowercase": True},
        "model": AWD,
        "train": {
            "time": f"{minutes}m",
            "batch_tokens": 2240,
            "lr": 4e-3,
            "betas": [0.8, 0.99],
            "weight_decay": 0.01,
            "schedule": "cosine",
            "warmup": 0.05,
            "clip": 0.25,
            "eval_every": 1_000_000,
        },
    }
    weft.train(recipe, out=out)


def adapt(data: Path, out: Path, general: str, epochs: float, precision: str) -> None:
    """Have a general language model read the sentences."""
    settings = SETTINGS[describe_model(general)[0].model.name]
    for split in ("train", "dev"):
        rows = (data / f"sst2/{split}.tsv").read_text(encoding="utf-8").splitlines()
        (out / f"{split}.txt").write_text("".join(row.partition("\t")[0] + "\n" for row in rows), encoding="utf-8")
    recipe = {
        "task": {"name": "lm"},
        "data": {
            "train": str(out / "train.txt"),
            "valid": str(out / "dev.txt"),
            "max_length": 128,
            "truncation": "cut",
        },
        "model": {"weights": general, **settings.model},
        "train": {
            "epochs": epochs,
            "batch_tokens": 1024,
            "lr": settings.adapt,
            "betas": settings.betas,
            "layer_decay": settings.layer_decay,
            "schedule": "slanted-triangular",
            "warmup": 0.1,
            "clip": settings.clip,
            "precision": precision,
            "eval_every": "epoch",
        },
    }
    weft.train(recipe, out=out / "adapted")


def classify(data: Path, out: Path, size: int, name: str, seed: int, precision: str) -> float:
    """Train a classifier on so many sentences; return its accuracy on dev.tsv after the last step."""
    rows = (data / "sst2/train.tsv").read_text(encoding="utf-8").splitlines()
    chosen = np.random.default_rng(seed).permutation(len(rows))[:size]
    subset = out / f"train-{size}-{seed}.tsv"
    subset.write_text("".join(f"{rows[index]}\n" for index in chosen), encoding="utf-8")
    if name == LINEAR:
        return linear(subset, data / "sst2/dev.tsv")
    adapted = describe_model(out / "adapted")[0]
    recipe = classifier(adapted, out, size, name)
    files = {"train": str(subset), "valid": str(data / "sst2/dev.tsv"), "columns": {"text": 0, "label": 1}}
    recipe["data"] = {**files, "max_length": 128, "truncation": "cut"}
    recipe["train"] |= {"seed": seed, "precision": precision, "eval_every": 1_000_000}
    folder = out / "classifier"
    shutil.rmtree(folder, ignore_errors=True)
    weft.train(recipe, out=folder)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return float(last["valid"]["accuracy"])


def classifier(adapted: Run, out: Path, size: int, name: str) -> dict[str, Any]:
    """Return the recipe of a row but for its data: where its layers start, and how they are trained."""
    model = adapted.model.model_dump(mode="json", exclude_none=True)
    general, settings = model.pop("weights"), SETTINGS[model["name"]]
    start, parts = ROWS[name]
    train = {"epochs": settings.epochs[size], "batch_size": BATCH, "betas": settings.betas, "lr": settings.plain}
    if start is None:
        train["lr"] = settings.scratch
    if "layer_decay" in parts:
        train |= {"lr": settings.top, "layer_decay": settings.layer_decay}
    if "schedule" in parts:
        train |= {"schedule": "slanted-triangular", "warmup": 0.1}
    if "unfreeze" in parts:
        train["unfreeze"] = settings.unfreeze_every(size, model["layers"])
    task = {"name": "classify", "dropout": 0.2} | ({"pooling": "concat"} if "pooling" in parts else {})
    recipe: dict[str, Any] = {"task": task, "train": train}
    if start is None:
        size = min(6000, 1000 + 10 * size)
        return recipe | {"model": model, "tokenizer": {"name": "bpe", "size": size, "lowercase": True}}
    weights = general if start == "general" else str(out / "adapted")
    return recipe | {"model": {"weights": weights, **settings.model}}


def linear(train: Path, dev: Path) -> float:
    """Return the accuracy of a logistic regression on TF-IDF."""
    (texts, labels), asked = (
        zip(*(row.split("\t") for row in path.read_text(encoding="utf-8").splitlines()), strict=True)
        for path in (train, dev)
    )
    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2)), LogisticRegression(max_iter=1000))
    return float(model.fit(texts, labels).score(*asked))


def run(data: Path, out: Path, sizes: list[int], names: list[str], seeds: list[int], precision: str) -> None:
    """Train the classifiers that have no result yet."""
    results = out / "results.jsonl"
    done = {(row["name"], row["size"], row["seed"]) for row in read(out)}
    for seed in seeds:
        for size in sizes:
            for name in names:
                if (name, size, seed) in done:
                    continue
                accuracy = classify(data, out, size, name, seed, precision)
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"name": name, "size": size, "seed": seed, "accuracy": accuracy}) + "\n")
                print(f"{name}, {size}, seed {seed}: {accuracy:.4f}", flush=True)


def read(out: Path) -> list[dict[str, Any]]:
    """Return the results so far."""
    path = out / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(out: Path, chart: Path | None) -> None:
    """Print the errors in percent, a column for each number of sentences; draw them."""
    rows = read(out)
    sizes = sorted({row["size"] for row in rows})
    print("|", *(f"| {size:,}" for size in sizes), "|")
    print("|---" * (len(sizes) + 1) + "|")
    lines: dict[str, list[tuple[int, float]]] = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        own = {size: [r["accuracy"] for r in rows if (r["name"], r["size"]) == (name, size)] for size in sizes}
        errors = {size: 100 * (1 - mean(values)) for size, values in own.items() if values}
        print(f"| {name} |", *(f"{errors[size]:.1f} |" if size in errors else " |" for size in sizes))
        if len(errors) > 1:
            lines[name] = list(errors.items())
    if chart:
        draw(lines, chart)


def draw(lines: dict[str, list[tuple[int, float]]], chart: Path) -> None:
    """Draw the errors over the number of sentences, a logarithmic axis."""
    figure, axis = plt.subplots(figsize=(6, 3.4), dpi=110)
    for name, points in lines.items():
        axis.plot(*zip(*points, strict=True), marker="o", label=name)
    sizes = sorted({size for points in lines.values() for size, _ in points})
    axis.set(xscale="log", xlabel="labelled sentences of SST-2", ylabel="error, %")
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes], minor=False)
    axis.set_xticks([], minor=True)
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(chart)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("models", "run"):
        command = commands.add_parser(name)
        command.add_argument("data", type=Path)
        command.add_argument("out", type=Path)
        command.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
        if name == "models":
            command.add_argument("--general", help="a language model; without, one is trained on WikiText-2")
            command.add_argument("--minutes", type=float, default=8)
            command.add_argument("--epochs", type=float, default=4)
        else:
            command.add_argument("--sizes", type=int, nargs="+", default=SIZES, choices=SIZES)
            command.add_argument("--only", nargs="+", default=[*ROWS], choices=[*ROWS])
            command.add_argument("--seeds", type=int, nargs="+", default=[1])
    command = commands.add_parser("table")
    command.add_argument("out", type=Path)
    command.add_argument("--chart", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.command == "models":
        own = options.out / "general"
        if options.general is None and not own.exists():
            train_general(options.data, own, options.minutes)
        adapt(options.data, options.out, options.general or str(own), options.epochs, options.precision)
    elif options.command == "run":
        run(options.data, options.out, options.sizes, options.only, options.seeds, options.precision)
    else:
        table(options.out, options.chart)


if __name__ == "__main__":
    main()
