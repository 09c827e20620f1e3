"""Seconds that a training stands still for a checkpoint: written while it waits, or in a thread after a copy.

    python bench/checkpoint.py
    python bench/checkpoint.py --width 1024 --layers 12 --saves 10

A GPT with Adam's state is saved again and again, with an update between two saves. `copy` is the time until training
may go on; `copy and write` is that until the checkpoint is on the disk, flushed and hashed, which is how long a
training stands still that writes by itself.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import weft
from tiny_runs import GPT, LM, recipe, write_data
from weft.training.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--saves", type=int, default=5)
    chosen = parser.parse_args()
    times: dict[str, list[float]] = {"copy": [], "copy and write": [], "update": [], "update beside a write": []}

    def measured(trainer: Trainer) -> None:
        trainer.trained.train()
        batches = trainer.loader.stream()
        trainer.update(batches)
        for _ in range(chosen.saves):
            for waits in (False, True):
                trainer.update(batches)
                began = time.perf_counter()
                trainer.save()
                times["copy"].append(time.perf_counter() - began)
                if waits:
                    trainer.saver.join()
                    times["copy and write"].append(time.perf_counter() - began)
                updating = time.perf_counter()
                trainer.update(batches)
                times["update" if waits else "update beside a write"].append(time.perf_counter() - updating)
                trainer.saver.join()

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_data(place)
        model = {**GPT, "width": chosen.width, "heads": 8, "layers": chosen.layers}
        made = recipe(LM, model, steps=1)
        made["data"] = {**made["data"], "train": str(place / "text.txt"), "valid": None}
        original, Trainer.fit = Trainer.fit, lambda self: measured(self) or original(self)
        pipeline = weft.train(made, out=place / "run")
        size = sum(file.stat().st_size for file in (place / "run" / "last").resolve().rglob("*") if file.is_file())
    parameters = sum(parameter.numel() for parameter in pipeline.head.parameters())
    print(f"{parameters:,} parameters, {size / 1e6:,.0f} MB a checkpoint, {torch.get_num_threads()} threads")
    for name, seconds in times.items():
        print(f"{name:22} {statistics.median(seconds):7.3f} s  ({min(seconds):.3f} to {max(seconds):.3f})")


if __name__ == "__main__":
    main()
