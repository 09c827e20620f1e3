"""Real trainings are killed with SIGKILL, one of two times inside a save, and lose not one bit."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import reliability
from weft.registry import names

SCRIPT = Path(reliability.__file__)
FEW = ["rnn (lstm) lm, carried state, workers"]  # tests/e2e/test_corpus_kill.py and tests/checkpoint kill others


def test_two_kills_of_each_change_no_bit():
    command = [sys.executable, str(SCRIPT), "--kills", "2", "--inside-saves", "1", "--steps", "8", "--cases", *FEW]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *reports, summary = map(json.loads, done.stdout.splitlines())
    assert [report["case"] for report in reports] == FEW
    assert summary["identical"] == len(FEW)
    assert summary["kills"] == 2


def test_the_script_has_every_model_and_every_task_that_is_trained():
    recipes = reliability.CASES.values()
    assert {recipe["model"]["name"] for recipe in recipes} == set(names("model"))
    assert {recipe["task"]["name"] for recipe in recipes} == set(names("task")) - {
        "embed",
        "multitask",
    }  # it trains the others
    cells = {recipe["model"].get("cell") for recipe in recipes}
    assert cells - {None} == {"elman", "jordan", "lstm", "peephole", "gru"}


def write_run(folder, loss=0.1, weights=b"\0\1", random=b"\2", step=6):
    checkpoint = folder / "checkpoints" / f"step-{step:08d}"
    (checkpoint / "state").mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(weights)
    (checkpoint / "state" / "random.safetensors").write_bytes(random)
    (checkpoint / "state" / "progress.json").write_text(json.dumps({"step": step, "elapsed": hash(folder.name)}))
    for link in ("last", "best"):
        (folder / link).symlink_to(checkpoint.relative_to(folder))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": loss, "elapsed": hash(folder.name)}) + "\n")
    return reliability.outcome(folder)


CHANGES = {
    "loss": {"loss": math.nextafter(0.1, 1)},
    "weights": {"weights": b"\0\3"},
    "random": {"random": b"\3"},
    "step": {"step": 7},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_difference_of_one_bit_is_caught(tmp_path, change):
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second")
    assert first == second != write_run(tmp_path / "third", **change)
