"""A Transformer from recipe to answer: trained, resumed, loaded in fewer bits and with fewer heads."""

import json
import sys

import pytest
from tests.conftest import recipe_for, write_pairs

import weft
from weft.cli import main as cli

MODEL = {"name": "transformer", "width": 32, "heads": 4, "layers": 2, "ffn_width": 64, "dropout": 0.0, "norm": "pre"}
TRAIN = ["train.steps=250", "train.report_every=50", "train.lr=5e-3", "task.label_smoothing=0.1", "train.save_every=50"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformer")
    recipe = recipe_for(write_pairs(folder / "pairs.tsv"))
    weft.train({**recipe, "model": MODEL}, [*TRAIN, "train.average=3"], folder / "run")
    return folder / "run"


@pytest.fixture
def command(monkeypatch, capsys):
    def ask(*arguments):
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return ask


def test_it_learns_and_reports_what_it_uses(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"] / 2
    assert all(0 < row["mfu"] < 1.5 for row in rows)
    assert (run / "best").resolve().name.startswith("average")


def test_fewer_bits_give_nearly_the_same_scores(run, command):
    found = {}
    for precision in ("fp32", "bf16", "int8"):
        code, out, _ = command("evaluate", run, "--json", "--device", "cpu", "--precision", precision)
        assert code == 0
        found[precision] = json.loads(out)
    for precision in ("bf16", "int8"):
        assert found[precision]["loss"] == pytest.approx(found["fp32"]["loss"], rel=0.05, abs=0.05)
        assert found[precision]["loss"] != found["fp32"]["loss"]


def test_what_cannot_be_is_refused(run, trained_run, command, tmp_path):
    code, _, err = command("predict", trained_run, "abcde", "--precision", "int8")
    assert (code, err) == (
        2,
        "error: precision: the model 'seq2seq' answers in fp32 alone, but 'int8' is asked for\n",
    )
    code, _, err = command("predict", run, "abcde", "--precision", "int4")
    assert code == 2
    assert err == "error: precision: must be fp32, bf16 or int8, but is 'int4' instead\n"
    with pytest.raises(weft.ConfigError, match="a checkpoint holds fp32, but this is int8"):
        weft.load(run, device="cpu", precision="int8").save(tmp_path / "saved")


def test_heads_are_left_out_as_a_checkpoint_is_loaded(run, command):
    whole = weft.load(run, device="cpu")
    pruned = weft.load(run, device="cpu", overrides=["model.pruned_heads={1: [0, 3], cross.0: [2]}"])
    size = 32 * 8
    assert whole.parameters - pruned.parameters == (2 * 3 + 1) * (4 * size + 3 * 8)
    assert pruned("abcde")[0]["text"] is not None
    code, out, _ = command(
        "evaluate", run, "--json", "--device", "cpu", "--set", "model.pruned_heads={cross.0: [0, 1, 2]}"
    )
    assert code == 0
    assert json.loads(out)["loss"] > whole.evaluate()["loss"]
    code, _, err = command("evaluate", run, "--set", "model.pruned_heads={7: [0]}")
    assert code == 2
    assert "model.pruned_heads names layers, 0 to 1" in err


def test_a_look_has_every_layer_and_head(run):
    found = weft.load(run, device="cpu").attention("abcde")
    heads = {(view.place, view.layer): list(view.heads) for view in found.views}
    assert heads == {(place, layer): [0, 1, 2, 3] for place in ("encoder", "decoder", "cross") for layer in (0, 1)}
