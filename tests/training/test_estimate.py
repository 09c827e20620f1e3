"""A plan says what a run takes: what is counted is so, what is measured is bounded, and nothing is left behind."""

from pathlib import Path

import pytest
import torch
from tests.conftest import recipe_for, write_pairs

import weft
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.training.estimate import RunEstimate, _format_duration, _format_si, estimate_run
from weft.training.flops import TrainingCost
from weft.training.reporting import read_metrics
from weft.training.run import train_run


def estimate(recipe, *overrides, tell=lambda text: None):
    return estimate_run(Run.parse(read_recipe(recipe, overrides)), tell)


def shown(plan):
    headers, rows = plan.table()
    assert all(len(row) == len(headers) for row in rows)
    return {row[0]: row[1:] for row in rows}


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Return a recipe and its plan."""
    recipe = recipe_for(write_pairs(tmp_path_factory.mktemp("plan") / "pairs.tsv"))
    return recipe, estimate(recipe)


def test_what_is_counted_is_what_a_training_has(planned, tmp_path):
    recipe, plan = planned
    trained = train_run(Run.parse(recipe), tmp_path / "run")
    assert plan.parameters == sum(parameter.numel() for parameter in trained.head.parameters())
    assert plan.vocabulary == (len(trained.task.tokenizer),)
    assert plan.items == 60
    files = [tmp_path / "run" / "last" / name for name in ("model.safetensors", "state/optimizer.safetensors")]
    written = sum(path.stat().st_size for path in files)
    assert plan.checkpoint <= written <= plan.checkpoint + 20_000  # the names of tensors come on top
    assert plan.steps == trained.progress.step == 12
    assert plan.steps / plan.epoch == pytest.approx(
        trained.progress.position.epoch + trained.progress.position.batch / plan.epoch, abs=1e-9
    )


def test_what_is_measured_is_in_its_bounds(planned):
    _, plan = planned
    assert 0 < plan.mfu < 1.5
    assert 0 < plan.step.tokens <= 200
    assert plan.step.flops > 3 * 2 * plan.step.tokens
    assert 2 <= plan.measured <= 20
    assert 4 * 4 * plan.parameters < plan.held < plan.memory  # weights, gradients, Adam's two moments, and its steps
    assert plan.evaluation > 0
    assert plan.start > 0


def test_a_table_has_it_all(planned):
    _, plan = planned
    table = shown(plan)
    assert list(table) == [
        "parameters", "vocabulary", "data", "steps", "tokens a step", "operations a step", "operations in all", "speed",
        "MFU", "memory", "start", "training", "evaluations", "in all", "checkpoints",
    ]  # fmt: skip
    assert table["steps"] == ["12", f"{12 / plan.epoch:.1f} epochs; train.steps"]
    assert "resident peak of this process" in table["memory"][1]
    assert table["evaluations"][1].startswith("3, at most "), "one an epoch"


def test_a_stream_of_tokens_is_measured_by_its_spans(recipe, tmp_path):
    (tmp_path / "text.txt").write_text("a text of one line, which has more tokens than there are lines\n" * 3)
    recipe |= {
        "task": {"name": "lm"},
        "data": {"train": str(tmp_path / "text.txt")},
        "model": {"name": "rnn", "width": 8},
    }
    plan = estimate(recipe, "task.bptt=8", "train.batch_tokens=16")
    assert plan.items == 3
    assert plan.step.tokens <= 16


def test_two_vocabularies_are_two(recipe):
    plan = estimate(recipe, "tokenizer.target={name: characters}", "data.valid=null")
    assert len(plan.vocabulary) == 2
    assert plan.evaluation is None
    assert "evaluations" not in shown(plan)


def test_notices_are_told_and_mistakes_refused(recipe, pairs_file):
    with pairs_file.open("a") as file:
        file.write("one column\n")
    with pytest.raises(weft.DataError, match=r"pairs.tsv:\d+: "):
        estimate(recipe)
    notices = []
    estimate(recipe, "data.on_bad_rows=skip", "data.valid=null", tell=notices.append)
    assert any("skipped 1 row" in notice for notice in notices)


def test_nothing_is_left_behind(recipe, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    before = torch.are_deterministic_algorithms_enabled()
    estimate(recipe, "train.deterministic=true", "data.workers=1")
    assert not list(Path().iterdir())
    assert torch.are_deterministic_algorithms_enabled() is before


def test_a_plan_changes_no_training(recipe, tmp_path):
    def losses(folder):
        train_run(Run.parse(recipe), folder)
        return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]

    alone = losses(tmp_path / "alone")
    estimate(recipe)
    assert losses(tmp_path / "planned") == alone


# What follows from the numbers.


def plan_of(seconds=0.5, **train):
    changes = ["train.steps=null", *(f"train.{key}={value}" for key, value in train.items())]
    run = Run.parse(read_recipe(recipe_for("pairs.tsv"), changes))
    return RunEstimate(
        train=run.train, place="cpu", parameters=1000, vocabulary=(10,), items=80, epoch=8.0, measured=20,
        step=TrainingCost(200, 3_000_000, seconds), peak_flops=1e9, start=4.0, memory=10**9, resident=False,
        held=16_000, evaluation=2.0, checkpoint=12_000,
    )  # fmt: skip


def test_a_time_is_turned_into_steps():
    plan = plan_of(time="15m")
    assert plan.steps == 1800
    assert shown(plan)["steps"] == ["1,800", "225.0 epochs; train.time, 15 min 0 s, at this speed"]
    assert plan_of(time="15m", seconds=1800).steps == 1


def test_operations_are_turned_into_steps():
    plan = plan_of(flops=1e12)
    assert plan.steps == 333_334
    assert "train.flops, 1 TFLOP" in shown(plan)["steps"][1]
    assert "train.time" in shown(plan_of(flops=1e30, time="15m"))["steps"][1]


@pytest.mark.parametrize(("steps", "time", "expected"), [(10, "1h", 10), (10_000, "10s", 20), (20, "10s", 20)])
def test_of_two_budgets_the_first_to_be_spent_counts(steps, time, expected):
    plan = plan_of(steps=steps, time=time)
    assert plan.steps == expected
    assert ("train.steps" if expected == steps else "train.time") in shown(plan)["steps"][1]


def test_the_whole_is_start_steps_and_evaluations():
    plan = plan_of(steps=100, eval_every=30)
    table = shown(plan)
    assert table["training"] == ["50 s", "500.0 ms a step"]
    assert table["evaluations"][0] == "8 s"  # at 30, 60, 90 and 100
    assert table["in all"][0] == "1 min 2 s"
    assert table["MFU"][0] == "0.6%"
    assert table["operations in all"][0] == "300 MFLOP"
    assert "peak of what the GPU held" in table["memory"][1]


@pytest.mark.parametrize(
    ("train", "most"),
    [
        ({"eval_every": 1000}, 2),  # the first and the last
        ({"save_every": 10}, 4),  # two that stay, the best, and the one being written
        ({"save_every": 10, "keep": 5}, 7),
        ({"save_every": 10, "average": 6}, 8),
        ({"eval_every": 50}, 3),
    ],
)
def test_disk(train, most):
    assert shown(plan_of(steps=100, **train))["checkpoints"] == [
        f"{12 * most} kB", f"at most {most} at a time, 12 kB each"
    ]  # fmt: skip


def test_patience_may_end_it_sooner():
    assert "or fewer by train.patience" in shown(plan_of(steps=10, patience=2))["steps"][1]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (123456, "123 kB"), (1e9, "1 GB"), (2.5e21, "2.5e+03 EB")],
)
def test_large_numbers_are_short(value, text):
    assert _format_si(value, "B") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12.3 ms"), (1.26, "1.3 s"), (59, "59 s"), (60, "1 min 0 s"), (169, "2 min 49 s"), (3600, "1 h 0 min"),
        (4000, "1 h 7 min"), (47 * 3600, "47 h 0 min"), (51 * 3600, "2 d 3 h"),
    ],
)  # fmt: skip
def test_times_are_read_at_a_glance(seconds, text):
    assert _format_duration(seconds) == text
