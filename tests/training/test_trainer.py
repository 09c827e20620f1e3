"""The loop: gradients that do not hang on how a batch is cut, budgets, the best model, losses that are not finite."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import reversed_pairs

import weft
from weft.checkpoint.store import Store
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.data.batching.loader import Loader, Position
from weft.tasks.factory import build, make_task
from weft.tasks.prepare import fit_tokenizer, pack_split
from weft.training.distributed import World
from weft.training.reporting import CheckpointSaved, Eval, Notice, Step, TensorBoard, read_metrics
from weft.training.run import train_run
from weft.training.trainer import Trainer


class Listener:
    def __init__(self):
        self.records = []
        self.closed = False

    def __call__(self, record):
        self.records.append(record)

    def close(self):
        self.closed = True

    def of(self, kind):
        return [record for record in self.records if isinstance(record, kind)]


class BreakOff(Listener):
    """A reporter that ends the training with an error at a step."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def __call__(self, record):
        if isinstance(record, Step) and record.step == self.step:
            raise KeyboardInterrupt


def trainer_for(recipe, *overrides, double=False, device="cpu"):
    run = Run.parse(read_recipe(recipe, overrides))
    task = make_task(run)
    tokenizer = fit_tokenizer(run.tokenizer, run.data, task)
    torch.manual_seed(3)
    task, head = build(run, tokenizer)
    packed, _ = pack_split(run.data, "train", task, tokenizer)
    loader = Loader(packed, task.collate, run.train.batch_tokens, run.train.seed)
    world = World(0, 1, torch.device(device))
    return Trainer(run, task, (head.double() if double else head).to(device), loader, world, Listener())


def gradient(trainer, batches):
    trainer.head.zero_grad()
    trainer.train = trainer.train.model_copy(update={"clip": None, "accumulate": len(batches)})
    trainer._forget_carried()
    loss, norm, *_ = trainer._backward(batches, [Position()] * len(batches)).tolist()
    return loss, norm, [parameter.grad.clone() for parameter in trainer.head.parameters()]


def test_accumulation_gives_the_gradient_of_the_one_large_batch(recipe):
    trainer = trainer_for(recipe, "model.dropout=0", double=True)
    items = [trainer.loader.data[index] for index in range(30)]
    collate = trainer.task.collate
    whole = gradient(trainer, [collate(items, None)])
    parts = gradient(trainer, [collate(items[:4], None), collate(items[4:21], None), collate(items[21:], None)])
    assert parts[0] == pytest.approx(whole[0], rel=1e-12)
    assert parts[1] == pytest.approx(whole[1], rel=1e-12)
    for ours, theirs in zip(parts[2], whole[2], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-14)


def test_a_mean_of_means_would_be_another_gradient(recipe):
    trainer = trainer_for(recipe, "model.dropout=0", double=True)
    items = [trainer.loader.data[index] for index in range(30)]
    short = [(source, target[:3]) for source, target in items[:4]]  # parts of unlike size, or the two would agree
    cut = [trainer.task.collate(short, None), trainer.task.collate(items[4:], None)]
    whole = gradient(trainer, [trainer.task.collate([*short, *items[4:]], None)])[2]
    means = [gradient(trainer, [batch])[2] for batch in cut]
    averaged = [sum(pair) / 2 for pair in zip(*means, strict=True)]
    assert any(not torch.allclose(ours, theirs, rtol=1e-3) for ours, theirs in zip(averaged, whole, strict=True))


def test_rows_of_metrics_have_step_loss_and_speed(recipe, tmp_path):
    listener = Listener()
    train_run(Run.parse(recipe), tmp_path / "run", report=listener)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    assert all(row["loss"] > 0 and row["tokens_per_s"] > 0 for row in rows)
    assert set(rows[-1]["valid"]) == {"loss", "exact_match", "bleu"}
    assert [record.step for record in listener.of(Step)] == [2, 4, 6, 8, 10, 12]
    assert [record.step for record in listener.of(CheckpointSaved)] == [0, 4, 8, 12]
    assert listener.of(Eval)[0].best
    assert listener.closed


def test_the_loss_falls_and_the_task_is_learnt(recipe, tmp_path):
    pipeline = weft.train(recipe, ["train.steps=220", "model.width=32", "model.dropout=0"], tmp_path / "run")
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < 0.2 * losses[0]
    assert pipeline.evaluate()["exact_match"] > 0.9


@pytest.mark.parametrize("settings", [["train.precision=bf16"], ["train.deterministic=true"], ["data.workers=1"]])
def test_other_ways_to_run_train_too(recipe, tmp_path, settings):
    train_run(Run.parse(read_recipe(recipe, settings)), tmp_path / "run")
    torch.use_deterministic_algorithms(False)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_workers_change_no_number(recipe, tmp_path):
    for workers in (0, 2):
        train_run(Run.parse(read_recipe(recipe, [f"data.workers={workers}"])), tmp_path / str(workers))
    alone, helped = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("0", "2"))
    assert [row["loss"] for row in alone] == [row["loss"] for row in helped]


def test_a_seed_is_a_run(recipe, tmp_path):
    losses = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train_run(Run.parse(read_recipe(recipe, [f"train.seed={seed}"])), tmp_path / name)
        losses[name] = [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")]
    assert losses["a"] == losses["b"] != losses["c"]


def test_a_time_budget_ends_the_run(recipe, tmp_path):
    changes = ["train.steps=null", "train.time=1s", "train.schedule=warmup-linear"]
    trained = train_run(Run.parse(read_recipe(recipe, changes)), tmp_path / "run")
    assert trained.progress.done
    assert 1 <= trained.progress.elapsed < 3
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["lr"] < 1e-3  # the schedule ran by time


def test_a_budget_of_operations_is_kept_to_when_resumed(recipe, tmp_path):
    changes = ["train.schedule=warmup-linear", "train.report_every=1"]
    train_run(Run.parse(read_recipe(recipe, [*changes, "train.steps=8"])), tmp_path / "steps")
    rows = read_metrics(tmp_path / "steps" / "metrics.jsonl")
    changes += ["train.steps=null", f"train.flops={rows[5]['flops'] - 1}"]
    run = Run.parse(read_recipe(recipe, [*changes, "train.save_every=2"]))
    whole = train_run(run, tmp_path / "whole").progress
    assert (whole.step, whole.flops) == (6, rows[5]["flops"])
    broken = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        train_run(run, broken, report=BreakOff(3))
    resumed = train_run(run, broken, resume=True).progress
    assert replace(resumed, elapsed=whole.elapsed) == whole
    losses = [[row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("whole", "broken")]
    assert losses[0] == losses[1]


def test_the_best_model_is_kept_and_returned(recipe, tmp_path):
    unlike = tmp_path / "unlike.tsv"  # what is learnt here is wrong there, so the validation loss rises again
    unlike.write_text("".join(f"{text}\tffffffff\n" for text, _ in reversed_pairs(20, seed=1)))
    recipe["data"]["valid"] = str(unlike)
    changes = ["train.steps=60", "train.eval_every=5", "train.lr=0.03", "train.metric=loss"]
    pipeline = weft.train(recipe, changes, tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = {row["step"]: row["valid"]["loss"] for row in rows if "valid" in row}
    best = min(losses, key=losses.get)
    assert best != 60, "the run must get worse for this test to mean anything"
    assert Store(tmp_path / "run").best().name == f"step-{best:08d}"
    assert pipeline.evaluate(unlike)["loss"] == pytest.approx(losses[best], rel=1e-5)
    assert weft.load(tmp_path / "run").evaluate(unlike)["loss"] == pytest.approx(losses[best], rel=1e-5)


def test_of_equally_good_models_the_one_with_the_lower_loss_is_the_best(recipe, tmp_path):
    weft.train(recipe, ["train.eval_every=4", "train.lr=1e-3"], tmp_path / "run")
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "valid" in row]
    assert {row["valid"]["exact_match"] for row in rows} == {0.0}
    assert rows[-1]["valid"]["loss"] < rows[0]["valid"]["loss"]
    assert Store(tmp_path / "run").best().name == "step-00000012"


def test_patience_stops_early(recipe, tmp_path):
    changes = ["train.steps=500", "train.eval_every=2", "train.lr=1e-12", "train.patience=3"]
    trained = train_run(Run.parse(read_recipe(recipe, changes)), tmp_path / "run")
    assert trained.progress.step == 8  # the first is the best, and three more were no better
    assert trained.progress.done


def poisoned(trainer, steps):
    """Make the head's loss infinite at certain steps."""
    forward = trainer.head.forward

    def poison(batch, carry=None):
        sums, carry = forward(batch, carry)
        bad = trainer.progress.step + 1 in steps
        return {part: value * (math.inf if bad else 1) for part, value in sums.items()}, carry

    trainer.head.forward = poison
    return trainer


def test_a_loss_that_is_not_finite_makes_no_update_and_names_the_batch(recipe):
    trainer = poisoned(trainer_for(recipe, "train.steps=5"), {3})
    before, step = {}, trainer._step

    def stepping(drawn):
        before[trainer.progress.step + 1] = [p.detach().clone() for p in trainer.head.parameters()]
        step(drawn)

    trainer._step = stepping
    trainer.fit()
    assert all(torch.equal(a, b) for a, b in zip(before[3], before[4], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before[2], before[3], strict=True))
    notice = trainer.report.of(Notice)[0].text
    assert notice.startswith("step 3: the loss is inf")
    assert "epoch 0, batch 2 (items " in notice
    assert all(math.isfinite(record.loss) for record in trainer.report.of(Step))


def test_of_the_batches_of_an_update_the_one_that_is_not_finite_is_named(recipe):
    trainer = trainer_for(recipe, "train.steps=3", "train.accumulate=3")
    forward, calls = trainer.head.forward, []

    def poison(batch, carry=None):
        calls.append(batch)
        sums, carry = forward(batch, carry)
        return {part: value * (math.nan if len(calls) == 5 else 1) for part, value in sums.items()}, carry

    trainer.head.forward = poison
    trainer.fit()
    notice = trainer.report.of(Notice)[0].text
    assert re.fullmatch(r"step 2: the loss is nan .* in epoch 1, batch 0 \(items [^;]*\): no update was made", notice)


def test_too_many_of_them_stop_the_run(recipe):
    trainer = poisoned(trainer_for(recipe, "train.steps=50", "train.bad_steps=3"), set(range(4, 50)))
    with pytest.raises(weft.TrainingError, match="3 updates were skipped.*lower train.lr"):
        trainer.fit()
    assert trainer.progress.step == 6


def test_an_unknown_metric_is_refused_with_the_known_ones(recipe, tmp_path):
    with pytest.raises(weft.ConfigError, match="did you mean 'exact_match'"):
        weft.train(recipe, ["train.metric=exact_macth"], tmp_path / "run")


def test_reports_and_saves_do_not_change_a_number(recipe, tmp_path):
    weft.train(recipe, ["train.report_every=1"], tmp_path / "plain")
    weft.train(recipe, ["train.report_every=1", "train.save_every=2", "train.eval_every=3"], tmp_path / "busy")
    plain, busy = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("plain", "busy"))
    assert [row["loss"] for row in plain] == [row["loss"] for row in busy]


def test_tensorboard_files_are_written_where_it_is_installed(recipe, tmp_path, monkeypatch, no_tensorboard):
    train_run(Run.parse(recipe), tmp_path / "without")
    monkeypatch.setattr(TensorBoard, "installed", staticmethod(no_tensorboard))
    train_run(Run.parse(recipe), tmp_path / "with")
    assert list(Path(tmp_path / "with" / "tensorboard").glob("events.out.tfevents.*"))
    assert not Path(tmp_path / "without" / "tensorboard").exists()


def test_progress_is_plain_json(recipe, tmp_path):
    train_run(Run.parse(recipe), tmp_path / "run")
    progress = json.loads((tmp_path / "run" / "last" / "state" / "progress.json").read_text())
    assert progress["step"] == 12
    assert progress["done"]
