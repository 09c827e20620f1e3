"""Weights, optimizer and random states are restored exactly; a mismatch is an error that names it."""

import json
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from weft.checkpoint import contents
from weft.checkpoint.contents import Progress
from weft.checkpoint.optimizer_state import optimizer_tensors
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.config.sections import Train
from weft.data.batching.loader import Position
from weft.errors import CheckpointError, ConfigError
from weft.models.seq2seq.model import Seq2Seq, Seq2SeqConfig
from weft.tasks.factory import build, make_task
from weft.tasks.prepare import fit_tokenizer
from weft.tokenization.trainable import load_tokenizer
from weft.training.optim import make_optimizer


def seq2seq(seed, **settings):
    torch.manual_seed(seed)
    return Seq2Seq(Seq2SeqConfig(name="seq2seq", width=8, **settings), 11)


def save_weights(folder, module):
    save_file({name: value.contiguous() for name, value in contents.weights(module).items()}, folder / MODEL)


MODEL = "model.safetensors"


def equal(ours, theirs):
    return all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("attention", ["none", "additive"])
def test_weights_come_back(tmp_path, tie, attention):
    model, other = (seq2seq(seed, tie=tie, attention=attention, layers=2) for seed in (1, 2))
    assert not equal(model.state_dict(), other.state_dict())
    save_weights(tmp_path, model)
    contents.load_weights(tmp_path, other)
    assert equal(model.state_dict(), other.state_dict())
    assert (other.decoder.output.weight is other.decoder.embed.weight) == tie
    assert other.encoder.embed.weight is other.decoder.embed.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_stored_in_half_the_bytes_are_read_as_float32(tmp_path, dtype):
    model, other = seq2seq(1), seq2seq(2)
    halved = {name: value.to(dtype).contiguous() for name, value in contents.weights(model).items()}
    save_file(halved, tmp_path / MODEL)
    contents.load_weights(tmp_path, other)
    assert equal({name: value.float() for name, value in halved.items()}, contents.weights(other))
    with pytest.raises(CheckpointError, match=f"must be torch.float64, but is {dtype} instead"):
        contents.load_weights(tmp_path, other.double())


def test_tied_weights_are_saved_once(tmp_path):
    save_weights(tmp_path, seq2seq(1, tie=True))
    names = load_file(tmp_path / MODEL)
    assert [name for name in names if "embed" in name] == ["encoder.embed.weight"]
    assert "decoder.output.weight" not in names


class Buffered(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("scratch", torch.randn(4), persistent=False)


def test_buffers_are_saved_where_they_are_part_of_the_model(tmp_path):
    module, other = Buffered(1), Buffered(2)
    save_weights(tmp_path, module)
    scratch = other.scratch.clone()
    contents.load_weights(tmp_path, other)
    assert torch.equal(other.table, module.table)
    assert torch.equal(other.scratch, scratch)
    assert "scratch" not in load_file(tmp_path / MODEL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("table"), r"model.safetensors: table: the file lacks it \(1 in all\)"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), r"extra: the model has no such weight \(1 in all\)"),
        (lambda tensors: tensors.update(table=torch.ones(5)), r"table must be \(4,\), but is \(5,\) instead"),
        (lambda tensors: tensors.clear(), r"the file lacks it \(3 in all\)"),
        (lambda tensors: tensors.update(table=torch.ones(())), r"table must be \(4,\), but is \(\) instead"),
        (
            lambda tensors: tensors.update(table=torch.ones(4).to(torch.complex64)),
            "table must be torch.float32, but is torch.complex64",
        ),
        (
            lambda tensors: tensors["table"].fill_(torch.nan),
            r"table: 4 of its 4 values are NaN or infinite; use another",
        ),
        (lambda tensors: tensors["linear.bias"][1].fill_(torch.inf), r"linear.bias: 1 of its 3 values are NaN or inf"),
        (
            lambda tensors: tensors["linear.weight"].view(-1)[:2].copy_(torch.tensor([1, -1]) * torch.inf),
            "weight: 2 of",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, change, message):
    module = Buffered(1)
    tensors = dict(contents.weights(module))
    change(tensors)
    save_file(tensors, tmp_path / MODEL)
    with pytest.raises(CheckpointError, match=message):
        contents.load_weights(tmp_path, module)


def test_weights_whose_sum_overflows_are_finite(tmp_path):
    module, other = Buffered(1), Buffered(2)
    module.linear.weight.data.fill_(3e38)
    assert module.linear.weight.sum().isinf()
    save_weights(tmp_path, module)
    contents.load_weights(tmp_path, other)
    assert equal(contents.weights(module), contents.weights(other))


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read"):
        contents.load_weights(tmp_path, Buffered(1))
    (tmp_path / MODEL).write_bytes(b"not tensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read"):
        contents.load_weights(tmp_path, Buffered(1))


def save_state(folder, module, optimizer, progress=None):
    tensors, random = optimizer_tensors(optimizer, module), {"cpu.0": torch.get_rng_state()}
    contents.write_state(folder, progress or Progress(), tensors, random)


def test_random_states_come_back(tmp_path):
    module = Buffered(1)
    save_state(tmp_path, module, make_optimizer(module, Train(steps=1)))
    expected = torch.rand(5)
    assert not torch.equal(torch.rand(5), expected)
    torch.set_rng_state(contents.load_random(tmp_path)["cpu.0"])
    assert torch.equal(torch.rand(5), expected)


def test_hidden_states_come_back_aligned(tmp_path):
    """In a file they lie at any multiple of 8 bytes, and products of such memory are rounded otherwise."""
    (tmp_path / "state").mkdir()
    states = [torch.randn(1, 3, 6) for _ in range(3)]
    contents.write_hidden_states(tmp_path, {f"{number}.0": state for number, state in enumerate(states)})
    loaded = contents.load_hidden_states(tmp_path, 0, torch.device("cpu"))
    assert all(map(torch.equal, loaded, states))
    assert {tensor.data_ptr() % 64 for tensor in loaded} == {0}
    in_the_file = load_file(tmp_path / "state" / "carried.safetensors").values()
    assert {tensor.data_ptr() % 64 for tensor in in_the_file} != {0}


def test_progress_comes_back(tmp_path):
    module = Buffered(1)
    progress = Progress(7, Position(2, 31), 1.5, 1, 0.1 + 0.2, 3, [-0.7, 1.5], 5, 1, "abc", True)
    save_state(tmp_path, module, make_optimizer(module, Train(steps=1)), progress)
    loaded = contents.load_progress(tmp_path)
    assert loaded == progress
    assert isinstance(loaded.position, Position)


def doctored(**changes):
    return json.dumps({**asdict(Progress(7)), **changes})


BAD = [
    {"step": "x"},
    {"step": "7"},
    {"step": True},
    {"step": -100},
    {"step": 10**30},
    {"position": [-5, -7]},
    {"position": ["a", "b"]},
    {"elapsed": float("nan")},
    {"best": "abc"},
    {"more": 1},
]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"step": 1}', '{"position": [0, 0], "stepp": 1}', None, *(doctored(**bad) for bad in BAD)]
)
def test_progress_that_cannot_be_read_is_refused(tmp_path, text):
    (tmp_path / "state").mkdir()
    if text is not None:
        (tmp_path / "state" / "progress.json").write_text(text)
    with pytest.raises(CheckpointError, match="this checkpoint can be used but not resumed from"):
        contents.load_progress(tmp_path)


def test_a_whole_model_comes_back(recipe, tmp_path):
    run = Run.parse(read_recipe(recipe, ["tokenizer.target={name: bytes}", "task.decode.beam=3"]))
    task, head = build(run, fit_tokenizer(run.tokenizer, run.data, make_task(run)))
    contents.write_model(tmp_path, run, task.tokenizer, head)
    again = contents.read_saved_run(tmp_path)
    assert again == run
    _, other = build(again, load_tokenizer(again.tokenizer, tmp_path))
    contents.load_weights(tmp_path, other)
    assert equal(head.state_dict(), other.state_dict())


def test_a_recipe_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"run.yaml cannot be read.*is this a checkpoint of weft"):
        contents.read_saved_run(tmp_path)
    (tmp_path / "run.yaml").write_text(json.dumps({"task": {"name": "os:path"}}))
    with pytest.raises(ConfigError, match="code from outside weft"):
        contents.read_saved_run(tmp_path)


def test_other_data_are_refused(tmp_path):
    contents.check_corpus_digest(tmp_path, "a" * 64, "a" * 64)
    with pytest.raises(
        CheckpointError, match=r"data has changed.*its digest was aaaaaaaaaaaa, and is now bbbbbbbbbbbb"
    ):
        contents.check_corpus_digest(tmp_path, "a" * 64, "b" * 64)
