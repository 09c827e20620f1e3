"""Draw what runs say of themselves while they learn: `python bench/curves.py OUT.png "TITLE=metric:RUN,RUN" ...`.

A panel each; the metric is one of a run's metrics.jsonl (`loss`, or of the validation data `valid.accuracy`), RUN a
run's directory, named in the legend as the directory is or as NAME@RUN says. Several runs joined by + follow each
other: `both@runs/short+runs/long`. Needs matplotlib: `pip install 'weft[plot]'`.
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt


def read(run: str, metric: str) -> tuple[list[int], list[float]]:
    """Return the steps of a run, or of several that follow each other, and the metric at each that has it."""
    steps, values, before = list[int](), list[float](), 0
    for folder in run.split("+"):
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            found = row.get("valid", {}).get(metric.removeprefix("valid.")) if "." in metric else row.get(metric)
            if found is not None:
                steps.append(before + row["step"])
                values.append(found)
        before += rows[-1]["step"]
    return steps, values


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("out", type=Path)
    asked.add_argument("panels", nargs="+")
    given = asked.parse_args()
    _, axes = plt.subplots(1, len(given.panels), figsize=(3.6 * len(given.panels), 3), dpi=100, squeeze=False)
    for axis, panel in zip(axes[0], given.panels, strict=True):
        title, _, rest = panel.partition("=")
        metric, _, runs = rest.partition(":")
        for run in runs.split(","):
            name, _, folder = run.rpartition("@")
            steps, values = read(folder, metric)
            axis.plot(steps, values, label=name or Path(folder).name, marker="." if len(steps) < 30 else None)
        axis.set(title=title, xlabel="steps")
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    plt.tight_layout()
    plt.savefig(given.out)


if __name__ == "__main__":
    main()
