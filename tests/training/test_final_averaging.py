"""The mean of the last checkpoints becomes the best model if it is better, and the training does not feel it."""

import json
import os
import shutil
import signal

import pytest
from safetensors.torch import load_file
from tests.checkpoint.test_averaging import by_hand, same
from tests.conftest import recipe_for, write_pairs
from tests.training.test_trainer import Listener

import weft
from weft.checkpoint.averaging import AverageInfo, read_average_info, write_average_info
from weft.checkpoint.store import Store
from weft.training.reporting import CheckpointSaved, Eval, Notice, Step, read_metrics
from weft.training.signals import Interrupted

WILD = 1.0  # a learning rate so large that the mean is far better than any of them
TAME = 1e-3  # each is better than the one before, so the mean is worse than the last
AT_THE_END = 1000  # steps: evaluated once
SETTINGS = {"steps": 14, "save_every": 4, "eval_every": AT_THE_END, "average": 3, "metric": "loss", "report_every": 1}
SETTINGS["batch_tokens"] = 200


@pytest.fixture(scope="module")
def wild(tmp_path_factory):
    """Return a recipe; evaluations are short, for they are most of the time."""
    recipe = recipe_for(write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.tsv"))
    return {**recipe, "task": {"name": "translate", "decode": {"max_length": 2}}, "train": {**SETTINGS, "lr": WILD}}


@pytest.fixture(scope="module")
def whole(wild, tmp_path_factory):
    """Return the directory of a run whose average is the best, and what it said; not to be changed."""
    folder, listener = tmp_path_factory.mktemp("whole") / "run", Listener()
    weft.train(wild, [], folder, report=listener)
    return folder, listener


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole[0], tmp_path / "copied", symlinks=True)


def notices(listener):
    return [record.text for record in listener.of(Notice)]


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def bits(folder):
    return {name: value.numpy().tobytes() for name, value in load_file(folder / "model.safetensors").items()}


def link(folder, name):
    return (folder / name).readlink().name


def losses(folder):
    return [(row["step"], row["loss"]) for row in read_metrics(folder / "metrics.jsonl")]


def alike(run, other, *links):
    assert losses(run) == losses(other)
    assert Store(run).steps() == Store(other).steps()
    for name in links:
        assert link(run, name) == link(other, name)
        assert bits(run / name) == bits(other / name)


def test_a_better_average_is_the_best(whole):
    run, listener = whole
    names = [f"step-{step:08d}" for step in (4, 8, 12, 14)]
    assert checkpoints(run) == ["average-00000014", *names]
    assert (link(run, "best"), link(run, "last")) == ("average-00000014", "step-00000014")
    assert same(load_file(run / "best/model.safetensors"), by_hand([run / "checkpoints" / name for name in names[1:]]))
    about, before = read_average_info(run / "best"), read_metrics(run / "metrics.jsonl")[-1]["valid"]["loss"]
    assert about.of == names[1:]
    assert about.rank[0] < before
    assert listener.of(CheckpointSaved)[-1] == CheckpointSaved(14, run / "checkpoints/average-00000014")
    assert weft.load(run).evaluate()["loss"] == pytest.approx(about.rank[0], rel=1e-6)
    message = f"it has loss {about.rank[0]:.4g}, the best so far loss {before:.4g}"
    assert notices(listener) == [f"the average of the last 3 checkpoints is the best model: {message}"]


def test_one_that_is_no_better_is_not(wild, tmp_path):
    listener, run = Listener(), tmp_path / "run"
    loss = weft.train(wild, [f"train.lr={TAME}"], run, report=listener).evaluate()["loss"]
    assert link(run, "best") == link(run, "last") == "step-00000014"
    assert "average-00000014" not in checkpoints(run)
    assert notices(listener)[0].startswith("the average of the last 3 checkpoints is no better: it has loss ")
    last = read_metrics(run / "metrics.jsonl")[-1]["valid"]["loss"]
    assert loss == pytest.approx(last, rel=1e-6), "the mean must not stay in the model"


def test_the_tasks_metric_decides_and_both_numbers_are_told(wild, tmp_path):
    listener = Listener()
    weft.train(wild, [f"train.lr={TAME}", "train.metric=bleu"], tmp_path / "run", report=listener)
    assert "no better: it has bleu 0 (loss " in notices(listener)[0]


def test_without_validation_data_it_is_the_best(wild, tmp_path):
    listener, run = Listener(), tmp_path / "run"
    changes = [f"train.lr={TAME}", "data.valid=null", "train.metric=null"]
    weft.train(wild, changes, run, report=listener)
    assert link(run, "best") == "average-00000014"
    assert notices(listener)[0].endswith("is the best model: there is no validation data to judge it by")
    weft.train(wild, [*changes, "train.steps=16"], run, resume=True)
    assert link(run, "best") == "average-00000016"
    assert "average-00000014" not in checkpoints(run), "what no link leads to is pruned"


def test_fewer_than_asked_for_are_averaged_but_not_one(wild, tmp_path):
    listener = Listener()
    weft.train(wild, ["train.steps=8"], tmp_path / "two", report=listener)
    assert "the average of the last 2 checkpoints" in notices(listener)[0], "step 0 has learnt nothing"
    for name, change in (("short", "train.steps=3"), ("seldom", "train.save_every=null")):
        listener = Listener()
        weft.train(wild, [change], tmp_path / name, report=listener)
        message = "there is one checkpoint alone, the last; save more often by train.save_every"
        assert notices(listener) == [f"train.average: nothing to average: {message}"]
        assert link(tmp_path / name, "best") == link(tmp_path / name, "last")


def test_an_average_of_one_is_refused(wild, tmp_path):
    with pytest.raises(weft.ConfigError, match=r"train.average: should be greater than or equal to 2, but is 1"):
        weft.train(wild, ["train.average=1"], tmp_path / "run")


def test_it_changes_no_number_of_the_training(wild, whole, tmp_path):
    run = tmp_path / "without"
    weft.train(wild, ["train.average=null"], run)
    assert losses(run) == losses(whole[0])
    assert bits(run / "last") == bits(whole[0] / "last")
    assert link(run, "best") != link(whole[0], "best")
    ours, theirs = (json.loads((folder / "last/state/progress.json").read_text()) for folder in (whole[0], run))
    assert ours["best"] == theirs["best"]


# Resuming.


def stamps(folder):
    return {path: path.stat().st_mtime_ns for path in (folder / "checkpoints").rglob("*")}


def test_resuming_a_finished_run_changes_nothing(wild, whole, copied):
    before = stamps(copied)
    pipeline = weft.train(wild, [], copied, resume=True)
    assert stamps(copied) == before
    assert pipeline.evaluate() == weft.load(whole[0]).evaluate()
    alike(copied, whole[0], "last", "best")


@pytest.mark.parametrize("written", [False, True], ids=["before it is written", "before it is the best"])
def test_a_run_that_was_killed_while_it_averaged_is_finished_by_resuming(wild, whole, copied, written):
    (copied / "best").unlink()
    (copied / "best").symlink_to("checkpoints/step-00000014")
    if not written:
        shutil.rmtree(copied / "checkpoints/average-00000014")
    weft.train(wild, [], copied, resume=True)
    alike(copied, whole[0], "last", "best")
    assert checkpoints(copied) == checkpoints(whole[0])


def test_a_larger_budget_goes_on_exactly_from_the_raw_weights(wild, copied, tmp_path):
    weft.train(wild, ["train.steps=24"], copied, resume=True)
    weft.train(wild, ["train.steps=24"], tmp_path / "unbroken")
    alike(copied, tmp_path / "unbroken", "last")
    ours, theirs = (read_average_info(folder / "best").rank for folder in (copied, tmp_path / "unbroken"))
    assert ours <= theirs, "the average of the smaller budget counts too"


class Stop(Listener):
    """Sends this process a signal at a step."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def __call__(self, record):
        if isinstance(record, Step) and record.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def test_what_a_signal_saves_is_not_averaged(wild, whole, tmp_path):
    run = tmp_path / "run"
    for step in (9, 10, 11):
        with pytest.raises(Interrupted):
            weft.train(wild, [], run, resume=step > 9, report=Stop(step))
        assert link(run, "last") == f"step-{step:08d}"
    weft.train(wild, [], run, resume=True)
    alike(run, whole[0], "last", "best")


def test_nothing_else_is_averaged_where_a_signal_alone_saved(wild, tmp_path):
    run, listener, change = tmp_path / "run", Listener(), ["train.save_every=null"]
    with pytest.raises(Interrupted):
        weft.train(wild, change, run, report=Stop(5))
    weft.train(wild, change, run, resume=True, report=listener)
    assert "step-00000005" not in checkpoints(run), "it is none of those to keep"
    assert notices(listener)[0].startswith("train.average: nothing to average")


def test_an_average_that_is_the_best_stays_it_until_it_is_beaten(wild, tmp_path):
    tame = tmp_path / "tame"
    weft.train(wild, [f"train.lr={TAME}"], tame)
    average = shutil.copytree(tame / "last", tame / "checkpoints/average-00000014")
    (tame / "best").unlink()
    (tame / "best").symlink_to("checkpoints/average-00000014")
    for rank, best in (([0.0, 0.0], "average-00000014"), ([1e9, 1e9], "step-00000020")):
        write_average_info(average, AverageInfo([], rank))  # as if nothing could beat it, then as if anything could
        run, listener = shutil.copytree(tame, tmp_path / best, symlinks=True), Listener()
        weft.train(wild, [f"train.lr={TAME}", "train.steps=20"], run, resume=True, report=listener)
        assert listener.of(Eval)[0].best, "step 20 must be better than step 14 for this to mean anything"
        assert link(run, "best") == best
        assert "is no better" in notices(listener)[0]


def test_a_damaged_checkpoint_is_not_averaged(wild, copied):
    damaged = copied / "checkpoints/step-00000012"
    spoilt = damaged / "model.safetensors"
    spoilt.write_bytes(spoilt.read_bytes()[:-1])
    with pytest.raises(weft.CheckpointError, match="step-00000012/model.safetensors: must have"):
        weft.train(wild, ["train.steps=16"], copied, resume=True)
    shutil.rmtree(damaged)
    weft.train(wild, ["train.steps=16"], copied, resume=True)
    assert link(copied, "last") == "step-00000016"
