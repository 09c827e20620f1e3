"""The recipes that `weft init` starts from: one for every task and amount of data, valid and larger with more data."""

import math
from dataclasses import replace

import pytest

from weft.cli.data_check import TASKS
from weft.cli.starter import (
    CPU_SECONDS,
    ENCODER_LENGTH,
    FLOPS_PER_CORE,
    STARTERS,
    DataSize,
    flops_per_epoch,
    propose_recipe,
    validation_fraction,
)
from weft.config.run import Run
from weft.formats.pretrained import read_run
from weft.tasks.factory import make_task


class Check:
    """A check of data with a column of tags, or of second texts, of which there is nothing else to see."""

    def __init__(self, task, other="tags"):
        self.task, self.fields, self.profiles = {"name": task}, {0: "text", 1: other}, {"train": self}

    labels = ("B-LOC", "O")

    def column(self, name):
        return self


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("rows", [10, 10_000, 3_000_000])
@pytest.mark.parametrize(("words", "characters"), [(2.0, True), (20.0, False), (400.0, False)])
def test_every_size_of_data_gets_a_valid_recipe(task, gpu, rows, words, characters):
    size = DataSize(rows, words, int(20 * words), int(2 * words), characters, gpu, 2)
    sections = propose_recipe(Check(task), size).sections
    run = Run.parse({**sections, "data": {"train": "a.csv", "validation_fraction": 0.1, **sections["data"]}})
    make_task(run)
    assert (2 if gpu else 0.1) <= run.train.epochs <= 60
    assert run.train.precision == ("bf16" if gpu else "fp32")


def test_more_data_gets_a_larger_model():
    models = [propose_recipe(Check("classify"), DataSize(n, 20, 40, 30, False, False, 2)) for n in (500, 50_000)]
    assert models[0].sections["model"]["width"] < models[1].sections["model"]["width"]


def test_every_starter_is_chosen_by_some_data_and_has_a_size_for_all_of_it():
    assert all(max(starter.sizes) == math.inf for starter in STARTERS.values())
    notes = {
        propose_recipe(Check(task, other), DataSize(rows, words, 40, int(1.5 * words), words < 3, gpu, 2, english)).note
        for task, other in [*((task, "tags") for task in TASKS), ("classify", "pair")]
        for rows in (100, 50_000)
        for words in (2, 20)
        for gpu in (False, True)
        for english in (False, True)
    }
    assert {starter.note for starter in STARTERS.values()} == {
        note.partition("; sized for")[0].removesuffix(", with a CRF") for note in notes
    }


def test_without_a_gpu_translation_fits_into_minutes():
    small, large, gpu = (
        propose_recipe(Check("translate"), DataSize(rows, 6.5, 60, 12, False, gpu, 2))
        for rows, gpu in [(4000, False), (162_756, False), (162_756, True)]
    )
    assert small.sections["train"]["epochs"] == 30
    assert "sized for" not in small.note
    assert large.sections["model"]["name"] == "seq2seq"
    assert large.sections["model"]["width"] == 128
    assert large.sections["tokenizer"]["size"] > small.sections["tokenizer"]["size"]
    assert "sized for" in large.note
    flops = flops_per_epoch(large.sections, 162_756 * 6.5) * large.sections["train"]["epochs"]
    assert 0.5 < flops / (CPU_SECONDS * FLOPS_PER_CORE * 2) <= 1.05
    assert gpu.sections["model"]["name"] == "transformer"
    assert gpu.sections["train"]["epochs"] == 5


def test_more_cores_train_a_larger_model_or_longer():
    cores = [
        propose_recipe(Check("lm"), DataSize(24_000, 85, 400, 200, False, False, count)).sections for count in (1, 64)
    ]
    assert cores[0]["model"]["width"] < cores[1]["model"]["width"]
    assert cores[0]["train"]["epochs"] < cores[1]["train"]["epochs"]


def test_a_gpu_reads_larger_batches():
    sizes = [DataSize(5000, 20, 40, 30, False, gpu, 2) for gpu in (False, True)]
    small, large = (propose_recipe(Check("classify"), size).sections["train"]["batch_size"] for size in sizes)
    assert large == 2 * small


@pytest.mark.parametrize(("task", "other"), [("classify", "pair"), ("tag", "tags"), ("span", "x"), ("choice", "x")])
def test_english_texts_start_from_the_encoder_that_ships_where_that_is_better(task, other):
    size = DataSize(3000, 20, 400, 30, False, False, 2, english=True)
    sections = propose_recipe(Check(task, other), size).sections
    data = {"train": "a.csv", "validation_fraction": 0.1, **sections["data"]}
    run = read_run({**sections, "data": data})
    make_task(run)
    assert (run.model.weights, run.tokenizer.name) == ("encoder-en", "wordpiece")
    assert 0.3 <= run.train.epochs <= 10
    assert run.data.max_length <= ENCODER_LENGTH
    flops = flops_per_epoch(sections, 3000 * 20) * run.train.epochs
    assert flops <= 1.05 * CPU_SECONDS * FLOPS_PER_CORE * 2
    for other_size in (replace(size, english=False), replace(size, rows=3_000_000)):  # too many for a CPU
        assert "weights" not in propose_recipe(Check(task, other), other_size).sections["model"]


def test_many_english_texts_to_label_need_no_encoder_and_names_have_none():
    few, many, names = (
        propose_recipe(Check("classify"), DataSize(rows, 20, 40, 30, characters, False, 2, english=True))
        for rows, characters in [(500, False), (50_000, False), (500, True)]
    )
    assert few.sections["model"]["weights"] == "encoder-en"
    assert {"weights"} & (many.sections["model"].keys() | names.sections["model"].keys()) == set()


def test_a_pretrained_model_is_advised_where_rows_are_few():
    advised = [propose_recipe(Check("classify"), DataSize(n, 20, 40, 30, False, False, 2)) for n in (500, 50_000)]
    assert [recipe.advise_pretrained for recipe in advised] == [True, False]


@pytest.mark.parametrize(
    ("rows", "fraction"), [(20, 0.1), (40_000, 0.1), (40_001, 0.05), (162_756, 0.02), (10**9, 0.001)]
)
def test_of_very_many_rows_a_smaller_share_is_held_out(rows, fraction):
    assert validation_fraction(rows) == fraction
