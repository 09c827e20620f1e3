"""Fine-tune one model on every task, and print one table: `python bench/finetune.py WEIGHTS --only sst2 mrpc`.

WEIGHTS are a BERT; `scratch` is a BERT-mini with random weights, and words of the task's own data. Run it in the folder
that has the data sets (see the recipes named *-bert). Each run is kept in --out, and one that is there already is only
read: the table can be made again, or with another task added.
"""

import argparse
import json
import time
from pathlib import Path

import weft
from weft.cli.console import print_table
from weft.config.recipes import recipe_names

SCRATCH = ["model={preset: bert-mini}", "tokenizer={name: wordpiece, size: 8000, lowercase: true}"]
SHOWN = ("accuracy", "f1", "matthews", "spearman", "pearson", "exact_match")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("weights", help="a run's directory, a Hugging Face directory, a name, or scratch")
    asked.add_argument("--only", nargs="*", help="tasks, such as sst2; all if not given")
    asked.add_argument("--out", type=Path, default=Path("runs/finetune"))
    asked.add_argument("--set", nargs="*", default=[], help="changes to every recipe, such as train.seeds=3")
    given = asked.parse_args()
    tasks = given.only or [name.removesuffix("-bert") for name in tuned()]
    rows = [row(task, given.weights, given.set, given.out) for task in tasks]
    print_table(["task", *SHOWN, "seconds"], rows, title=f"{given.weights}, on validation data")


def tuned() -> list[str]:
    """List the recipes that start from weights."""
    return [name for name in recipe_names() if name.endswith("-bert") and name != "langid-bert"]


def row(task: str, weights: str, changes: list[str], out: Path) -> list[str]:
    """Train on a task, or read what was found when it was, and lay it out."""
    kept = out / f"{task}.json"
    if not kept.exists():
        begun = time.perf_counter()
        start = SCRATCH if weights == "scratch" else [f"model.weights={weights}"]
        pipeline = weft.train(f"{task}-bert", [*start, *changes], out=out / task)
        found = pipeline.evaluate()  # on data.test where a recipe has it
        kept.write_text(json.dumps({"metrics": found, "seconds": time.perf_counter() - begun}))
    said = json.loads(kept.read_text())
    cells = [said["metrics"].get(name) for name in SHOWN]
    return [task, *("" if cell is None else f"{100 * cell:.1f}" for cell in cells), f"{said['seconds']:.0f}"]


if __name__ == "__main__":
    main()
