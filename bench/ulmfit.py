"""ULMFiT as in its paper: error against the number of labelled sentences, with each of its parts and without.

    python bench/ulmfit.py models DATA OUT                      # the general language model, then that of the sentences
    python bench/ulmfit.py run DATA OUT [--sizes 100 1000] [--only NAME ...] [--seeds 1]
    python bench/ulmfit.py table OUT [--chart error.png]

DATA has wikitext2/train.txt and valid.txt, and sst2/train.tsv and dev.tsv: text and label. All on the CPU; `models`
takes --minutes of one core for WikiText-2 and --epochs on the sentences, which it reads without their labels. A
classifier is trained for as many epochs as `EPOCHS` gives its number of sentences. What counts is the accuracy on
dev.tsv after the last step: dev chooses nothing. OUT keeps the runs; results.jsonl has a line for each classifier.
Needs matplotlib: `pip install 'weft[plot]'`.
"""

import argparse
import json
import shutil
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

import weft

EPOCHS = {100: 30, 500: 15, 1000: 10, 6920: 3}
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
ULMFIT: dict[str, Any] = {
    "task.pooling": "concat",
    "train.layer_decay": 1 / 2.6,
    "train.schedule": "slanted-triangular",
    "train.warmup": 0.1,
    "train.unfreeze": "epoch",
}
PLAIN: dict[str, Any] = {"train.schedule": "constant"}


def without(*keys: str) -> dict[str, Any]:
    """Return ULMFiT's settings without some of them."""
    return {key: value for key, value in ULMFIT.items() if key not in keys}


# The start of the layers, and how they are trained.
ROWS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "from scratch": (None, PLAIN),
    "general LM, fine-tuned plainly": ("general", PLAIN),
    "adapted LM, fine-tuned plainly": ("adapted", PLAIN),
    "general LM, ULMFiT": ("general", ULMFIT),
    "ULMFiT": ("adapted", ULMFIT),
    "without discriminative rates": ("adapted", without("train.layer_decay")),
    "without the slanted triangle": ("adapted", without("train.schedule", "train.warmup")),
    "without unfreezing": ("adapted", without("train.unfreeze")),
    "without concat pooling": ("adapted", without("task.pooling")),
}


def train_models(data: Path, out: Path, minutes: float, epochs: float) -> None:
    """Train the general language model, and adapt it to the sentences."""
    general = {
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
    if not (out / "general").exists():
        weft.train(general, out=out / "general")
    for split in ("train", "dev"):
        rows = (data / f"sst2/{split}.tsv").read_text(encoding="utf-8").splitlines()
        (out / f"{split}.txt").write_text("".join(row.partition("\t")[0] + "\n" for row in rows), encoding="utf-8")
    adapted = {
        "task": {"name": "lm"},
        "data": {
            "train": str(out / "train.txt"),
            "valid": str(out / "dev.txt"),
            "max_length": 128,
            "truncation": "cut",
        },
        "model": {"weights": str(out / "general")},
        "train": {
            "epochs": epochs,
            "batch_tokens": 1024,
            "lr": 4e-3,
            "betas": [0.7, 0.99],
            "layer_decay": 1 / 2.6,
            "schedule": "slanted-triangular",
            "warmup": 0.1,
            "clip": 0.25,
        },
    }
    weft.train(adapted, out=out / "adapted")


def classify(data: Path, out: Path, size: int, name: str, seed: int) -> float:
    """Train a classifier on so many sentences; return its accuracy on dev.tsv after the last step."""
    start, settings = ROWS[name]
    rows = (data / "sst2/train.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    chosen = np.random.default_rng(seed).permutation(len(rows))[:size]
    subset = out / f"train-{size}-{seed}.tsv"
    subset.write_text("".join(rows[index] for index in chosen), encoding="utf-8")
    recipe = {
        "task": {"name": "classify", "dropout": 0.2},
        "data": {
            "train": str(subset),
            "valid": str(data / "sst2/dev.tsv"),
            "columns": {"text": 0, "label": 1},
            "max_length": 128,
            "truncation": "cut",
        },
        "model": {"weights": str(out / start)} if start else AWD,
        "train": {
            "epochs": EPOCHS.get(size, 5),
            "batch_size": 32,
            "lr": 4e-3 if start is None or "train.layer_decay" in settings else 1e-3,
            "betas": [0.7, 0.99],
            "seed": seed,
            "eval_every": 1_000_000,
        },
    }
    if start is None:
        recipe["tokenizer"] = {"name": "bpe", "size": min(6000, 1000 + 10 * size), "lowercase": True}
    folder = out / "classifier"
    shutil.rmtree(folder, ignore_errors=True)
    weft.train(recipe, settings, folder)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return float(last["valid"]["accuracy"])


def run(data: Path, out: Path, sizes: list[int], names: list[str], seeds: list[int]) -> None:
    """Train the classifiers that have no result yet."""
    results = out / "results.jsonl"
    done = {(row["name"], row["size"], row["seed"]) for row in read(out)}
    for seed in seeds:
        for size in sizes:
            for name in names:
                if (name, size, seed) in done:
                    continue
                accuracy = classify(data, out, size, name, seed)
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
        if name == "models":
            command.add_argument("--minutes", type=float, default=8)
            command.add_argument("--epochs", type=float, default=4)
        else:
            command.add_argument("--sizes", type=int, nargs="+", default=[*EPOCHS])
            command.add_argument("--only", nargs="+", default=[*ROWS], choices=[*ROWS])
            command.add_argument("--seeds", type=int, nargs="+", default=[1])
    command = commands.add_parser("table")
    command.add_argument("out", type=Path)
    command.add_argument("--chart", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.command == "models":
        train_models(options.data, options.out, options.minutes, options.epochs)
    elif options.command == "run":
        run(options.data, options.out, options.sizes, options.only, options.seeds)
    else:
        table(options.out, options.chart)


if __name__ == "__main__":
    main()
