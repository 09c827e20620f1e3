"""Checkpoint averaging is the mean of weights; incompatible checkpoints are an error that names the difference."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.conftest import recipe_for, write_pairs

import weft
from weft.checkpoint.averaging import AverageInfo, average, choose, mean_weights, read_average_info, write_average_info
from weft.checkpoint.store import Store, save_folder, verify_checkpoint
from weft.errors import CheckpointError, ConfigError

MODEL = "model.safetensors"
RECIPE = {"task": {"name": "translate"}, "tokenizer": {"name": "bytes"}, "model": {"name": "seq2seq", "width": 4}}
FILES = {"run.yaml": json.dumps(RECIPE), "tokenizer.json": "{}"}  # JSON is YAML


def checkpoint(folder, tensors, step=0, files=FILES):
    """Write a checkpoint with these weights; averaging reads only the files."""

    def write(place):
        for name, text in files.items():
            (place / name).write_text(text)
        save_file(tensors, place / MODEL)

    return save_folder(folder, step, write)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run that has checkpoints of the steps 0, 4, 8 and 12, with tied weights; read-only."""
    folder = tmp_path_factory.mktemp("averaged")
    changes = ["train.save_every=4", "train.keep=4", "model.tie=true"]
    weft.train(recipe_for(write_pairs(folder / "pairs.tsv")), changes, folder / "run")
    return folder / "run"


def weights(folder):
    return load_file(folder / MODEL)


def by_hand(folders):
    """Return the mean in double precision, by numpy."""
    models = [{name: value.double().numpy() for name, value in weights(folder).items()} for folder in folders]
    return {name: np.mean([model[name] for model in models], axis=0).astype(np.float32) for name in models[0]}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_the_average_of_a_run_is_the_mean_of_its_last_checkpoints(run, tmp_path):
    folders = [run / "checkpoints" / f"step-{step:08d}" for step in (4, 8, 12)]
    assert average([run], tmp_path / "mean", last=3) == folders
    mean = weights(tmp_path / "mean")
    assert same(mean, by_hand(folders))
    assert not any(same(mean, by_hand(others)) for others in (folders[1:], folders[:2], folders[2:]))
    average([run], tmp_path / "two", last=2)
    assert same(weights(tmp_path / "two"), by_hand(folders[1:]))


def test_checkpoints_can_be_named_one_by_one_and_by_their_links(run, tmp_path):
    folders = [run / "checkpoints" / f"step-{step:08d}" for step in (0, 12)]
    assert average([folders[0], run / "last"], tmp_path / "mean") == folders
    assert same(weights(tmp_path / "mean"), by_hand(folders))


def test_what_is_written_is_a_checkpoint_that_answers(run, tmp_path):
    average([run], tmp_path / "mean", last=2)
    assert verify_checkpoint(tmp_path / "mean")["step"] == 12
    assert read_average_info(tmp_path / "mean") == AverageInfo(["step-00000008", "step-00000012"])
    assert read_average_info(run / "last") is None
    pipeline, single = weft.load(tmp_path / "mean"), weft.load(run)
    assert pipeline.run == single.run
    assert pipeline.evaluate()["loss"] != single.evaluate()["loss"]
    assert len(pipeline(["abc", "def"])) == 2
    average([tmp_path / "mean", run / "last"], tmp_path / "again")
    weft.load(tmp_path / "again")


def test_tied_weights_stay_tied(run, tmp_path):
    average([run], tmp_path / "mean", last=2)
    decoder = weft.load(tmp_path / "mean").head.body.decoder
    assert decoder.output.weight is decoder.embed.weight
    assert weights(tmp_path / "mean").keys() == weights(run / "last").keys()


def test_what_is_no_real_number_is_the_last_ones(tmp_path):
    kinds = {"count": torch.int64, "mask": torch.bool, "small": torch.bfloat16, "large": torch.float64}
    values = [{name: torch.tensor([0, number], dtype=kind) for name, kind in kinds.items()} for number in (1, 2, 6)]
    folders = [checkpoint(tmp_path / str(number), tensors) for number, tensors in enumerate(values)]
    mean = mean_weights(folders)
    assert {name: value.dtype for name, value in mean.items()} == kinds
    assert {name: value.tolist() for name, value in mean.items()} == {
        "count": [0, 6], "mask": [False, True], "small": [0, 3], "large": [0, 3]
    }  # fmt: skip


def test_sums_are_made_in_double_precision(tmp_path):
    values = [1.0, 2.0**-24, 2.0**-24, 2.0**-24]
    folders = [checkpoint(tmp_path / str(i), {"w": torch.tensor([v])}) for i, v in enumerate(values)]
    narrow = torch.tensor(0.0)
    for value in values:
        narrow += value
    assert mean_weights(folders)["w"].item() == np.float32((1 + 3 * 2.0**-24) / 4)
    assert (narrow / 4).item() != np.float32((1 + 3 * 2.0**-24) / 4), "single precision must lose them here"


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=20, deadline=None)
@given(values=st.lists(floats, min_size=1, max_size=5), copies=st.integers(2, 6))
def test_the_mean_of_like_ones_is_each_of_them(tmp_path_factory, values, copies):
    folder = tmp_path_factory.mktemp("copies")
    folders = [checkpoint(folder / str(number), {"w": torch.tensor(values)}) for number in range(copies)]
    assert mean_weights(folders)["w"].tolist() == values


# Errors.


def test_too_few_are_refused(run, tmp_path):
    with pytest.raises(CheckpointError, match=r"step-00000012: needs others to be averaged with; name two"):
        average([run / "last"], tmp_path / "mean")
    with pytest.raises(
        CheckpointError, match=r"its last 5 checkpoints after step 0 are asked for, but it has step-0.*4, "
    ):
        average([run], tmp_path / "mean")
    with pytest.raises(CheckpointError, match=r"step-00000012: is named twice"):
        average([run / "best", run / "last", run / "checkpoints" / "step-00000012"], tmp_path / "mean")
    with pytest.raises(ConfigError, match=r"--last: must be 2 or more, but is 0 instead"):
        average([run], tmp_path / "mean", last=0)
    with pytest.raises(ConfigError, match=r"--last: counts the checkpoints of a run, but no run is named"):
        average([run / "last", run / "checkpoints/step-00000008"], tmp_path / "mean", last=2)
    with pytest.raises(CheckpointError, match="name two checkpoints or more"):
        average([], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_what_has_learnt_nothing_does_not_count(run):
    assert Store(run).steps() == [0, 4, 8, 12]
    with pytest.raises(CheckpointError, match=r"last 4 .* it has step-00000004, step-00000008, step-00000012; ask for"):
        choose([run], last=4)


def test_what_is_no_run_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="gone: does not exist"):
        choose([tmp_path / "gone"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty: is a folder; looked for a checkpoint"):
        choose([tmp_path / "empty"])


def test_a_folder_that_is_there_is_refused(run, tmp_path):
    with pytest.raises(CheckpointError, match="exists already; choose a new folder"):
        average([run], tmp_path, last=2)


def test_a_damaged_checkpoint_is_refused(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy", symlinks=True)
    damaged = copy / "checkpoints" / "step-00000008" / MODEL
    spoilt = bytearray(damaged.read_bytes())
    spoilt[-1] ^= 1
    damaged.write_bytes(spoilt)
    with pytest.raises(CheckpointError, match=r"step-00000008/model.safetensors: its contents have changed"):
        average([copy], tmp_path / "mean", last=3)


def recipe_with(**changes):
    return {**FILES, "run.yaml": json.dumps({**RECIPE, **changes})}


GOOD = {"a.weight": torch.ones(2, 3), "count": torch.tensor(3)}


@pytest.mark.parametrize(
    ("files", "tensors", "message"),
    [
        (recipe_with(model={"name": "seq2seq", "width": 8}), GOOD, r"b: model.width is 8, but 4 in .*a; only"),
        (recipe_with(model={"name": "rnn"}), GOOD, r"b: model.name is 'rnn', but 'seq2seq' in"),
        (recipe_with(task={"name": "classify", "labels": ["x"]}), GOOD, r"b: task.labels is \['x'\], but None in"),
        (recipe_with(tokenizer={"name": "words"}), GOOD, r"b: tokenizer.name is 'words', but 'bytes' in"),
        (
            {**FILES, "tokenizer.json": "[]"},
            GOOD,
            r"b: tokenizer.json is not that of .*a; only checkpoints of one task",
        ),
        ({**FILES, "tokenizer.target.json": "{}"}, GOOD, r"b: tokenizer.target.json is not that of .*a"),
        (
            FILES,
            {"count": GOOD["count"]},
            r"b/model.safetensors: a.weight is not there, but \(2, 3\) of torch.float32 in",
        ),
        (
            FILES,
            {**GOOD, "b": torch.ones(1)},
            r"b/model.safetensors: b is \(1,\) of torch.float32, but not there in .*a",
        ),
        (
            FILES,
            {**GOOD, "a.weight": torch.ones(3, 2)},
            r"a.weight is \(3, 2\) of .*, but \(2, 3\) of torch.float32 in",
        ),
        (FILES, {**GOOD, "a.weight": torch.ones(2, 3).half()}, r"a.weight is \(2, 3\) of torch.float16, but "),
    ],
)
def test_what_does_not_belong_together_is_refused(tmp_path, files, tensors, message):
    checkpoint(tmp_path / "a", GOOD)
    checkpoint(tmp_path / "b", tensors, files=files)
    with pytest.raises(CheckpointError, match=message):
        average([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"], "nothing is left behind"


def test_other_data_and_another_training_may_be_averaged(tmp_path):
    checkpoint(tmp_path / "a", GOOD)
    other = recipe_with(data={"train": "other.tsv"}, train={"steps": 3, "seed": 2})
    checkpoint(tmp_path / "b", {**GOOD, "a.weight": 3 * torch.ones(2, 3)}, 7, files=other)
    average([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
    assert weights(tmp_path / "mean")["a.weight"].tolist() == [[2.0] * 3] * 2
    assert (tmp_path / "mean" / "run.yaml").read_text() == other["run.yaml"], "it is the last one's"
    assert verify_checkpoint(tmp_path / "mean")["step"] == 7


def test_no_class_that_a_checkpoint_names_is_imported(tmp_path, monkeypatch):
    (tmp_path / "evil_model.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    files = recipe_with(model={"name": "evil_model:Evil"})
    average([checkpoint(tmp_path / name, GOOD, files=files) for name in "ab"], tmp_path / "mean")
    assert "evil_model" not in sys.modules


@pytest.mark.parametrize("rank", [None, [-0.5, 1.25], [-0.5, float("inf")]])
def test_what_is_written_about_an_average_is_read_back(tmp_path, rank):
    write_average_info(tmp_path, AverageInfo(["a", "b"], rank))
    assert read_average_info(tmp_path) == AverageInfo(["a", "b"], rank)


@pytest.mark.parametrize("text", ["", "[]", '{"of": 3}', '{"of": ["a"], "rank": "b"}', "\udcff"])
def test_what_cannot_be_read_about_one_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "average.json").write_text(text, errors="surrogateescape")
    with pytest.raises(CheckpointError, match=r"^.*average.json: cannot be read: .*; delete .*, and run again$"):
        read_average_info(tmp_path)
