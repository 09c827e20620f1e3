"""From the command line and in Python: train, predict, evaluate and resume where answers are labels."""

import json
import sys
from pathlib import Path

import pytest

import weft
from weft.cli import main as cli
from weft.config.recipes import read_recipe, recipe_names
from weft.config.run import Run
from weft.config.yaml import read_yaml
from weft.data.samples import datasets as samples
from weft.errors import CheckpointError
from weft.tasks.factory import make_task

ROWS = {"train": 400, "valid": 40, "test": 40}
SHORT = ["train.steps=12", "train.eval_every=6", "model.width=24", "model.embedding=12"]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Let a sample have its first rows only."""
    whole = samples._cached_rows

    def first(name):
        room, kept = dict(ROWS), []
        for split, row in whole(name):
            room[split] -= 1
            if room[split] >= 0:
                kept.append((split, row))
        return kept

    monkeypatch.setattr(samples, "_cached_rows", first)


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        done = capsys.readouterr()
        assert not end.value.code, done.err
        return done.out

    return run


@pytest.mark.parametrize("name", ["langid-cnn", "langid"])
def test_a_classifier_from_its_recipe_to_its_answers(command, name):
    assert "accuracy" in command("train", name, *SHORT)
    run = f"runs/{name}"
    labels = read_yaml(Path(f"{run}/best/run.yaml").read_text(), "run.yaml")["task"]["labels"]
    assert labels == sorted(samples.LANGUAGES)
    plain = command("predict", run, "Donnerstag", "jeudi").splitlines()
    answers = [json.loads(line) for line in command("predict", run, "Donnerstag", "jeudi", "--json").splitlines()]
    assert plain == [answer["label"] for answer in answers]
    assert all(set(answer["scores"]) == set(labels) for answer in answers)
    shown = command("evaluate", run)
    assert "macro_f1" in shown
    assert "confusion matrix" in shown
    assert all(label in shown for label in labels)
    told = json.loads(command("evaluate", run, "langid:valid", "--json"))
    assert told["confusion"]["labels"] == labels
    assert sum(map(sum, told["confusion"]["counts"])) == ROWS["valid"]
    pipeline = weft.load(run)
    found = pipeline.evaluate_in_detail("langid:valid")
    assert told.pop("confusion") == found.confusion.to_dict()
    assert told.pop("report") == found.report.to_dict()
    assert told == pytest.approx(found.metrics)
    assert pipeline.evaluate("langid:valid") == found.metrics
    assert pipeline(["Donnerstag", {"text": "jeudi"}]) == answers


def test_a_tagger_from_its_recipe_to_its_answers(command):
    assert "f1" in command("train", "dateparts", *SHORT, "task.crf=true")
    line = command("predict", "runs/dateparts", "Thursday, January 12")
    answer = json.loads(command("predict", "runs/dateparts", "Thursday, January 12", "--json"))
    assert answer["words"] == ["Thursday", ",", "January", "12"]
    assert line.split() == [f"{word}/{tag}" for word, tag in zip(answer["words"], answer["tags"], strict=True)]
    assert len(answer["scores"]) == 4
    told = json.loads(command("evaluate", "runs/dateparts", "--json"))
    assert {"loss", "f1", "precision", "recall", "accuracy", "report", "confusion"} == set(told)


def test_many_labels_are_shown_by_their_confusions(command, tmp_path):
    (tmp_path / "many.tsv").write_text("".join(f"w{number}\tlabel{number}\n" for number in range(31)))
    recipe = {
        "task": {"name": "classify"},
        "data": {"train": "many.tsv", "valid": "many.tsv"},
        "tokenizer": {"name": "words"},
        "model": {"name": "cnn", "width": 3},
        "train": {"steps": 1},
    }
    weft.train(recipe, out="run")
    shown = command("evaluate", "run")
    assert "most confused pairs, 30 of 30" in shown
    assert "is \\ said" not in shown
    assert len(json.loads(command("evaluate", "run", "--json"))["confusion"]["counts"]) == 31


def test_a_run_resumes_to_the_same_end(tmp_path):
    recipe = read_recipe("langid-cnn", [*SHORT, "task.weights=balanced", "train.schedule=constant"])
    whole = weft.train(recipe, out=tmp_path / "whole")
    weft.train(recipe, ["train.steps=6"], out=tmp_path / "parts")
    parts = weft.train(recipe, out=tmp_path / "parts", resume=True)
    assert parts.run == whole.run
    assert parts.run.task.labels == tuple(sorted(samples.LANGUAGES))
    assert parts.run.task.weights.keys() == set(samples.LANGUAGES)
    for mine, yours in zip(parts.head.parameters(), whole.head.parameters(), strict=True):
        assert mine.equal(yours)


def test_labels_that_have_changed_are_seen_on_resuming(tmp_path):
    path, out = tmp_path / "rows.tsv", tmp_path / "run"
    path.write_text("red\ta\nblue\tb\n")
    recipe = {
        "task": {"name": "classify"},
        "data": {"train": str(path)},
        "tokenizer": {"name": "words"},
        "model": {"name": "cnn", "width": 3},
        "train": {"steps": 2},
    }
    weft.train(recipe, out=out)
    path.write_text("red\ta\nblue\tc\n")
    with pytest.raises(CheckpointError, match=r"task.labels was \['a', 'b'\] and is \['a', 'c'\] now"):
        weft.train(recipe, ["train.steps=3"], out=out, resume=True)


@pytest.mark.parametrize("name", [name for name in recipe_names() if not name.startswith("compare-")])
def test_every_recipe_that_ships_is_whole(name):
    recipe = read_recipe(name)
    preset = "gpt" if recipe.get("task", {}).get("name") in ("lm", "complete") else "bert-tiny"
    alone = [
        f"model={{preset: {preset}, max_positions: 1024}}",
        "tokenizer={name: wordpiece}",
    ]  # in place of weights that are not there
    run = Run.parse(read_recipe(name, alone if "weights" in recipe["model"] else []))
    assert make_task(run).config.name == run.task.name


def test_models_can_be_compared_on_labels(tmp_path):
    changes = ["model.width=24", "train.eval_every=null"]
    result = weft.compare(["langid-cnn", "langid"], "3", tmp_path / "out", changes, baselines=False)
    headers, rows = result.table()
    assert headers[:3] == ["entry", "model", "accuracy ↑"]
    assert {row[0] for row in rows} == {"langid-cnn", "langid"}
    assert {name for example in result.results.examples for name in example.answers} == {"langid-cnn", "langid"}
