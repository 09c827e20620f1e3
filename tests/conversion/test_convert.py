"""`weft convert`: to and from the Hugging Face format with a parity report, and other formats by file suffix."""

import gzip
import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file
from tests import bert_folders, hf_folders
from typer.testing import CliRunner

import weft
from weft.cli.main import app
from weft.conversion import convert as conversion
from weft.conversion import parity
from weft.conversion.convert import ConversionReport, convert
from weft.conversion.parity import ParityCheck
from weft.errors import CheckpointError, WeftError

WHAT = {"tokens", "hidden states", "logits", "greedy text"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("converting") / "hf"
    hf_folders.gpt2(path)
    return path


def kinds(report):
    return {(check.quantity.partition(",")[0], check.against) for check in report.checks}


def test_there_and_back_with_a_report(folder, tmp_path):
    report = convert(folder, tmp_path / "weft")
    again = "what was written, read again"
    assert kinds(report) == {(what, against) for what in WHAT for against in (again, "transformers")}
    assert all(check.matches for check in report.checks)
    assert max(check.difference for check in report.checks) < 1e-5
    assert min(check.count for check in report.checks) > 20
    pipeline = weft.load(tmp_path / "weft", device="cpu")
    (answer,) = pipeline("The lambda", {"max_length": 8})
    assert answer == weft.load(folder, device="cpu")("The lambda", {"max_length": 8})[0]
    back = convert(tmp_path / "weft", tmp_path / "hf")
    assert kinds(back) == kinds(report)
    back.demand()
    mine, theirs = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "hf"))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert len(mine) == len(theirs)


HEADS = {
    ("bert", "ForPreTraining"): {"logits", "next sentence"},
    ("roberta", "ForSequenceClassification"): {"logits"},
    ("distilbert", "ForTokenClassification"): {"logits"},
    ("electra", "ForMultipleChoice"): {"logits"},
    ("electra", "ForPreTraining"): {"logits"},
    ("bert", "ForQuestionAnswering"): {"logits"},
    ("bert", "Model"): {"pooled output"},
    ("distilbert", "Model"): set(),
}


@pytest.mark.parametrize(("family", "head"), HEADS)
def test_every_head_is_compared(tmp_path, family, head):
    bert_folders.make(tmp_path / "hf", family, head)
    there = convert(tmp_path / "hf", tmp_path / "weft")
    back = convert(tmp_path / "weft", tmp_path / "back")
    wanted = {"tokens", "hidden states", *HEADS[family, head]}
    for report in (there, back):
        assert kinds(report) == {
            (what, against) for what in wanted for against in (parity.ROUND_TRIP, parity.TRANSFORMERS)
        }
        assert max(check.difference for check in report.checks) < 1e-5
        report.demand()


@pytest.mark.parametrize(
    ("head", "place", "quantity"),
    [
        ("ForSequenceClassification", "output.bias", "logits"),
        ("ForQuestionAnswering", "output.weight", "logits"),
        ("ForPreTraining", "next.bias", "next sentence"),
        ("ForMaskedLM", "body.output.bias", "logits"),
        ("Model", "body.pooler.bias", "pooled output"),
        ("Model", "body.segments.weight", "hidden states, most in layer"),
    ],
)
def test_a_head_that_has_changed_on_the_way_is_told(tmp_path, monkeypatch, head, place, quantity):
    """The negative control, for each head; segments are read by pairs alone."""
    bert_folders.make(tmp_path / "hf", "bert", head)
    weft.load(tmp_path / "hf", device="cpu").save(tmp_path / "weft")
    written = conversion.save_hf

    def save(path, run, tokenizer, head):
        weight = head.get_parameter(place)
        was = weight.detach().clone()
        with torch.no_grad():
            weight.view(-1)[-1] += 0.5
            written(path, run, tokenizer, head)
            weight.copy_(was)

    monkeypatch.setattr(conversion, "save_hf", save)
    wrong = [check.quantity for check in convert(tmp_path / "weft", tmp_path / "back").checks if not check.matches]
    assert any(what.startswith(quantity) for what in wrong)
    assert "tokens" not in wrong


def test_windows_shorter_than_the_model_reads_are_no_difference(folder, tmp_path):
    weft.load(folder, device="cpu", overrides=["data.max_length=30"]).save(tmp_path / "short")
    report = convert(tmp_path / "short", tmp_path / "hf")
    report.demand()
    assert kinds(report) == kinds(convert(folder, tmp_path / "weft"))


def test_the_command_prints_the_report(folder, tmp_path):
    result = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "weft")])
    assert result.exit_code == 0, result.output
    assert "largest difference" in result.output
    assert [f"hidden states, layer {layer}" in result.output for layer in range(4)] == [True] * 3 + [False]
    assert result.output.count("transformers") >= 3 + 3
    assert "largest difference: " in result.output
    assert str(tmp_path / "weft") in result.output


def test_without_transformers_it_is_read_again_alone(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "find_spec", lambda name: None)
    report = convert(folder, tmp_path / "weft")
    assert {check.against for check in report.checks} == {"what was written, read again"}


def test_what_has_changed_on_the_way_is_told(folder, tmp_path, monkeypatch):
    """The negative control: a layer's norm is written wrongly."""
    given = weft.load(folder, device="cpu")

    def save(path, run, tokenizer, head):
        with torch.no_grad():
            head.body.decoder.blocks[1].feed_forward_residual.norm.bias += 0.01
        written(path, run, tokenizer, head)
        with torch.no_grad():
            head.body.decoder.blocks[1].feed_forward_residual.norm.bias -= 0.01

    written = conversion.save_hf
    monkeypatch.setattr(conversion, "save_hf", save)
    given.save(tmp_path / "weft")
    report = convert(tmp_path / "weft", tmp_path / "hf")
    wrong = {check.quantity: check for check in report.checks if not check.matches}
    assert any(what.startswith("hidden states, most in layer 2") for what in wrong)
    assert "tokens" not in wrong
    with pytest.raises(CheckpointError, match=r"hf: hidden states.* differ by .* it is left there to be looked at"):
        report.demand()


def test_every_layer_has_its_row_and_the_largest_difference_is_named(tmp_path):
    states = torch.zeros(3, 2, 4)
    other = states.clone()
    other[1, 0, 2] = 0.25
    report = ConversionReport(
        tmp_path, [parity.compare("hidden states", list(states), list(other), "y"), ParityCheck("z", "y", 1e-5, 1)]
    )
    rows = report.table()[1]
    assert [row[0] for row in rows] == [*(f"hidden states, layer {layer}" for layer in range(3)), "z"]
    assert [row[3] for row in rows] == ["0.0e+00", "2.5e-01", "0.0e+00", "1.0e-05"]
    assert {row[2] for row in rows[:3]} == {"8"}
    assert report.largest() == "largest difference: 2.5e-01, in hidden states, most in layer 1, with y"


def test_a_difference_is_the_largest_and_no_number_is_none(tmp_path):
    ones, other = torch.ones(3), torch.tensor([1.0, 1.5, float("nan")])
    assert parity._difference(ones, ones) == 0
    assert parity._difference(ones, other[:2].new_tensor([1, 1.5, 1])) == 0.5
    assert parity._difference(ones, other) == float("inf") or parity._difference(ones, other) > 1e30
    assert parity.compare("x", [ones], [ones[:2]], "y").difference == float("inf")
    assert parity._difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == 1
    assert not ParityCheck("x", "y", 2e-4, 1).matches
    assert ParityCheck("x", "y", 2e-4, 1, 3000.0).matches
    assert not ParityCheck("x", "y", 2e-1, 1, 3000.0).matches
    ConversionReport(tmp_path, [ParityCheck("x", "y", 1e-5, 1)]).demand()


def test_what_is_allowed_grows_with_the_hidden_states():
    """Logits inherit the rounding of hidden states, which are larger than they are: writer-en's, of up to 141."""
    outputs = {"hidden states": [torch.full((3,), 200.0)], "logits": [torch.ones(3)]}
    for difference, matches in ((1e-3, True), (1e-2, False)):
        _, check = parity._compare_outputs(outputs, {**outputs, "logits": [torch.ones(3) + difference]}, "x")
        assert (check.quantity, check.matches) == ("logits", matches)


def test_a_model_that_has_no_counterpart_is_refused(trained_run, tmp_path):
    with pytest.raises(
        CheckpointError, match="'seq2seq', as configured, has no counterpart in the Hugging Face format"
    ):
        convert(trained_run, tmp_path / "hf")
    with pytest.raises(CheckpointError, match="nowhere: does not exist"):
        convert(tmp_path / "nowhere", tmp_path / "hf")
    assert not any(tmp_path.iterdir())


ARPA = """
\\data\\
ngram 1=5
ngram 2=3

\\1-grams:
-99 <s> -0.3
-1.0 </s>
-1.2 <unk>
-0.5 a -0.2
-0.7 b -0.1

\\2-grams:
-0.2 <s> a
-0.3 a b
-0.4 b </s>

\\end\\
"""


@pytest.mark.parametrize("ending", ["arpa", "arpa.gz"])
def test_arpa_goes_by_its_ending(tmp_path, ending):
    given = tmp_path / f"it.{ending}"
    with (gzip.open if ending.endswith("gz") else open)(given, "wt", encoding="utf-8") as file:
        file.write(ARPA)
    assert convert(given, tmp_path / "weft").checks == ()
    assert weft.load(tmp_path / "weft", device="cpu").run.model.name == "ngram"
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "weft"), str(tmp_path / "back.arpa")])
    assert result.exit_code == 0, result.output
    assert "ngram 2=3" in (tmp_path / "back.arpa").read_text(encoding="utf-8")


def test_a_folder_with_hdf5_is_an_elmo(tmp_path):
    (tmp_path / "elmo").mkdir()
    (tmp_path / "elmo" / "weights.hdf5").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"must hold one ELMo.* but has weights.hdf5"):
        convert(tmp_path / "elmo", tmp_path / "weft")
    (tmp_path / "elmo" / "options.json").write_text(json.dumps({}))
    with pytest.raises(WeftError, match="options.json"):
        convert(tmp_path / "elmo", tmp_path / "weft")


def test_transformers_is_here_to_be_compared_with():
    """Otherwise the tests above would not have compared with it."""
    assert importlib.util.find_spec("transformers")
