"""What may happen to several processes: one is killed, one hangs, all are stopped; and to one: no disk, no worker."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import tiny_runs
import weft
from weft.checkpoint.manifest import verify_checkpoint
from weft.checkpoint.store import Store
from weft.errors import CheckpointError
from weft.training.reporting import Step, read_metrics

PATIENCE = 120


def children(pid):
    """Return the processes that a process has started, the first of them first."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def step_of(folder):
    last = folder / "last"
    return int(last.readlink().name.partition("-")[2].partition(".")[0]) if last.is_symlink() else -1


def wait_for(condition, process):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < end, "nothing has happened"
        time.sleep(0.02)


def losses(folder):
    return {row["step"]: row["loss"] for row in read_metrics(folder / "metrics.jsonl")}


@contextmanager
def in_folder(folder):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def test_a_process_is_killed_then_one_hangs_then_all_are_stopped_and_not_a_loss_is_changed(tmp_path):
    tiny_runs.write_data(tmp_path)
    changes = {"steps": 100_000, "eval_every": 100_000, "save_every": 5, "rank_timeout": 2, "accumulate": 2}
    recipe = tiny_runs.recipe(tiny_runs.LM, tiny_runs.rnn("lstm"), **changes)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = ["-m", "weft", "train", "recipe.yaml", "--out", "run", "--nproc", "2", "--max-restarts", "2", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    run, rng = tmp_path / "run", random.Random(tmp_path.name)
    errors = tmp_path / "errors.txt"
    with errors.open("w") as stderr:
        process = subprocess.Popen([sys.executable, *command], cwd=tmp_path, env=environment, stderr=stderr)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        step = step_of(run)
        wait_for(lambda step=step: step_of(run) > step, process)
        time.sleep(rng.random() / 10)
        os.kill(children(process.pid)[1], number)
        wait_for(lambda: len(children(process.pid)) < 2, process)
        wait_for(lambda: len(children(process.pid)) == 2, process)
    step = step_of(run)
    wait_for(lambda: step_of(run) > step, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    errors = errors.read_text()
    assert errors.count("rank 1 (host") == 1, errors
    assert "has not gone on for 2 s while rank 0 waits" in errors
    assert errors.count("a process has ended: all go on from the last checkpoint") == 2
    assert errors.count("stopped by SIGTERM; saved in run: continue with --resume") == 1
    last = step_of(run)
    with in_folder(tmp_path):  # one process goes on with what two have left
        weft.train(recipe, {"train.steps": last + 2}, run, resume=True)
        weft.train(recipe, {"train.steps": last + 2}, tmp_path / "unbroken")
    assert losses(run) == pytest.approx(losses(tmp_path / "unbroken"), rel=1e-5)
    assert len(losses(run)) == last + 2


class At:
    """A reporter that does something when a step is reported."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def __call__(self, record):
        if isinstance(record, Step) and record.step == self.step:
            self.action()

    def close(self):
        pass


LOSE_A_WORKER = """
import json, multiprocessing, sys
import weft
from tests.training.test_faults import At

def kill():
    multiprocessing.active_children()[0].kill()

try:
    weft.train(json.loads(sys.argv[1]), out="run", report=At(3, kill))
except weft.TrainingError as error:
    print(error)
"""


def test_a_lost_worker_is_a_clear_end_and_the_last_checkpoint_is_whole(recipe, tmp_path):
    recipe["train"] |= {"report_every": 1, "save_every": 1, "steps": 500}
    recipe["data"] |= {"workers": 1}
    done = subprocess.run(
        [sys.executable, "-c", LOSE_A_WORKER, json.dumps(recipe)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("data.workers: DataLoader worker"), done.stderr
    assert done.stdout.endswith("go on from the last checkpoint with --resume\n")
    assert verify_checkpoint(Store(tmp_path / "run").last())["step"] >= 2


def test_a_disk_that_fills_up_while_training_goes_on_ends_the_run_and_loses_nothing(recipe, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))

    settings = {"train.report_every": 4, "train.save_every": 5, "train.steps": 500}
    try:
        with pytest.raises(CheckpointError, match=r"step 10 could not be saved: .*step-00000005 is whole"):
            weft.train(recipe, settings, tmp_path / "run", report=At(8, fill))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert verify_checkpoint(Store(tmp_path / "run").last())["step"] == 5
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))
    weft.train(recipe, {**settings, "train.steps": 12}, tmp_path / "run", resume=True)
