"""Resuming in one process: refused where it would not be the same run, exact where it is."""

import hashlib
import json
import shutil
import sys

import pytest
from tests.notices import Told

import weft
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.config.schema import Named
from weft.models.base import Model, Role
from weft.training.reporting import read_metrics
from weft.training.run import train_run


def losses(folder):
    return [(row["step"], row["loss"]) for row in read_metrics(folder / "metrics.jsonl")]


def train(recipe, folder, *overrides, resume=False, report=None):
    changes = ["train.save_every=5", "train.eval_every=1000", *overrides]  # evaluated at the end alone
    return train_run(Run.parse(read_recipe(recipe, changes)), folder, resume, report)


@pytest.fixture
def trained(recipe, tmp_path):
    train(recipe, tmp_path / "run", "train.steps=10")
    return tmp_path / "run"


def test_a_larger_budget_goes_on_exactly(recipe, trained, tmp_path):
    train(recipe, trained, "train.steps=20", resume=True)
    train(recipe, tmp_path / "unbroken", "train.steps=20")
    assert losses(trained) == losses(tmp_path / "unbroken")


def test_resume_with_no_checkpoint_starts_afresh(recipe, tmp_path):
    train(recipe, tmp_path / "run", resume=True)
    assert losses(tmp_path / "run")[-1][0] == 12


def test_resuming_a_finished_run_changes_nothing(recipe, trained):
    before = losses(trained)
    train(recipe, trained, "train.steps=10", resume=True)
    assert losses(trained) == before


def test_a_resumed_run_tells_that_its_metrics_are_gone(recipe, trained):
    (trained / "metrics.jsonl").unlink()
    assert f"{trained / 'metrics.jsonl'}: is missing" in said(recipe, trained, "train.steps=12")[0]
    assert [step for step, _ in losses(trained)] == [12]


def test_resuming_a_run_that_patience_ended_changes_nothing(recipe, tmp_path):
    changes = ["train.steps=500", "train.eval_every=2", "train.lr=1e-9", "train.patience=2"]
    train(recipe, tmp_path / "run", *changes)
    before = losses(tmp_path / "run")
    notice = said(recipe, tmp_path / "run", *changes)[0]
    assert ", ended by train.patience=2; start a new run from its weights" in notice
    assert losses(tmp_path / "run") == before


def test_a_directory_that_holds_a_run_is_refused_without_resume(recipe, trained):
    with pytest.raises(weft.CheckpointError, match="holds a run already; go on with it by --resume"):
        train(recipe, trained)


@pytest.mark.parametrize("override", ["train.lr=0.02", "model.width=18", "task.label_smoothing=0.1", "train.seed=2"])
def test_a_changed_recipe_is_refused_with_the_reason(recipe, trained, override):
    key = override.partition("=")[0]
    with pytest.raises(weft.CheckpointError, match=f"the recipe has changed.*{key} was .* and is .* now"):
        train(recipe, trained, "train.steps=20", override, resume=True)


def test_another_budget_is_refused_where_the_schedule_hangs_on_it(recipe, tmp_path):
    train(recipe, tmp_path / "run", "train.schedule=cosine")
    reason = r"train.steps was 12 and is 24 now \(1 such in all\), and train.schedule=cosine depends on the budget"
    with pytest.raises(weft.CheckpointError, match=rf"{reason}.*; set it back, or start a new run from its weights: "):
        train(recipe, tmp_path / "run", "train.schedule=cosine", "train.steps=24", resume=True)


TRANSFORMER = {"name": "transformer", "width": 16, "heads": 2, "layers": 1, "ffn_width": 16}


def test_the_way_on_from_a_spent_schedule_is_a_run_from_its_weights(recipe, tmp_path):
    recipe["model"], run = TRANSFORMER, tmp_path / "run"
    changes = ["train.warmup=0.1", "train.steps=4"]
    train(recipe, run, *changes)
    way = f"start a new run from its weights: model.weights={run} and another --out"
    with pytest.raises(weft.CheckpointError, match="train.warmup=0.1, a share, depends on the budget") as error:
        train(recipe, run, *changes, "train.steps=8", resume=True)
    assert str(error.value).endswith(way)
    assert said(recipe, run, *changes)[-1].endswith(f"at step 4 (train.steps=4); to train further, {way}")
    weft.train(recipe, [*changes, "train.steps=2", f"model.weights={run}"], tmp_path / "new")  # what both say to do


def said(recipe, folder, *overrides):
    listener = Told()
    train(recipe, folder, *overrides, resume=True, report=listener)
    return listener.notices


@pytest.mark.parametrize("steps", [10, 5])
def test_resuming_with_no_larger_budget_says_that_nothing_was_done(recipe, trained, steps):
    finished = f"--resume: nothing was done: {trained} is finished, at step 10 (train.steps={steps})"
    assert said(recipe, trained, f"train.steps={steps}") == [f"{finished}; give a larger budget to go on"]


def test_resuming_with_a_larger_budget_says_nothing_of_the_kind(recipe, trained):
    assert said(recipe, trained, "train.steps=12") == []


def test_changed_data_is_refused_with_the_reason(recipe, trained, pairs_file):
    lines = pairs_file.read_text().splitlines()
    lines[3] = "abcabc\tcbacba"
    pairs_file.write_text("\n".join(lines) + "\n")
    with pytest.raises(weft.CheckpointError, match="the data has changed"):
        train(recipe, trained, "train.steps=20", resume=True)


def test_changed_validation_data_is_refused_too(recipe, tmp_path, pairs_file):
    valid = tmp_path / "valid.tsv"
    valid.write_text("abc\tcba\nfed\tdef\n")
    recipe["data"]["valid"] = str(valid)
    train(recipe, tmp_path / "run", "train.steps=10")
    valid.write_text("abc\tcba\n")
    with pytest.raises(weft.CheckpointError, match="the data has changed"):
        train(recipe, tmp_path / "run", "train.steps=20", resume=True)


def test_a_damaged_checkpoint_is_refused_and_the_previous_one_offered(recipe, trained, tmp_path):
    weights = trained / "last" / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-5] ^= 1
    weights.write_bytes(damaged)
    with pytest.raises(weft.CheckpointError, match="SHA-256 differs.*with --resume: it continues from step 5"):
        train(recipe, trained, "train.steps=20", resume=True)
    shutil.rmtree((trained / "last").resolve())  # what the message says to do
    train(recipe, trained, "train.steps=20", resume=True)
    train(recipe, tmp_path / "unbroken", "train.steps=20")
    assert losses(trained) == losses(tmp_path / "unbroken")


def test_the_metrics_are_cut_back_to_the_checkpoint(recipe, trained, tmp_path):
    with (trained / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss": 9.9}\n{"step": 12, "lo')  # what a kill can leave
    train(recipe, trained, "train.steps=20", resume=True)
    train(recipe, tmp_path / "unbroken", "train.steps=20")
    assert losses(trained) == losses(tmp_path / "unbroken")


class EncoderOnly(Model):
    Config = Named

    @classmethod
    def roles(cls, config):
        return frozenset({Role.ENCODER})


def test_roles_are_checked_before_data_is_read(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_models", sys.modules[__name__])
    recipe["data"] = {"train": "nowhere.tsv"}
    recipe["model"] = {"name": "own_models:EncoderOnly"}
    with pytest.raises(weft.RoleError, match="'translate' needs a model that takes a source and generates; .* encodes"):
        train(recipe, tmp_path / "run")
    recipe["model"] = {"name": "seq2seq"}
    with pytest.raises(weft.DataError, match="nowhere"):
        train(recipe, tmp_path / "run")


def test_what_is_skipped_is_reported(recipe, tmp_path, pairs_file):
    with pairs_file.open("a") as file:
        file.write("one column\n")
    with pytest.raises(weft.DataError, match=r"pairs.tsv:\d+: "):
        train(recipe, tmp_path / "refused")
    notices = []
    run = Run.parse(read_recipe(recipe, ["data.on_bad_rows=skip"]))

    class Hear:
        def __call__(self, record):
            notices.append(str(record))

        def close(self):
            pass

    train_run(run, tmp_path / "run", report=Hear())
    assert any("data.train: skipped 1 row" in notice for notice in notices)


def test_resuming_runs_no_class_that_a_checkpoint_names(recipe, trained, tmp_path, monkeypatch):
    """A doctored recipe, its manifest made to fit, is compared as text: the module that it names is not imported."""
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    doctored = trained / "last" / "run.yaml"
    doctored.write_text(doctored.read_text().replace("name: seq2seq", "name: evil:Evil"))
    manifest = trained / "last" / "manifest.json"
    raw = json.loads(manifest.read_text())
    raw["files"]["run.yaml"] = {
        "sha256": hashlib.sha256(doctored.read_bytes()).hexdigest(),
        "bytes": doctored.stat().st_size,
    }
    manifest.write_text(json.dumps(raw))
    with pytest.raises(weft.CheckpointError, match=r"model.name was 'evil:Evil' and is 'seq2seq' now"):
        train(recipe, trained, "train.steps=20", resume=True)


def test_the_runs_own_recipe_follows_a_larger_budget(recipe, trained):
    train(recipe, trained, "train.steps=20", resume=True)
    assert "steps: 20" in (trained / "run.yaml").read_text()


LEARNED = "model={name: transformer, width: 8, heads: 2, layers: 1, ffn_width: 8, positions: learned}"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (["model.max_positions=3"], weft.DataError, "data.train: a sequence has .* the model learns 3 positions"),
        (["task.decode.max_length=31"], weft.ConfigError, "task.decode.max_length: 31 tokens .* learns 30 positions"),
    ],
)
def test_what_learned_positions_cannot_hold_is_refused_before_the_first_step(recipe, tmp_path, changes, error, message):
    fits = [LEARNED, "model.max_positions=30", "task.decode.max_length=3", "train.steps=1"]
    with pytest.raises(error, match=message):
        train(recipe, tmp_path / "run", *fits, *changes)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    train(recipe, tmp_path / "run", *fits)
    cut = ["model.max_positions=4", "data.max_length=3", "data.truncation=cut"]  # as the message says
    train(recipe, tmp_path / "cut", *fits, *cut)
