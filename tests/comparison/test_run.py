"""Several recipes at one budget: one table, one page."""

import json
import re

import pytest
from tests.conftest import recipe_for, write_pairs

import weft
from weft.comparison.run import _check_same_task, compare
from weft.config.schema import Run, read_recipe
from weft.formats.pretrained import read_run
from weft.training.reporting import Step, read_metrics


def write(folder, name, recipe, **sections):
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({**recipe, **sections}))
    return path


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Compare two models once, for all that only look at the result."""
    folder = tmp_path_factory.mktemp("compared")
    recipe = recipe_for(write_pairs(folder / "pairs.tsv"))
    plain = write(folder, "fixed", recipe, model={"name": "seq2seq", "width": 16, "attention": "none"})
    heard = {}

    class Hear:
        def __init__(self, name):
            self.records = heard.setdefault(name, [])

        def __call__(self, record):
            self.records.append(record)

        def close(self):
            pass

    columns = "data.columns={text: 0, target: 1}"  # what is no key of a set must do too
    comparison = compare([plain, write(folder, "attends", recipe)], "8", folder / "out", [columns], Hear)
    return comparison, folder / "out", heard


def test_the_table_has_quality_size_time_and_speed(compared):
    comparison, out, _ = compared
    headers, rows = comparison.table()
    assert headers == ["model", "exact match", "bleu", "parameters", "time", "steps", "tokens/s"]
    assert [row[0] for row in rows] == ["fixed", "attends"]
    for row, contender in zip(rows, comparison.contenders, strict=True):
        cells = dict(zip(headers, row, strict=True))
        assert re.fullmatch(r"\d+\.\d%", cells["exact match"])
        assert re.fullmatch(r"\d+\.\d", cells["bleu"])
        assert cells["parameters"] == f"{weft.load(out / contender.name).parameters:,}"
        assert re.fullmatch(r"\d+ s", cells["time"])
        assert cells["steps"] == "8"
        assert float(cells["tokens/s"].replace(",", "")) > 0


def test_each_is_a_run_of_its_own_and_is_reported(compared):
    comparison, out, heard = compared
    for contender in comparison.contenders:
        assert contender.metrics == pytest.approx(weft.load(out / contender.name).evaluate())
        rows = read_metrics(out / contender.name / "metrics.jsonl")
        assert contender.rows == rows
        assert [record.step for record in heard[contender.name] if isinstance(record, Step)] == [2, 4, 6, 8]
    assert comparison.contenders[0].pipeline.run.train.steps == 8


def test_answers_to_the_same_unseen_examples_stand_side_by_side(compared):
    comparison, _, _ = compared
    headers, rows = comparison.answers()
    assert headers == ["text", "should be", "fixed", "attends"]
    assert len(rows) == 4
    for row in rows:
        assert row[1] == row[0][::-1]
    texts = [row[0] for row in rows]
    for column, contender in enumerate(comparison.contenders, 2):
        assert [row[column] for row in rows] == [answer["text"] for answer in contender.pipeline(texts)]


def loads(page):
    """Find what a browser would fetch: addresses in attributes, styles and scripts."""
    attributes = r"""<[a-z][^>]*\s(?:src|srcset|href|action|data|poster)\s*=\s*["']?(?!\#)"""
    return re.findall(rf"{attributes}|url\(|@import|https?://(?!www\.w3\.org/)", page)


def test_the_page_needs_no_network_and_has_all(compared):
    comparison, out, _ = compared
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page == comparison.page()
    assert loads(page) == []
    assert "each trained for 8 steps on the same data" in page
    for part in ("fixed", "attends", "Result", "Learning curves", "Training loss", "Alignment", "exact match"):
        assert part in page
    assert "attends: cross, layer 0" in page
    assert "fixed: cross" not in page, "a fixed vector has no alignment"


@pytest.mark.parametrize("tag", ['<script src="x.js">', "<style>@import 'x'</style>", "fetch('https://example.org')"])
def test_a_page_that_loads_would_be_caught(tag):
    assert loads(tag)


def test_recipes_must_have_the_same_task_and_data(recipe, tmp_path):
    first = write(tmp_path, "a", recipe)
    for name, changed, said in (
        ("task", {"task": {"name": "translate", "label_smoothing": 0.1}}, "task.label_smoothing is 0.0 in a and 0.1"),
        ("data", {"data": {**recipe["data"], "max_length": 77}}, "data.max_length is 1024 in a and 77 in data; set it"),
        (
            "other",
            {"task": {"name": "lm"}, "model": {"name": "rnn"}},
            "task.name is 'translate' in a and 'lm' in other;",
        ),
        (
            "both",
            {"data": {**recipe["data"], "max_length": 77, "truncation": "cut"}},
            "max_length is 1024 in a and 77 in both .data.truncation differ as well.",
        ),
    ):
        with pytest.raises(weft.ConfigError, match=f"must have the same task and data, .*but .*{said}"):
            compare([first, write(tmp_path, name, recipe, **changed)], "2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_may_set_the_length_of_sequences_unless_that_drops_examples(recipe, tmp_path):
    recipe["model"] = {"name": "transformer", "width": 8, "heads": 2, "layers": 1, "ffn_width": 8}
    recipe["model"] |= {"positions": "learned", "max_positions": 40}
    recipe["task"]["decode"] = {"max_length": 20}
    weft.train(recipe, ["train.steps=1"], tmp_path / "weights")
    runs = [read_run(recipe), read_run(recipe, [f"model.weights={tmp_path / 'weights'}"])]
    assert [run.data.max_length for run in runs] == [1024, 39]
    _check_same_task(dict(zip("ab", runs, strict=True)))
    _check_same_task(dict(zip("ab", reversed(runs), strict=True)))
    drops = [run.model_copy(update={"data": run.data.model_copy(update={"truncation": "drop"})}) for run in runs]
    with pytest.raises(weft.ConfigError, match="data.max_length is 1024 in a and 39 in b"):
        _check_same_task(dict(zip("ab", drops, strict=True)))


def test_a_heads_dropout_is_no_difference_of_the_task():
    runs = {name: Run.parse(read_recipe("langid", {"task.dropout": rate})) for name, rate in (("a", 0.1), ("b", 0.5))}
    assert runs["a"].task != runs["b"].task
    _check_same_task(runs)
    with pytest.raises(weft.ConfigError, match="but task.label_smoothing is 0.0 in a and 0.2 in c"):
        _check_same_task({**runs, "c": Run.parse(read_recipe("langid", {"task.label_smoothing": 0.2}))})


def test_names_must_differ(recipe, tmp_path):
    (tmp_path / "other").mkdir()
    twice = [write(tmp_path, "a", recipe), write(tmp_path / "other", "a", recipe)]
    with pytest.raises(weft.ConfigError, match="needs recipes with different names, but got a, a"):
        compare(twice, "2", tmp_path / "out")
    with pytest.raises(weft.ConfigError, match="different names, but got none"):
        compare([], "2", tmp_path / "out")


@pytest.mark.parametrize("budget", ["soon", "0", "-3", "0s", ""])
def test_a_budget_is_a_time_or_steps(recipe_file, tmp_path, budget):
    with pytest.raises(weft.ConfigError, match=r"train\.(time|steps)"):
        compare([recipe_file], budget, tmp_path / "out")


def test_all_recipes_are_checked_before_one_is_trained(recipe, tmp_path):
    good, bad = write(tmp_path, "good", recipe), write(tmp_path, "bad", recipe, model={"name": "seq2sec"})
    with pytest.raises(weft.ConfigError, match="did you mean 'seq2seq'"):
        compare([good, bad], "2", tmp_path / "out")
    del recipe["data"]["valid"]
    with pytest.raises(weft.ConfigError, match=r"need data.test or data.valid"):
        compare([write(tmp_path, "blind", recipe)], "2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_steps_and_time_take_each_others_place(recipe, tmp_path):
    recipe["train"]["time"] = "1h"
    by_steps = compare([write(tmp_path, "a", recipe)], "3", tmp_path / "steps")
    assert by_steps.contenders[0].pipeline.run.train.time is None
    assert by_steps.contenders[0].last["step"] == 3
    by_time = compare([tmp_path / "a.yaml"], "1s", tmp_path / "time")
    train = by_time.contenders[0].pipeline.run.train
    assert (train.steps, train.time) == (None, 1.0)
    assert by_time.contenders[0].last["elapsed"] >= 1
    assert (by_steps.trained_for, by_time.trained_for) == ("3 steps", "1s")


def test_long_examples_that_the_recipe_drops_do_not_end_it(recipe, tmp_path, pairs_file):
    with pairs_file.open("a") as file:
        file.write("a" * 50 + "\tb\n")
    changes = ["data.max_length=20", "data.truncation=drop", "data.valid=" + str(pairs_file)]
    rows = pairs_file.read_text().splitlines()
    pairs_file.write_text("\n".join([rows[-1], *rows[:-1]]) + "\n")  # among the first, where examples are drawn from
    comparison = compare([write(tmp_path, "a", recipe)], "2", tmp_path / "out", changes)
    assert all(len(example.text) == 5 for example in comparison.unseen())


def test_of_labels_each_is_compared_by_its_f1(tmp_path):
    rows = [("a b", "no_1")] * 4 + [("c d", "yes_1")] * 4 + [("a b", "yes_1")]
    (tmp_path / "rows.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    recipe = {
        "task": {"name": "classify"},
        "data": {"train": str(tmp_path / "rows.tsv"), "valid": str(tmp_path / "rows.tsv")},
        "tokenizer": {"name": "words"},
        "model": {"name": "cnn", "width": 12},
        "train": {"steps": 4, "batch_tokens": 64, "lr": 0.05},
    }
    paths = [write(tmp_path, name, recipe) for name in ("first", "second")]
    comparison = compare(paths, "40", tmp_path / "out")
    headers, rows = comparison.classes()
    assert headers == ["label", "support", "first", "second"]
    assert rows == [["no_1", "4", "88.9%", "88.9%"], ["yes_1", "5", "88.9%", "88.9%"]]
    assert comparison.contenders[0].report.classes["yes_1"].f1 == comparison.contenders[0].metrics["f1"]
    assert "f1 (yes_1)" in comparison.table()[0], "a binary F1 says which label it is of, as it is written"
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for part in ("F1 by label", "first: precision, recall and F1", "second: precision, recall and F1", "weighted avg"):
        assert part in page
    assert loads(page) == []


def test_what_has_no_labels_has_no_such_table(compared):
    comparison, _, _ = compared
    assert comparison.classes()[1] == []
    assert "F1 by" not in comparison.page()
