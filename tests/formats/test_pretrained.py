"""Fine-tuning from pretrained weights: what is inherited, which settings are errors, and self-contained results."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.notices import Told

import weft
from weft.config.recipes import recipe_names
from weft.config.run import Run
from weft.data.samples import datasets as samples
from weft.errors import CheckpointError, ConfigError, DataError
from weft.formats.pretrained import open_model, read_run
from weft.tasks.factory import make_task
from weft.tokens import Tokens

DAYS = [("Montag", "de"), ("Monday", "en"), ("lundi", "fr"), ("Dienstag", "de"), ("Tuesday", "en"), ("mardi", "fr")]
ROWS = [(split, {"text": text, "label": label}) for split in ("train", "valid", "test") for text, label in DAYS * 3]
TAGGED = [(split, {"words": [row["text"]], "tags": [row["label"]]}) for split, row in ROWS]
SAMPLE = {"sample": "days"}
QUICK = {"steps": 2, "eval_every": 1000, "batch_tokens": 512, "lr": 1e-3, "device": "cpu"}
SMALL = {"name": "bert", "width": 16, "heads": 2, "layers": 2, "max_positions": 120}
FIRST = {
    "task": {"name": "classify"},
    "data": SAMPLE,
    "tokenizer": {"name": "characters", "size": 300},
    "model": SMALL,
    "train": QUICK,
}


@pytest.fixture(scope="module", autouse=True)
def small_samples():
    with pytest.MonkeyPatch.context() as patch:
        for name, task, rows in (("days", "classify", ROWS), ("tagged", "tag", TAGGED)):
            sample = samples.Sample(name, "", task, tuple(rows[0][1]), lambda rows=rows: iter(rows))
            patch.setitem(samples.SAMPLES, name, sample)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "run"
    weft.train(FIRST, out=folder)
    return folder


def recipe(weights, task="classify", **model):
    return {
        "task": {"name": task},
        "data": SAMPLE,
        "model": {"weights": weights if isinstance(weights, int) else str(weights), **model},
        "train": QUICK,
    }


def test_the_recipe_is_filled_in(trained):
    run = read_run(recipe(trained))
    first = read_run(FIRST)
    assert run.tokenizer == first.tokenizer
    assert run.model == first.model.model_copy(update={"weights": str(trained)})
    assert Run.parse(run.dump()) == run, "and can be read again"
    assert read_run(run.dump()) == run
    assert read_run(FIRST) == Run.parse(FIRST), "one that starts from nothing stays as it is"


def test_the_weights_are_those_of_the_other(trained, tmp_path):
    report = Told()
    other = {**recipe(trained), "task": {"name": "classify", "labels": ["de", "en"], "dropout": 0.3}}
    other["data"] = {"train": str(rows(tmp_path)), "format": "tsv", "columns": {"text": 0, "label": 1}}
    weft.train(other, ["train.steps=1"], out=tmp_path / "next", report=report)
    then, now = (load_file(folder / "model.safetensors") for folder in (trained / "best", first_of(tmp_path / "next")))
    bodies = [name for name in now if name.startswith("body.")]
    assert bodies
    assert all(torch.equal(then[name], now[name]) for name in bodies)
    assert not torch.equal(then["output.weight"][:2], now["output.weight"]), "labels of its own start afresh"
    (line,) = [notice for notice in report.notices if notice.startswith("model.weights")]
    assert line == f"model.weights: {len(bodies)} weights from {trained}; initialized: output"


def test_the_same_labels_are_gone_on_with(trained, tmp_path):
    weft.train(recipe(trained), out=tmp_path / "next")
    then, now = (load_file(folder / "model.safetensors") for folder in (trained / "best", first_of(tmp_path / "next")))
    assert all(torch.equal(then[name], now[name]) for name in now)


def test_what_the_new_task_lacks_is_left_and_what_it_adds_is_fresh(trained, tmp_path):
    report = Told()
    raw = {**recipe(trained, "tag"), "data": {"sample": "tagged"}}
    head = weft.train(raw, out=tmp_path / "tags", report=report).head
    assert head.body.pooler is None
    assert [
        notice for notice in report.notices if "weights from" in notice and notice.endswith("; initialized: output")
    ]


def test_the_encoder_of_a_recurrent_translator_is_a_body(trained_run, reverser, tmp_path):
    raw = {**recipe(trained_run), "task": {"name": "classify", "layers": "mix"}, "train": {**QUICK, "freeze": "body"}}
    report = Told()
    pipeline = weft.train(raw, out=tmp_path / "days", report=report)
    loaded = weft.load(tmp_path / "days", "cpu")
    assert loaded("Montag") == pipeline("Montag")
    assert [notice for notice in report.notices if notice.endswith("; initialized: mix, output")]
    body, encoder = pipeline.head.body.state_dict(), reverser.head.body.encoder.state_dict()
    assert {name.removeprefix("encoder."): value for name, value in body.items()}.keys() == encoder.keys()
    assert all(torch.equal(body[f"encoder.{name}"], value) for name, value in encoder.items())
    # As a translator it reads what it was trained to: a text and its end, with no beginning.
    ids = [*reverser.tokenizer.encode("abc").ids, reverser.tokenizer.specials.eos]
    states = reverser.head.body.encode(Tokens.pack([ids]))[0].detach().numpy()
    np.testing.assert_allclose(reverser.embed("abc", pool="tokens")[0], states, atol=1e-6)
    scores = reverser.layer_scores("days")
    assert {score.choice.layers for score in scores.scores} == {(0,), (1,)}


def test_a_checkpoint_needs_the_other_no_more(trained, tmp_path):
    gone = tmp_path / "gone"
    shutil.copytree(trained, gone, symlinks=True)
    pipeline = weft.train(recipe(gone), out=tmp_path / "next")
    shutil.rmtree(gone)
    again = weft.load(tmp_path / "next")
    assert again(["Donnerstag"]) == pipeline(["Donnerstag"])


def test_it_goes_on_where_it_was_without_the_other(trained, tmp_path):
    gone = tmp_path / "gone"
    shutil.copytree(trained, gone, symlinks=True)
    whole = weft.train(recipe(gone), ["train.steps=4"], out=tmp_path / "whole")
    weft.train(recipe(gone), ["train.steps=2"], out=tmp_path / "parts")
    shutil.rmtree(gone)
    parts = weft.train(recipe(gone), ["train.steps=4"], out=tmp_path / "parts", resume=True)
    for parameter, expected in zip(whole.head.parameters(), parts.head.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    with pytest.raises(ConfigError, match="model.width: is 32, but model.weights was trained with 16"):
        weft.train(recipe(gone, width=32), out=tmp_path / "parts", resume=True)
    with pytest.raises(CheckpointError, match="model.weights: .*gone"):
        weft.train(recipe(gone), out=tmp_path / "fresh", resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 32}, "model.width: is 32, but model.weights was trained with 16; leave it out"),
        ({"activation": "relu"}, "model.activation: is 'relu', but model.weights was trained with 'gelu'"),
        ({"name": "gpt"}, "model.name: is 'gpt', but model.weights is a 'bert'"),
        ({"weights": 3}, "model.weights: must name a model, by its directory or on the hub, but is 3 instead"),
    ],
)
def test_what_does_not_fit_the_weights_is_refused(trained, change, message):
    with pytest.raises(ConfigError, match=message):
        read_run(recipe(**{"weights": trained, **change}))


def test_another_tokenizer_is_refused(trained):
    with pytest.raises(ConfigError, match="tokenizer.name: is 'words', but the tokenizer of model.weights has 'char"):
        read_run({**recipe(trained), "tokenizer": {"name": "words"}})
    assert read_run({**recipe(trained), "tokenizer": {"name": "characters"}}) == read_run(recipe(trained))


def test_what_may_differ(trained):
    run = read_run(recipe(trained, dropout=0.4, pruned_heads={"0": [1]}))
    assert (run.model.dropout, run.model.pruned_heads) == (0.4, {"0": (1,)})


def test_heads_are_left_out_of_the_weights(trained, tmp_path):
    head = weft.train(recipe(trained, pruned_heads={"0": [1]}), out=tmp_path / "cut").head
    assert head.body.encoder.blocks[0].attention.out_proj.weight.shape == (16, 8)


def test_what_is_no_model_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="model.weights: "):
        read_run(recipe(tmp_path))
    with pytest.raises(CheckpointError):
        open_model(tmp_path)


def rows(folder):
    path = folder / "rows.tsv"
    path.write_text("".join(f"Montag {number}\tde\nMonday {number}\ten\n" for number in range(20)), encoding="utf-8")
    return path


def first_of(run):
    """Return the checkpoint of step 0: what the training started from."""
    return sorted(path for path in (run / "checkpoints").glob("step-*") if path.is_dir())[0]


# The length of sequences: as the positions of the weights allow.


def with_data(trained, **data):
    return {**recipe(trained), "data": {**SAMPLE, **data}}


def test_max_length_is_what_the_weights_allow(trained, tmp_path):
    told = Told()
    assert read_run(FIRST).data.max_length == 1024, "without weights it is not"
    pipeline = weft.train(with_data(trained), out=tmp_path / "run", report=told)
    special = pipeline.task.num_special_tokens
    assert pipeline.run.data.max_length == 120 - special
    positions = f"model.weights has 120 positions, of which {special} are for special tokens"
    assert f"data.max_length: {120 - special}, as {positions}" in told.notices


@pytest.mark.parametrize(("task", "special"), [("mlm", 0), ("tag", 2)])
def test_a_task_that_counts_special_tokens_has_all_positions(trained, task, special):
    assert read_run({**with_data(trained), "task": {"name": task}}).data.max_length == 120 - special


@pytest.mark.parametrize(
    ("data", "max_length"),
    [
        ({"max_length": 50}, 50),
        ({"max_length": 128, "truncation": "cut"}, 117),
        ({"max_length": 128, "truncation": "error"}, 128),  # what is too long is found when the data is read
    ],
)
def test_what_is_said_stays_unless_it_is_too_long_and_may_be_cut(trained, data, max_length):
    assert read_run(with_data(trained, **data)).data.max_length == max_length


@pytest.mark.parametrize("data", [{}, {"max_length": 500, "truncation": "cut"}])
def test_a_run_resumes_with_the_length_that_it_had(trained, tmp_path, data):
    weights = shutil.copytree(trained, tmp_path / "weights", symlinks=True)
    weft.train(with_data(weights, **data), out=tmp_path / "run")
    shutil.rmtree(weights)
    resumed = weft.train(with_data(weights, **data), ["train.steps=3"], tmp_path / "run", resume=True)
    assert resumed.run.data.max_length == 117


def test_more_positions_are_advised_only_where_the_weights_do_not_fix_them(trained, tmp_path):
    data = {"train": str(tmp_path / "long.tsv"), "columns": {"text": 0, "label": 1}, "max_length": 500}
    (tmp_path / "long.tsv").write_text(f"{'a' * 200}\tx\nb\ty\n")
    for model, advised in ((recipe(trained)["model"], False), (SMALL, True)):
        raw = {**FIRST, "data": data, "model": model}
        with pytest.raises(DataError, match="set data.max_length to 117 and data.truncation to cut or drop") as error:
            weft.train(raw, out=tmp_path / f"run-{advised}")
        assert str(error.value).endswith("or raise model.max_positions") == advised


def test_a_longer_text_is_advised_only_where_the_weights_have_the_positions(trained, tmp_path):
    (tmp_path / "long.tsv").write_text(f"{'a' * 200}\tx\nb\ty\n")
    data = {"train": str(tmp_path / "long.tsv"), "columns": {"text": 0, "label": 1}}
    for length, advice in (
        ({}, r"set data.truncation: cut or drop \(model.weights has no more positions\)$"),
        ({"max_length": 50}, "or raise data.max_length$"),
    ):
        with pytest.raises(DataError, match=advice):
            weft.train({**recipe(trained), "data": {**data, **length}}, out=tmp_path / f"run-{len(length)}")


TUNED = [name for name in recipe_names() if name.endswith("-bert") and name != "langid-bert"]


@pytest.mark.parametrize("name", TUNED)
def test_the_shipped_recipes_take_a_bert_with_few_positions(trained, name):
    run = read_run(name, [f"model.weights={trained}"])
    assert run.data.max_length <= 118
    make_task(run)
