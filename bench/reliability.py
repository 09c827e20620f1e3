"""Kill a real training with SIGKILL again and again, resume it, and compare it with an unbroken run, pair by pair.

    python bench/reliability.py --kills 50 --inside-saves 20

A kill inside a save waits until the temporary folder of a checkpoint is there. Each run is a process of its own, forked
from one that has imported torch and compiled the loops, so that a kill costs a second and not five. Exits with 1 if a
pair differs by a bit.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

import weft
from weft.cli import main as cli

RECIPE = {
    "task": {"name": "translate"},
    "data": {"train": "pairs.tsv", "valid": "pairs.tsv"},
    "tokenizer": {"name": "characters"},
    "model": {"name": "seq2seq", "width": 32, "layers": 2, "dropout": 0.2},
    "train": {"steps": 400, "batch_tokens": 200, "report_every": 3, "save_every": 5, "lr": 1e-3, "eval_every": 100},
}


def start(folder: Path, resume: bool) -> int:
    """Fork a process that trains in `folder` by the command line; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    os.chdir(folder.parent)
    log = os.open(folder.parent / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["weft", "train", "recipe.yaml", "--out", str(folder), *(["--resume"] if resume else [])]
    try:
        cli.main()
    except SystemExit as end:
        os._exit(int(end.code or 0))
    finally:
        os._exit(70)


def wait(pid: int, seconds: float, most: int, folder: Path, inside_save: bool) -> bool:
    """Wait for the moment to kill: some time after a first new checkpoint; say whether the process is still there.

    On a machine that has become faster since the unbroken run, `most` steps are the time: else the run would end first.
    """
    before, due = progress(folder), None
    while True:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        if due is None and progress(folder) > before:
            due = time.monotonic() + seconds
        ready = due is not None and (time.monotonic() >= due or progress(folder) >= before + most)
        if ready and (not inside_save or saving(folder)):
            return True
        time.sleep(0.0002 if ready else 0.002)  # a save is soon over


def saving(folder: Path) -> bool:
    try:
        return any(entry.name.startswith(".tmp-") for entry in os.scandir(folder / "checkpoints"))
    except FileNotFoundError:
        return False


def pairs(folder: Path) -> list[tuple[int, str]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], float(row["loss"]).hex()) for row in rows]


def progress(folder: Path) -> int:
    """The step of the last whole checkpoint."""
    link = folder / "last"
    return int(link.readlink().name.split("step-")[1].split(".")[0]) if link.is_symlink() else -1


def run_whole(folder: Path, resume: bool = False) -> float:
    began = time.monotonic()
    _, status = os.waitpid(start(folder, resume), 0)
    if status:
        sys.exit(f"the run failed: {(folder.parent / 'log.txt').read_text()}")
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--inside-saves", type=int, default=20)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    rng = random.Random(chosen.seed)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        words = ["".join(rng.choices("abcdef", k=8)) for _ in range(80)]
        rows = [f"{word}\t{word[::-1]}" for word in words]
        (root / "pairs.tsv").write_text("\n".join(rows) + "\n")
        torch.set_num_threads(1)  # threads of OpenMP do not live through a fork
        weft.train(RECIPE, [f"data={{train: {root}/pairs.tsv}}", "train.steps=2"], root / "compiled")
        RECIPE["train"]["steps"] = chosen.steps
        (root / "recipe.yaml").write_text(json.dumps(RECIPE))
        unbroken, broken = root / "unbroken", root / "broken"
        run_whole(unbroken)
        seconds = json.loads((unbroken / "metrics.jsonl").read_text().splitlines()[-1])["elapsed"]
        kills = [True] * chosen.inside_saves + [False] * (chosen.kills - chosen.inside_saves)
        rng.shuffle(kills)
        done = {True: 0, False: 0}
        steps, share = [], chosen.kills + 4
        for inside in kills:
            pid = start(broken, resume=broken.exists())
            if not wait(pid, rng.uniform(0, seconds / share), chosen.steps // share, broken, inside):
                break
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            done[inside] += 1
            steps.append(progress(broken))
        run_whole(broken, resume=True)
        same = pairs(broken) == pairs(unbroken)
        report = {
            "kills": sum(done.values()),
            "inside_saves": done[True],
            "steps": chosen.steps,
            "last_whole_step_after_each_kill": steps,
            "pairs": len(pairs(unbroken)),
            "identical": same,
        }
        print(json.dumps(report))
        sys.exit(0 if same and sum(done.values()) == chosen.kills else 1)


if __name__ == "__main__":
    main()
