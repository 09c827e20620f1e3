"""Kill real trainings of every family with SIGKILL, resume them, and compare each with an unbroken run, bit by bit.

    python bench/reliability.py                                        every case, five kills each, two inside a save
    python bench/reliability.py --cases "seq2seq translate" --kills 50 --inside-saves 20 --steps 900
    python bench/reliability.py --cases "rnn (lstm) lm" --kills 1000 --inside-saves 300 --steps 2200
    python bench/reliability.py --cases "gpt lm" --ranks 2 --kills 10 --steps 300       one of two processes is killed
    python bench/reliability.py --damage 10000                         flips and truncations of a checkpoint's files
    python bench/reliability.py --list

The kills are spread over the run: the first comes at a random instant before there is a checkpoint, the others at
random instants after randomly drawn steps, or while the run starts again if it is there already; one inside a save
waits until the temporary folder of a checkpoint is there.
A run is a process of its own, forked from one that has imported torch and compiled the loops, so that a kill costs a
second and not five. With `--ranks` it is one command, `weft train --nproc --max-restarts`, of which a process that is
drawn is killed, and which starts all processes again by itself.

Compared are the metrics (all but times), the recipe, the tokenizer, the weights, and the optimizer, random and carried
states of `last` and `best`, byte by byte. Workers must end with the run that started them. A line of JSON is printed
for each case; the exit code is 1 if one differs by a bit, or was not killed at all.
"""

import argparse
import ctypes
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import weft
import weft.training.progress_bar  # the command imports it: it takes as long as the rest of a start
from tiny_runs import BERT, CLASSIFY, GPT, LM, MLM, RECIPES, TRANSFORMER, TRANSLATE, Recipe, recipe, rnn, write_data
from weft.checkpoint.manifest import verify_checkpoint
from weft.cli import main as cli
from weft.errors import CheckpointError

SET_CHILD_SUBREAPER = 36  # of prctl: the orphans of a killed run become children of this process
PATIENCE = 120.0  # seconds for one step forward, on a busy machine
TIMES = {"elapsed", "tokens_per_s", "mfu"}  # what a clock decides
FOLDER = re.compile(r"(?:step|average)-(\d+)")


def _with_workers(made: Recipe) -> Recipe:
    return {**made, "data": {**made["data"], "workers": 2}}


# What a training may have besides a model, each in one family at least.
VARIANTS: dict[str, Recipe] = {
    "seq2seq translate, workers, accumulate": _with_workers(
        recipe(TRANSLATE, {"name": "seq2seq", "width": 16, "dropout": 0.2}, accumulate=3)
    ),
    "rnn (lstm) lm, carried state, workers": _with_workers(recipe(({**LM[0], "bptt": 8}, *LM[1:]), rnn("lstm"))),
    "rnn (gru) lm, asgd": recipe(LM, rnn("gru"), optimizer="asgd", asgd_after=1, eval_every=2, lr=5),
    "transformer translate, average, cosine": recipe(TRANSLATE, TRANSFORMER, average=3, schedule="cosine", warmup=5),
    "bert classify, seeds": recipe((*CLASSIFY[:2], MLM[2]), BERT, seeds=2, steps=20, layer_decay=0.9),
    "rnn (lstm) classify, epochs, adagrad": recipe(
        CLASSIFY, rnn("lstm"), steps=None, epochs=4, eval_every="epoch", optimizer="adagrad"
    ),
    "gpt lm, prepared corpus, workers": _with_workers(recipe(LM, GPT)),
    "bert mlm, prepared corpus, accumulate": recipe(MLM, BERT, accumulate=2),
    "gpt lm, bf16": recipe(LM, GPT, precision="bf16"),
}
CASES = RECIPES | VARIANTS


@dataclass(frozen=True)
class Kill:
    """A kill: at a step, after so much of a time, or inside the next save."""

    step: int  # of the last whole checkpoint; -1: there is none yet
    share: float  # of the start of a run, or of twice the time between two checkpoints
    inside_save: bool


@dataclass(frozen=True)
class Pace:
    """The seconds of an unbroken run until its first checkpoint, and between two of them."""

    start: float
    interval: float


def plan(kills: int, inside_saves: int, steps: int, rng: random.Random) -> list[Kill]:
    """Return the kills in their order, the first of them before there is a checkpoint."""
    if steps == 1:  # a model that is fitted in one pass
        return [Kill(-1, rng.uniform(0, 0.8), number < inside_saves) for number in range(kills)]
    drawn = sorted(rng.randrange(max(1, 19 * steps // 20)) for _ in range(kills - 1))  # before the run ends
    inside = [True] * min(inside_saves, len(drawn)) + [False] * max(0, len(drawn) - inside_saves)
    rng.shuffle(inside)
    later = [Kill(step, rng.random(), save) for step, save in zip(drawn, inside, strict=True)]
    return [Kill(-1, rng.random(), False), *later]


def start(folder: Path, options: Sequence[str] = ()) -> int:
    """Fork a process that trains in `folder` by the command line, as the leader of its group; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    os.chdir(folder.parent)
    log = os.open(folder.parent / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["weft", "train", "recipe.yaml", "--out", str(folder), "--resume", "--quiet", *options]
    code = 70
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def wait(pid: int, kill: Kill, folder: Path, pace: Pace) -> bool:
    """Wait for the moment of a kill; say whether the process is still there."""
    began = time.monotonic()
    due, end = None, began + PATIENCE
    if progress(folder) >= kill.step:
        due = began + kill.share * pace.start
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        if due is None and progress(folder) >= kill.step:
            due = time.monotonic() + kill.share * 2 * pace.interval
        ready = due is not None and time.monotonic() >= due
        if ready and (not kill.inside_save or saving(folder)):
            return True
        time.sleep(0.0002 if ready else 0.002)  # a save is soon over
    sys.exit(f"{folder}: no step {kill.step} in {PATIENCE:.0f} s: {(folder.parent / 'log.txt').read_text()}")


def kill_group(pid: int) -> None:
    """Kill a run, and wait until its workers have ended by themselves."""
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            if os.waitpid(-pid, os.WNOHANG) == (0, 0):
                time.sleep(0.005)
        except ChildProcessError:
            return
    os.killpg(pid, signal.SIGKILL)
    sys.exit(f"processes of the killed run {pid} were still there after {PATIENCE:.0f} s")


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, the first of them first."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_rank(pid: int, ranks: int, rng: random.Random) -> None:
    """Kill one of the processes of a training, and wait until all have been started again."""
    before = wait_for_ranks(pid, ranks)
    os.kill(rng.choice(before), signal.SIGKILL)
    wait_for_ranks(pid, ranks, before)


def wait_for_ranks(pid: int, ranks: int, before: Sequence[int] = ()) -> list[int]:
    """Wait until a training has so many processes, none of them one of those before; return them."""
    end = time.monotonic() + PATIENCE
    while len(now := children(pid)) != ranks or set(now) & set(before):
        if time.monotonic() > end:
            sys.exit(f"{pid}: not {ranks} processes in {PATIENCE:.0f} s, but {now} after {before}")
        time.sleep(0.005)
    return now


def roots(folder: Path) -> list[Path]:
    """Return the directories of the runs: one, or one for each seed."""
    return sorted(folder.glob("seed-*")) or [folder]


def saving(folder: Path) -> bool:
    """Return whether a checkpoint is being written."""
    return any(next((root / "checkpoints").glob(".tmp-*"), None) for root in roots(folder))


def step_of(link: Path) -> int:
    """Return the step of the checkpoint that a link leads to; -1 if there is none."""
    match = FOLDER.match(link.readlink().name) if link.is_symlink() else None
    return int(match[1]) if match else -1


def progress(folder: Path) -> int:
    """Return the step of the last whole checkpoint; of several seeds, the sum over all."""
    steps = [step for root in roots(folder) if (step := step_of(root / "last")) >= 0]
    return sum(steps) if steps else -1


def outcome(folder: Path) -> dict[str, Any]:
    """Return what a training left: by name, the rows of its metrics and each file of its two checkpoints."""
    parts: dict[str, Any] = {}
    for root in roots(folder):
        rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
        parts[f"{root.name}/metrics"] = [{key: row[key] for key in row.keys() - TIMES} for row in rows]
        for link in ("last", "best"):
            checkpoint = (root / link).resolve()
            parts[f"{root.name}/{link}"] = checkpoint.name.partition(".")[0]
            for file in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
                parts[f"{root.name}/{link}/{file.relative_to(checkpoint)}"] = _content(file)
    if (folder / "seeds.json").exists():
        parts["seeds.json"] = (folder / "seeds.json").read_text()
    return {name.replace(f"{folder.name}/", "", 1): part for name, part in parts.items()}


def _content(file: Path) -> Any:
    """Return a file's bytes, without the times in it and the digest of those."""
    if file.name == "progress.json":
        return {key: value for key, value in json.loads(file.read_text()).items() if key not in TIMES}
    if file.name == "manifest.json":
        return sorted(json.loads(file.read_text())["files"])
    return file.read_bytes()


def run_whole(folder: Path, save_every: int = 1, options: Sequence[str] = ()) -> Pace:
    """Train until the end; return the pace."""
    pid, began, first = start(folder, options), time.monotonic(), None
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if first is None and progress(folder) >= 0:
            first = time.monotonic() - began
        time.sleep(0.002)
    check_end(ended[1], folder)
    seconds = time.monotonic() - began
    begin = seconds if first is None else first
    return Pace(begin, (seconds - begin) * save_every / max(progress(folder), 1))


def check_end(status: int, folder: Path) -> None:
    """Exit with what a run has printed unless it has ended well."""
    if status:
        sys.exit(f"{folder}: the run failed: {(folder.parent / 'log.txt').read_text()}")


def kill_runs(folder: Path, planned: Sequence[Kill], pace: Pace) -> list[int]:
    """Start a run and kill it as often as planned, then let it end; return its last step after each kill."""
    done = []
    for kill in planned:
        pid = start(folder)
        if not wait(pid, kill, folder, pace):
            break  # it has ended
        kill_group(pid)
        done.append(progress(folder))
    run_whole(folder)
    return done


def kill_ranks(
    folder: Path, planned: Sequence[Kill], pace: Pace, ranks: int, options: Sequence[str], rng: random.Random
) -> list[int]:
    """Do so to one of the processes of a run, which starts all again by itself."""
    pid, done = start(folder, options), list[int]()
    for kill in planned:
        if not wait(pid, kill, folder, pace):
            return done  # it has ended
        kill_rank(pid, ranks, rng)
        done.append(progress(folder))
    check_end(os.waitpid(pid, 0)[1], folder)
    return done


def prepare_case(name: str, place: Path, steps: int | None) -> Recipe:
    """Write a case's data and recipe; train it for a moment, so that what is compiled is there for all forks."""
    made = json.loads(json.dumps(CASES[name]))
    if steps and made["train"]["steps"]:
        made["train"]["steps"] = steps
    write_data(place)
    os.chdir(place)
    (place / "recipe.yaml").write_text(json.dumps(made))
    if "prepared corpus" in name:
        from weft.config.run import Run
        from weft.tasks.corpus.build import prepare

        prepare(Run.parse(made), place / "corpus", workers=1)
        made["data"] |= {"train": "corpus", "valid": "corpus"}
        (place / "recipe.yaml").write_text(json.dumps(made))
    short = {"train.steps": 1, "train.epochs": None, "train.seeds": 1, "train.average": None, "data.workers": 0}
    weft.train(made, short, place / "compiled")
    return made


def run_case(name: str, place: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Train a case unbroken, then with kills; return how many there were, and what differs."""
    made = prepare_case(name, place, chosen.steps)
    unbroken, broken, ranks = place / "unbroken", place / "broken", chosen.ranks
    options = ["--nproc", str(ranks), "--max-restarts", str(chosen.kills)] if ranks > 1 else []
    pace = run_whole(unbroken, made["train"].get("save_every", 1), options)
    total, rng = progress(unbroken), random.Random(f"{chosen.seed} {name}")
    planned = plan(chosen.kills, chosen.inside_saves, total, rng)
    done = kill_ranks(broken, planned, pace, ranks, options, rng) if ranks > 1 else kill_runs(broken, planned, pace)
    inside = sum(kill.inside_save for kill in planned[: len(done)])
    expected, got = outcome(unbroken), outcome(broken)
    differs = [part for part in sorted(expected.keys() | got.keys()) if expected.get(part) != got.get(part)]
    counts = {"kills": len(done), "inside_saves": inside, "steps": total, "last_step_after_each_kill": done}
    rows = sum(len(part) for key, part in expected.items() if key.endswith("metrics"))
    return {"case": name, **counts, "rows": rows, "files": len(expected), "identical": not differs, "differs": differs}


def damage(count: int, place: Path, seed: int) -> dict[str, Any]:
    """Flip a bit of a checkpoint's files, or cut one short, `count` times; return how often that was found."""
    write_data(place)
    os.chdir(place)
    weft.train(CASES["rnn (lstm) lm"], ["train.steps=4"], place / "run")
    folder, rng = (place / "run" / "last").resolve(), random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    counts = {"flips": 0, "truncations": 0, "found": 0}
    for _ in range(count):
        path = rng.choice(files)
        whole = path.read_bytes()
        position = rng.randrange(len(whole))
        kind = rng.choice(("flips", "truncations"))
        flipped = whole[:position] + bytes([whole[position] ^ 1 << rng.randrange(8)]) + whole[position + 1 :]
        path.write_bytes(flipped if kind == "flips" else whole[:position])
        counts[kind] += 1
        try:
            verify_checkpoint(folder)
        except CheckpointError:
            counts["found"] += 1
        path.write_bytes(whole)
    verify_checkpoint(folder)  # it is whole again
    return {"case": "damage", "files": len(files), **counts}


def main() -> None:
    """Run the chosen cases and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--kills", type=int, default=5, help="of each case")
    parser.add_argument("--inside-saves", type=int, default=2, help="how many of them inside a save")
    parser.add_argument("--steps", type=int, help="of each training, in place of its own")
    parser.add_argument("--ranks", type=int, default=1, help="processes of each training, of which one is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--damage", type=int, default=0, help="how many flips and truncations, in place of the cases")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    chosen = parser.parse_args()
    if chosen.list:
        print("\n".join(CASES))
        return
    if chosen.damage:
        with tempfile.TemporaryDirectory() as place:
            report = damage(chosen.damage, Path(place), chosen.seed)
        print(json.dumps(report))
        sys.exit(0 if report["found"] == chosen.damage else 1)
    torch.set_num_threads(1)  # threads of OpenMP do not live through a fork
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began, reports = time.monotonic(), []
    for name in chosen.cases:
        with tempfile.TemporaryDirectory() as place:
            report = run_case(name, Path(place), chosen)
        reports.append(report)
        print(json.dumps(report), flush=True)
    summary = {
        "cases": len(reports),
        "kills": sum(report["kills"] for report in reports),
        "inside_saves": sum(report["inside_saves"] for report in reports),
        "rows": sum(report["rows"] for report in reports),
        "files": sum(report["files"] for report in reports),
        "identical": sum(report["identical"] for report in reports),
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(summary))
    sys.exit(0 if all(report["identical"] and report["kills"] for report in reports) else 1)


if __name__ == "__main__":
    main()
