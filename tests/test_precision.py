"""Every model computes in half precision on any CPU, with the answers of float32 up to its rounding.

A library may have no kernel in bfloat16 for a CPU, or another one, so these tests are also run with the instruction
sets held down (`make isa`).
"""

import pytest
import torch

import weft
from tests.notices import Told
from weft.config.schema import read_section
from weft.nn.layers.quantization import lower
from weft.nn.rnn import cells
from weft.registry import resolve
from weft.testing import Case

pytestmark = pytest.mark.isa

CELLS = ("elman", "jordan", "lstm", "peephole", "gru")
SCORES = ("none", "cosine", "additive", "location", "general", "dot", "scaled-dot")
BLOCKS = {"width": 16, "heads": 2, "layers": 2, "ffn_width": 32}
MODELS = [
    *(("rnn", {"width": 16, "layers": 2, "cell": cell, "direction": "both"}) for cell in CELLS),
    *(("rnn", {"width": 16, "layers": 2, "cell": cell}) for cell in CELLS),
    *(("rnn", {"width": 16, "attention": score}) for score in SCORES if score != "location"),
    ("rnn", {"width": 16, "chars": 6}),
    *(("seq2seq", {"width": 16, "cell": cell}) for cell in CELLS),
    *(("seq2seq", {"width": 16, "attention": score, "locations": 8}) for score in SCORES),
    ("transformer", BLOCKS),
    ("gpt", {**BLOCKS, "max_positions": 32}),
    ("bert", {**BLOCKS, "max_positions": 32}),
    ("elmo", {"width": 16, "cells": 24, "embedding": 8, "filters": {1: 8, 2: 8}, "highways": 1}),
    ("cnn", {"width": 18}),
    ("word2vec", {"width": 16}),
]
LOWERED = [(name, config) for name, config in MODELS if resolve("model", name).supports_low_precision]
# Of the norm of all answers. Each number is rounded to 2^-9 and 2^-12 of itself, in some ten steps on its way.
ERROR = {torch.bfloat16: 10 * 2**-9, torch.float16: 10 * 2**-12}


def case_of(name, config):
    torch.manual_seed(0)
    kind = resolve("model", name)
    case = Case(kind, read_section(kind.Config, {"name": name, **config}, "model"), 23)
    case.model.float()
    return case


def answers(case, half=None):
    """Return all that the model says, flat."""
    with torch.autocast("cpu", half, enabled=half is not None):
        parts = case.answers(case.rows, case.sources).values()
    return torch.cat([part.float().flatten() for rows in parts for part in rows])


def apart(got, must):
    return float((got - must).norm() / must.norm())


@pytest.mark.parametrize("half", ERROR, ids=str)
@pytest.mark.parametrize(("name", "config"), MODELS, ids=str)
def test_a_model_learns_and_answers_under_autocast(name, config, half):
    case = case_of(name, config)
    learning = answers(case, half)
    learning.square().mean().backward()
    assert all(one.grad is None or one.grad.isfinite().all() for one in case.model.parameters())
    with torch.no_grad():
        exact, asked = answers(case), answers(case, half)
    assert apart(learning.detach(), exact) < ERROR[half]
    assert apart(asked, exact) < ERROR[half]


@torch.no_grad()
@pytest.mark.parametrize(("name", "config"), LOWERED, ids=str)
def test_a_model_answers_in_bf16(name, config):
    case = case_of(name, config)
    exact = answers(case)
    lower(case.model, "bf16")
    assert apart(answers(case), exact) < ERROR[torch.bfloat16]


@torch.no_grad()
@pytest.mark.parametrize(("name", "config"), MODELS[::5], ids=str)
def test_another_models_answers_are_far_beyond_rounding(name, config):
    case = case_of(name, config)
    exact = answers(case)
    for weight in case.model.parameters():
        weight.mul_(1.3)
    assert apart(answers(case, torch.bfloat16), exact) > 5 * ERROR[torch.bfloat16]


# A whole training.

LABELLED = {"columns": {"text": 0, "label": 1}, "header": False}
TEXT = "data.txt", "abc abd.\n\ncab bad.\n\n", {"documents": "blank", "max_length": 32}
DATA = {  # for each task a file, what stands in it, and how it is read
    "classify": ("data.tsv", "abc\tone\nfed\ttwo\n", LABELLED),
    "tag": ("data.conll", "a\tB-X\nb\tO\n\n", {"columns": {"words": 0, "tags": 1}}),
    "translate": ("data.tsv", "ab\tba\n", {}),
    "lm": TEXT,
    "mlm": TEXT,
}
RUNS = [
    ("classify", "rnn", {"cell": "lstm", "width": 8, "direction": "both"}),
    ("classify", "cnn", {"width": 9}),
    ("tag", "rnn", {"cell": "gru", "width": 8}),
    ("lm", "rnn", {"cell": "lstm", "width": 8, "layers": 2, "dropout_recurrent": 0.2}),
    ("lm", "gpt", {**BLOCKS, "max_positions": 64}),
    ("lm", "elmo", {"width": 8, "cells": 12, "embedding": 4, "filters": {1: 4, 2: 4}}),
    ("mlm", "bert", {**BLOCKS, "max_positions": 64}),
    ("translate", "seq2seq", {"width": 8}),
    ("translate", "transformer", BLOCKS),
]
ASKED = {"classify": "abc", "tag": "a b", "lm": "ab", "mlm": "a[MASK]c", "translate": "ab"}


def recipe_of(folder, task, model, config):
    name, text, how = DATA[task]
    (folder / name).write_text(text * 4, encoding="utf-8")
    return {
        "task": {"name": task},
        "data": {"train": str(folder / name), "valid": str(folder / name), **how},
        "tokenizer": {"name": "characters", **({"specials": {"mask": "[MASK]"}} if task == "mlm" else {})},
        "model": {"name": model, **config},
        "train": {"steps": 2, "batch_tokens": 64, "eval_every": 2, "precision": "bf16"},
    }


@pytest.mark.parametrize(("task", "model", "config"), RUNS, ids=str)
def test_a_run_trains_in_bf16_and_answers(tmp_path, task, model, config):
    pipeline = weft.train(recipe_of(tmp_path, task, model, config), [], tmp_path / "run")
    assert pipeline([ASKED[task]])


@pytest.mark.parametrize("lacks", [True, False])
def test_a_run_says_what_it_computes_in_fp32(tmp_path, monkeypatch, lacks):
    monkeypatch.setattr(cells, "has_half_kernel", lambda network, half: not (lacks and network == "LSTM"))
    told = Told()
    recipe = recipe_of(tmp_path, "classify", "rnn", {"cell": "lstm" if lacks else "gru", "width": 8})
    weft.train(recipe, [], tmp_path / "run", report=told)
    must = "train.precision: PyTorch has no bf16 kernel of LSTM for this CPU: those layers are computed in fp32"
    assert (must in told.notices) is lacks
