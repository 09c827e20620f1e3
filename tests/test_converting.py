"""`weft convert`: to and from the Hugging Face format with a report, and other libraries' files by their endings."""

import gzip
import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import weft
from tests import hf_folders
from weft import converting
from weft.cli import app
from weft.converting import Check, Report, convert
from weft.errors import CheckpointError, WeftError

WHAT = {"tokens", "hidden states", "logits", "greedy text"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("converting") / "hf"
    hf_folders.gpt2(made)
    return made


def kinds(report):
    return {(check.what.partition(",")[0], check.against) for check in report.checks}


def test_there_and_back_with_a_report(folder, tmp_path):
    report = convert(folder, tmp_path / "weft")
    again = "what was written, read again"
    assert kinds(report) == {(what, against) for what in WHAT for against in (again, "transformers")}
    assert all(check.same for check in report.checks)
    assert max(check.apart for check in report.checks) < 1e-5
    assert min(check.count for check in report.checks) > 20
    pipeline = weft.load(tmp_path / "weft", device="cpu")
    (answer,) = pipeline("The lambda", {"max_length": 8})
    assert answer == weft.load(folder, device="cpu")("The lambda", {"max_length": 8})[0]
    back = convert(tmp_path / "weft", tmp_path / "hf")
    assert kinds(back) == kinds(report)
    back.demand()
    mine, theirs = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "hf"))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert len(mine) == len(theirs)


def test_windows_shorter_than_the_model_reads_are_no_difference(folder, tmp_path):
    weft.load(folder, device="cpu", overrides=["data.longest=30"]).save(tmp_path / "short")
    report = convert(tmp_path / "short", tmp_path / "hf")
    report.demand()
    assert kinds(report) == kinds(convert(folder, tmp_path / "weft"))


def test_the_command_prints_the_report(folder, tmp_path):
    told = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "weft")])
    assert told.exit_code == 0, told.output
    assert "largest difference" in told.output
    assert told.output.count("transformers") == 4
    assert str(tmp_path / "weft") in told.output


def test_without_transformers_it_is_read_again_alone(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(converting, "find_spec", lambda name: None)
    report = convert(folder, tmp_path / "weft")
    assert {check.against for check in report.checks} == {"what was written, read again"}


def test_what_has_changed_on_the_way_is_told(folder, tmp_path, monkeypatch):
    """The negative control: a layer's norm is written wrongly."""
    given = weft.load(folder, device="cpu")

    def save(path, run, tokenizer, head):
        with torch.no_grad():
            head.body.decoder.blocks[1].around_feed.norm.bias += 0.01
        written(path, run, tokenizer, head)
        with torch.no_grad():
            head.body.decoder.blocks[1].around_feed.norm.bias -= 0.01

    written = converting.save_hf
    monkeypatch.setattr(converting, "save_hf", save)
    given.save(tmp_path / "weft")
    report = convert(tmp_path / "weft", tmp_path / "hf")
    wrong = {check.what: check for check in report.checks if not check.same}
    assert any(what.startswith("hidden states, most in layer 2") for what in wrong)
    assert "tokens" not in wrong
    with pytest.raises(CheckpointError, match=r"hf: hidden states.* differ by .* it is left there to be looked at"):
        report.demand()


def test_a_difference_is_the_largest_and_no_number_is_none(tmp_path):
    ones, other = torch.ones(3), torch.tensor([1.0, 1.5, float("nan")])
    assert converting._apart(ones, ones) == 0
    assert converting._apart(ones, other[:2].new_tensor([1, 1.5, 1])) == 0.5
    assert converting._apart(ones, other) == float("inf") or converting._apart(ones, other) > 1e30
    assert converting._check("x", [ones], [ones[:2]], "y").apart == float("inf")
    assert converting._apart(torch.tensor([1, 2]), torch.tensor([1, 3])) == 1
    assert not Check("x", "y", 2e-4, 1).same
    assert Check("x", "y", 2e-4, 1, 3000.0).same
    assert not Check("x", "y", 2e-1, 1, 3000.0).same
    Report(tmp_path, [Check("x", "y", 1e-5, 1)]).demand()


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
    told = CliRunner().invoke(app, ["convert", str(tmp_path / "weft"), str(tmp_path / "back.arpa")])
    assert told.exit_code == 0, told.output
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
    """Else the tests above would not have asked it."""
    assert importlib.util.find_spec("transformers")
