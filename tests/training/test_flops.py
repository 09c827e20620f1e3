"""The ceiling is measured without a trace; work is counted once for each real token; the share is in every row."""

from dataclasses import replace

import pytest
import torch
from tests.labelling import made
from torch.utils.flop_counter import FlopCounterMode

from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.data.batching.static_shape import StaticShape
from weft.data.truncation import TruncationPolicy
from weft.models.base import num_matrix_parameters
from weft.tasks.prepare import read_evaluation_data
from weft.training.flops import PASSES, TrainingCost, peak_flops
from weft.training.reporting import Step, read_metrics
from weft.training.run import train_run

CPU = torch.device("cpu")


@pytest.fixture
def fresh():
    """Let the ceiling be measured anew, as at the start of a process."""
    peak_flops.cache_clear()


# The ceiling.


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_machine_makes_more_than_a_million_operations_a_second(fresh, precision):
    assert 1e8 < peak_flops(CPU, precision) < 1e14


def test_the_ceiling_is_measured_once(fresh):
    assert peak_flops(CPU, "fp32") == peak_flops(CPU, "fp32")
    assert peak_flops.cache_info().misses == 1


def test_measuring_draws_no_number_that_dropout_would_have_drawn(fresh):
    before = torch.get_rng_state()
    peak_flops(CPU, "fp32")
    assert torch.equal(torch.get_rng_state(), before)
    torch.randn(1)
    assert not torch.equal(torch.get_rng_state(), before), "the state must show it if something is drawn"


def test_deterministic_kernels_can_be_asked_for(fresh):
    torch.use_deterministic_algorithms(True)
    try:
        assert peak_flops(CPU, "fp32") > 0
    finally:
        torch.use_deterministic_algorithms(False)


# TrainingCost.


class Listener:
    def __init__(self, heard=lambda record: None):
        self.heard, self.steps = heard, []

    def __call__(self, record):
        self.heard(record)
        if isinstance(record, Step):
            self.steps.append(record)

    def close(self):
        pass


def first_batch(recipe):
    """Return the head of a recipe and a batch of its first examples."""
    task, head = made(recipe)
    examples = read_evaluation_data(Run.parse(recipe).data, "train", task)[0].examples
    encoded = task.encode_batch(examples[:5], task.tokenizer, TruncationPolicy(1024, "error"))
    return head, task.collate([item for items in encoded for item in items], None)


def test_learning_takes_three_times_the_operations_of_reading(recipe):
    head, batch = first_batch(recipe)
    work = TrainingCost()
    work.add(head, [batch, batch])
    assert PASSES == 3
    assert work.flops == 2 * 3 * head.body.flops(batch.tokens, batch.source)
    assert (work.tokens, work.seconds) == (2 * batch.size, 0)


def test_what_fills_a_batch_up_is_no_work(recipe):
    head, batch = first_batch(recipe)
    sizes = [len(side.ids) + 9 for side in (batch.source, batch.tokens)]
    filled = batch.to_static_shape(StaticShape(tuple(sizes), (9, 9), rows=len(batch.tokens), fillers=3))
    assert len(filled.tokens.ids) > len(batch.tokens.ids)
    bare, full, careless = TrainingCost(), TrainingCost(), TrainingCost()
    bare.add(head, [batch])
    full.add(head, [filled])
    careless.add(head, [replace(filled, unpadded=None)])
    assert full == bare != careless


@pytest.mark.parametrize(
    ("task", "name", "rows", "places"),
    [
        ("classify", "rows.tsv", "one day\ta\ntwo\tb\n", 2),
        ("tag", "rows.conll", "one O\nday B\n\ntwo O\n", 3),
    ],
)
def test_the_scores_of_labels_count_too(tmp_path, task, name, rows, places):
    path = tmp_path / name
    path.write_text(rows)
    recipe = {
        "task": {"name": task}, "data": {"train": str(path)}, "tokenizer": {"name": "characters"},
        "model": {"name": "cnn", "width": 6}, "train": {"steps": 1},
    }  # fmt: skip
    head, batch = first_batch(recipe)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        head.eval()(batch)
    assert head.flops(batch) == counter.get_total_flops()
    assert head.flops(batch) - head.body.flops(batch.tokens) == 2 * num_matrix_parameters(head.output) * places


# In training.


def test_every_row_has_the_share_of_the_ceiling(recipe, tmp_path):
    listener = Listener()
    changes = ["train.report_every=1", "train.accumulate=2", "train.eval_every=4"]
    trained = train_run(Run.parse(read_recipe(recipe, changes)), tmp_path / "run", report=listener)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 12
    assert all(0 < row["mfu"] < 1.5 for row in rows)
    assert [row["mfu"] for row in rows] == [record.mfu for record in listener.steps]
    # Seconds drop out of mfu / tokens_per_s: what is left is operations a token, about the same in all batches here.
    width, vocab = 16, len(trained.task.tokenizer)
    least, most = 6 * vocab * width / 2, 6 * sum(parameter.numel() for parameter in trained.head.parameters())
    for row in rows:
        assert least < row["mfu"] * peak_flops(CPU, "fp32") / row["tokens_per_s"] < most


def losses(recipe, folder, heard=lambda record: None):
    train_run(Run.parse(recipe), folder, report=Listener(heard))
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def test_a_run_that_measures_and_one_that_need_not_have_the_same_losses(recipe, tmp_path, fresh):
    first = losses(recipe, tmp_path / "measures")
    assert peak_flops.cache_info().misses == 1
    assert losses(recipe, tmp_path / "knows") == first
    assert peak_flops.cache_info().misses == 1
    draws = losses(recipe, tmp_path / "draws", lambda record: torch.randn(1))
    assert draws == first, "dropout depends on a batch's place, not on what was drawn before"
    assert losses({**recipe, "train": {**recipe["train"], "seed": 2}}, tmp_path / "another seed") != first
