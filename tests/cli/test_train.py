"""`weft train`: what it prints, and that signals save and a resumed run goes on as if unbroken."""

import os
import signal
import sys
import time

import pytest
from tests.cli.conftest import finished, good, process, refused

import weft
from weft.checkpoint.store import Store
from weft.training.reporting import read_metrics


def test_train_ends_with_the_evaluation(run, recipe_file, tmp_path):
    done = good(run("train", recipe_file, "train.steps=4", "--out", tmp_path / "run"))
    assert [line.split()[0] for line in done.lines if line.split()] == [
        "metric", "────────────────────", "loss", "exact_match", "bleu",
    ]  # fmt: skip
    *progress, split, last = done.err.splitlines()
    assert split == "evaluated on the validation data: the recipe has no data.test"
    assert last == f"the best model is in {tmp_path / 'run' / 'best'}: weft predict {tmp_path / 'run'}"
    assert [line.partition(",")[0] for line in progress] == ["recipe: step 2 (50%)", "recipe: step 4 (100%)"]
    assert "tokens/s, valid loss " in progress[-1]
    assert weft.load(tmp_path / "run").run.train.steps == 4
    refused(run("train", recipe_file, "--out", tmp_path / "run"), "holds a run already; go on with it by --resume")
    good(run("train", recipe_file, "train.steps=6", "--out", tmp_path / "run", "--resume"))
    assert Store(tmp_path / "run").steps()[-1] == 6


def test_a_plan_is_printed_and_nothing_else_is_done(run, recipe_file, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    done = good(run("train", recipe_file, "train.steps=4", "--plan"))
    assert done.lines[0].strip() == f"{recipe_file} on cpu"
    for name in ("parameters", "operations in all", "MFU", "memory", "in all", "checkpoints"):
        assert any(line.strip().startswith(name) for line in done.lines)
    assert done.err == ""
    refused(run("train", recipe_file, "--plan", "--resume"), "--plan: estimates a run from its first step")
    refused(run("train", recipe_file, "data.train=gone.tsv", "--plan"), "gone.tsv: there is no such file")
    assert not list((tmp_path / "empty").iterdir())


def test_a_run_goes_to_runs_and_its_recipes_name(run, recipe_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good(run("train", "recipe.yaml", "train.steps=1"))
    assert (tmp_path / "runs" / "recipe" / "best" / "model.safetensors").is_file()


def test_without_data_to_evaluate_on_training_is_still_good(run, recipe_file, tmp_path):
    done = good(run("train", recipe_file, "data.valid=null", "train.steps=2", "--out", tmp_path / "run"))
    assert done.out == ""
    assert "the best model is in" in done.err


def test_notices_go_to_stderr(run, recipe_file, tmp_path, pairs_file):
    with pairs_file.open("a") as file:
        file.write("one column\n")
    done = good(run("train", recipe_file, "train.steps=1", "data.on_bad_rows=skip", "--out", tmp_path / "run"))
    assert "data.train: skipped 1 row" in done.err
    assert "skipped" not in done.out


def test_a_file_beside_may_be_named(run, recipe_file, tmp_path, monkeypatch):
    (tmp_path / "beside_me.py").write_text(
        "from weft.models.seq2seq.model import Seq2Seq\n\n\nclass MyModel(Seq2Seq):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    good(run("train", recipe_file, "model.name=beside_me:MyModel", "train.steps=1", "--out", "run"))
    refused(run("predict", "run", "abc"), "beside_me:MyModel", "--trust")
    refused(run("evaluate", "run"), "--trust")
    assert len(good(run("predict", "run", "abc", "--trust")).lines) == 1
    del sys.modules["beside_me"]


def wait_for(folder, rows, running):
    """Wait until a run in another process has reported so often."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        path = folder / "metrics.jsonl"
        if path.exists() and len(read_metrics(path)) >= rows:
            return
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.02)
    raise AssertionError("it does not train")


STOPPED = ["train.report_every=1", "model.attention=none", "data.workers=2"]


def test_signals_save_and_resuming_finishes(run, recipe, recipe_file, tmp_path):
    """One signal is sent to the trainer, and one, as a terminal's Ctrl-C, to the workers that collate for it, too."""
    folder = tmp_path / "run"
    command = ["train", recipe_file, "train.steps=10000000", *STOPPED, "--out", folder, "--quiet"]
    first = process(*command)
    wait_for(folder, 5, first)
    with pytest.raises(weft.CheckpointError, match=rf"another run \(process {first.pid}\) is training in .*run; wait"):
        weft.train(recipe, [], folder)
    first.send_signal(signal.SIGTERM)
    done = finished(first)
    assert (done.code, done.out) == (143, "")
    assert done.err == f"stopped by SIGTERM; saved in {folder}: continue with --resume\n"
    step = Store(folder).steps()[-1]
    assert step == read_metrics(folder / "metrics.jsonl")[-1]["step"] > 0

    second = process(*command, "--resume", start_new_session=True)
    wait_for(folder, step + 5, second)
    os.killpg(second.pid, signal.SIGINT)
    done = finished(second)
    assert (done.code, done.out) == (130, "")
    assert done.err == f"stopped by SIGINT; saved in {folder}: continue with --resume\n"
    stopped = Store(folder).steps()[-1]
    assert stopped > step

    good(run(*command[:2], f"train.steps={stopped + 3}", *STOPPED, "--out", folder, "--resume"))
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, stopped + 4))
    unbroken = tmp_path / "unbroken"
    weft.train(recipe, [f"train.steps={stopped + 3}", *STOPPED], unbroken)
    assert [row["loss"] for row in rows] == [row["loss"] for row in read_metrics(unbroken / "metrics.jsonl")]


def test_a_schedulers_signal_to_the_whole_group_spares_the_workers(recipe_file, tmp_path):
    folder = tmp_path / "run"
    changes = ["train.steps=10000000", *STOPPED, "--out", folder, "--quiet"]
    running = process("train", recipe_file, *changes, start_new_session=True)
    wait_for(folder, 5, running)
    os.killpg(running.pid, signal.SIGTERM)
    done = finished(running)
    assert done.code == 143, done.err
    assert Store(folder).steps()[-1] == read_metrics(folder / "metrics.jsonl")[-1]["step"] > 0
