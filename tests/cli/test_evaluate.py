"""`weft evaluate`: metrics, reports and wrong answers."""

import json

import pytest
from tests.cli.conftest import good, refused
from tests.conftest import recipe_for

import weft
from weft.cli.evaluate import write_errors
from weft.errors import ConfigError


def test_evaluate(run, trained_run, tmp_path):
    table = good(run("evaluate", trained_run))
    assert "exact_match   1.0000" in table.out
    done = good(run("evaluate", trained_run, "--json"))
    assert set(json.loads(done.out)) == {"loss", "exact_match", "bleu"}
    assert (len(done.lines), done.err) == (1, "evaluated on the validation data: the recipe has no data.test\n")
    (tmp_path / "one.tsv").write_text("abc\tabc\n")
    done = good(run("evaluate", trained_run / "best", tmp_path / "one.tsv", "--json"))
    assert json.loads(done.out)["loss"] > 1
    assert done.err == ""
    refused(run("evaluate", trained_run, tmp_path / "gone.tsv"), "gone.tsv: there is no such file")
    refused(run("evaluate", trained_run, "langid"), "a row of langid has text, label")
    refused(run("evaluate", trained_run, "--device", "gpu"), "'gpu' cannot be used here")


@pytest.fixture(scope="module")
def labelled_run(tmp_path_factory):
    """Return the directory of a classifier of two labels that is wrong twice: equal texts have other labels."""
    folder = tmp_path_factory.mktemp("labelled")
    rows = [("a b", "no")] * 3 + [("c d", "yes")] * 4 + [("a b", "yes"), ("c d", "no")]
    (folder / "rows.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    recipe = recipe_for(folder / "rows.tsv") | {
        "task": {"name": "classify"},
        "tokenizer": {"name": "words"},
        "model": {"name": "rnn", "width": 8},
    }
    recipe["data"] = {"train": str(folder / "rows.tsv"), "valid": str(folder / "rows.tsv")}
    weft.train(recipe, ["train.steps=60", "train.lr=0.05"], folder / "run")
    return folder / "run"


def test_evaluate_reports_on_each_label(run, labelled_run):
    done = good(run("evaluate", labelled_run, "--report"))
    cells = [line.split() for line in done.lines if line.strip()]
    assert "classification report, by label" in done.out
    assert ["label", "precision", "recall", "f1", "support"] in cells
    assert ["no", "0.7500", "0.7500", "0.7500", "4"] in cells
    assert ["yes", "0.8000", "0.8000", "0.8000", "5"] in cells
    assert ["macro", "avg", "0.7750", "0.7750", "0.7750", "9"] in cells
    assert ["f1", "(yes)", "0.8000"] in cells, "a binary F1 says which label it is of"
    assert "classification report" not in good(run("evaluate", labelled_run)).out
    told = json.loads(good(run("evaluate", labelled_run, "--json")).out)
    assert told["report"]["classes"]["yes"]["f1"] == told["f1"] == pytest.approx(0.8)
    assert told["positive_label"] == "yes"


def test_evaluate_writes_the_wrong_answers_the_most_confident_first(run, labelled_run, tmp_path):
    path = tmp_path / "errors.jsonl"
    done = good(run("evaluate", labelled_run, "--errors", path, "--json"))
    assert f"{path}: 2 wrong answers" in done.err
    errors = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(error["text"], error["gold"], error["predicted"]) for error in errors} == {
        ("a b", "yes", "no"),
        ("c d", "no", "yes"),
    }
    assert 1 > errors[0]["score"] >= errors[1]["score"] > 0.5
    assert set(errors[0]) == {"text", "gold", "predicted", "score"}
    answer = json.loads(good(run("predict", labelled_run, errors[0]["text"], "--json")).out)
    assert (answer["label"], answer["scores"][answer["label"]]) == (errors[0]["predicted"], errors[0]["score"])


def test_a_report_or_errors_that_cannot_be_are_refused_before_the_work(run, trained_run, labelled_run, tmp_path):
    refused(run("evaluate", labelled_run, "--errors", tmp_path / "errors.csv"), "--errors: must end in .jsonl, but is")
    refused(run("evaluate", labelled_run, "--errors", tmp_path / "no" / "x.jsonl"), "--errors: must be a file in a")
    (tmp_path / "folder.jsonl").mkdir()
    refused(run("evaluate", labelled_run, "--errors", tmp_path / "folder.jsonl"), "--errors: must be a file in a")
    refused(run("evaluate", trained_run, "--blimp", tmp_path, "--report"), "--blimp: compares pairs of sentences, and")
    refused(run("evaluate", trained_run, "--blimp", tmp_path, "--errors", "x.jsonl"), "--errors is of answers")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.jsonl"]


def test_a_report_on_answers_that_are_no_labels_is_by_the_length_of_the_input(run, trained_run, labelled_run):
    assert "by the length of the input" in good(run("evaluate", trained_run, "--report")).out
    groups = json.loads(good(run("evaluate", trained_run, "--report", "--json")).out)["by_length"]["groups"]
    assert groups[0]["shortest"] <= groups[-1]["longest"]
    assert "by_length" not in json.loads(good(run("evaluate", trained_run, "--json")).out)
    assert "length" not in good(run("evaluate", labelled_run, "--report")).out


def test_labels_that_look_like_markup_are_shown_as_they_are(run, recipe, tmp_path):
    rows = tmp_path / "rows.tsv"
    rows.write_text("ab\t[/b]\ncd\t[red]\n")
    recipe |= {"task": {"name": "classify"}, "model": {"name": "rnn", "width": 4}}
    recipe["data"] = {"train": str(rows), "valid": str(rows)}
    weft.train(recipe, ["train.steps=1"], tmp_path / "run")
    done = good(run("evaluate", tmp_path / "run"))
    (header,) = [line.split() for line in done.lines if "predicted" in line]
    assert header == ["true", "\\", "predicted", "[/b]", "[red]"]
    refused(run("evaluate", tmp_path / "run", "langid"), "langid:test:1: the label ", " is not in task.labels")
    refused(
        run("predict", tmp_path / "run", "a", "--set", "threshold=0.3"), "options.threshold: the task 'classify', as"
    )


def test_errors_that_cannot_be_written_say_so(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="--errors: .*taken cannot be written: Is a directory; name another file"):
        write_errors(tmp_path / "taken", [])
    write_errors(tmp_path / "errors.jsonl", [{"text": "ü"}, {}])
    assert (tmp_path / "errors.jsonl").read_text(encoding="utf-8") == '{"text": "ü"}\n{}\n'
