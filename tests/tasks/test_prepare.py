"""Data preparation: bad, long or missing rows raise or are counted, never dropped silently."""

import json

import pytest
from tests.conftest import reversed_pairs

import weft
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.data.readers.examples import Skipped
from weft.errors import ConfigError, DataError
from weft.tasks.encoding import ENCODE_CHUNK
from weft.tasks.factory import make_task
from weft.tasks.prepare import fit_tokenizer, has_split, pack_split, read_evaluation_data, read_split
from weft.tasks.translate import Translate


def prepare_recipe(recipe, *overrides):
    run = Run.parse(read_recipe(recipe, overrides))
    task = make_task(run)
    return run.data, task, fit_tokenizer(run.tokenizer, run.data, task)


def packed(recipe, *overrides, split="train"):
    data, task, tokenizer = prepare_recipe(recipe, *overrides)
    return pack_split(data, split, task, tokenizer)


def whole(recipe, *overrides):
    data, task, tokenizer = prepare_recipe(recipe, *overrides)
    task.tokenizer = tokenizer
    encoded, report = read_evaluation_data(data, "valid", task)
    return encoded.examples, report


def add(path, *lines):
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


COUNT = len(reversed_pairs())


def test_every_pair_is_packed_and_nothing_is_told(recipe):
    items, report = packed(recipe)
    assert len(items) == COUNT
    assert report == ""
    data, task, tokenizer = prepare_recipe(recipe)
    task.tokenizer = tokenizer
    encoded, report = read_evaluation_data(data, "valid", task)
    examples = encoded.examples
    assert [(one.text, one.target) for one in examples] == reversed_pairs()
    assert report == ""


def test_the_tokenizer_learns_both_sides_of_the_training_data_alone(recipe, tmp_path, pairs_file):
    add(pairs_file, "x\ty")
    (tmp_path / "valid.tsv").write_text("q\tq\n")
    recipe["data"]["valid"] = str(tmp_path / "valid.tsv")
    _, _, tokenizer = prepare_recipe(recipe)
    assert {tokenizer.token(id) for id in range(len(tokenizer))} == {*"abcdefxy", "<unk>", "<s>", "</s>"}


@pytest.mark.parametrize("split", ["train", "valid"])
def test_bad_rows_are_errors_with_their_line_or_are_counted(recipe, pairs_file, split):
    add(pairs_file, "one column", "a\tb\tc")
    with pytest.raises(DataError, match=rf"pairs.tsv:{COUNT + 1}: "):
        packed(recipe, split=split)
    items, report = packed(recipe, "data.on_bad_rows=skip", split=split)
    assert len(items) == COUNT
    assert report.startswith(f"skipped 2 rows: {pairs_file}:{COUNT + 1}: got 1 column")


def test_a_row_without_its_answer_teaches_nothing(recipe, tmp_path):
    rows = [{"text": "ab", "target": "ba"}, {"text": "cd"}, {"text": "ef", "target": None}]
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe["data"] = {"train": str(path), "valid": str(path)}
    with pytest.raises(DataError, match=r"some.jsonl:2: target: required to train or evaluate"):
        packed(recipe)
    items, report = packed(recipe, "data.on_bad_rows=skip")
    assert len(items) == 1
    assert "skipped 2 rows" in report
    examples, report = whole(recipe, "data.on_bad_rows=skip")
    assert [one.text for one in examples] == ["ab"]
    assert "skipped 2 rows" in report


def test_a_file_of_one_column_is_refused(recipe, tmp_path):
    (tmp_path / "one.txt").write_text("ab\ncd\n")
    with pytest.raises(DataError, match=r"one.txt:1: target: required"):
        weft.train(recipe, [f"data.train={tmp_path / 'one.txt'}"], tmp_path / "run")


LONG = "a" * 30


def test_too_long_is_an_error_that_names_the_line(recipe, pairs_file):
    add(pairs_file, f"{LONG}\tab")
    for read in (packed, whole):
        with pytest.raises(
            DataError, match=rf"pairs.tsv:{COUNT + 1}: got 30 tokens, data.max_length is 20; set data.truncation"
        ):
            read(recipe, "data.max_length=20")


@pytest.mark.parametrize(
    ("policy", "left", "report"),
    [
        ("cut", COUNT + 2, "cut 3 sequences longer than data.max_length=20"),
        ("drop", COUNT, "dropped 3 sequences longer than data.max_length=20"),
    ],
)
def test_too_long_is_cut_or_dropped_counted_and_told(recipe, pairs_file, policy, left, report):
    add(pairs_file, f"{LONG}\tab", f"{LONG}\t{LONG}")
    settings = ["data.max_length=20", f"data.truncation={policy}"]
    items, actual_report = packed(recipe, *settings)
    assert (len(items), actual_report) == (left, report)
    assert max(len(ids) for index in range(len(items)) for ids in items[index]) <= 22
    examples, actual_report = whole(recipe, *settings)
    assert (len(examples), actual_report) == (left, report)


def test_with_skip_a_too_long_row_counts_as_bad(recipe, pairs_file):
    add(pairs_file, f"{LONG}\tab")
    items, report = packed(recipe, "data.max_length=20", "data.on_bad_rows=skip")
    assert len(items) == COUNT
    assert f"skipped 1 row: {pairs_file}:{COUNT + 1}: got 30 tokens" in report


class Hear:
    def __init__(self):
        self.said = []

    def __call__(self, record):
        self.said.append(str(record))

    def close(self):
        pass


def test_training_tells_of_both_splits(recipe, pairs_file, tmp_path):
    add(pairs_file, f"{LONG}\tab")
    hear = Hear()
    settings = ["data.max_length=20", "data.truncation=drop", "train.steps=2"]
    weft.train(recipe, settings, tmp_path / "run", report=hear)
    for split in ("train", "valid"):
        assert any(f"data.{split}: dropped 1 sequence longer than data.max_length=20" in one for one in hear.said)


def test_bad_validation_data_end_the_run_before_it_starts(recipe, tmp_path):
    (tmp_path / "valid.tsv").write_text(f"ab\tba\n{LONG}\tab\n")
    recipe["data"]["valid"] = str(tmp_path / "valid.tsv")
    with pytest.raises(DataError, match=r"valid.tsv:2: got 30 tokens"):
        weft.train(recipe, ["data.max_length=20", "train.steps=100000"], tmp_path / "run")


def test_where_nothing_is_left_the_reason_is_told(recipe):
    for read in (packed, whole):
        with pytest.raises(DataError, match=rf"not one example is left to use; dropped {2 * COUNT} sequences longer"):
            read(recipe, "data.max_length=3", "data.truncation=drop")


def test_a_bad_row_far_down_is_found_in_its_chunk(recipe, pairs_file):
    add(pairs_file, *["ab\tba"] * 2 * ENCODE_CHUNK, f"{LONG}\tab", *["ab\tba"] * ENCODE_CHUNK)
    with pytest.raises(DataError, match=rf"pairs.tsv:{COUNT + 2 * ENCODE_CHUNK + 1}: got 30 tokens"):
        packed(recipe, "data.max_length=20")
    items, _ = packed(recipe, "data.max_length=20", "data.on_bad_rows=skip")
    assert len(items) == COUNT + 3 * ENCODE_CHUNK


def test_a_split_that_is_not_there(recipe):
    data, task, _ = prepare_recipe(recipe)
    assert has_split(data, "valid")
    assert not has_split(data, "test")
    with pytest.raises(ConfigError, match=r"data.test: required here, but not given; add a file"):
        read_split(data, "test", task, Skipped())


def test_a_sample_has_all_splits_and_must_fit_the_task(recipe):
    recipe["data"] = {"sample": "dates"}
    run = Run.parse(recipe)
    task = make_task(run)
    assert all(has_split(run.data, split) for split in ("train", "valid", "test"))
    place, example = next(read_split(run.data, "test", task, Skipped()))
    assert (place, bool(example.text), bool(example.target)) == ("dates:test:1", True, True)
    wrong = run.data.model_copy(update={"sample": "langid"})
    with pytest.raises(
        DataError, match=r"data.sample: a row of langid has text, label, but the task 'translate' reads"
    ):
        list(read_split(wrong, "test", task, Skipped()))


def test_a_row_of_a_sample_without_its_answer_teaches_nothing_either(recipe):
    recipe |= {"task": {"name": "classify", "labels": ["a", "b"]}, "model": {"name": "rnn", "width": 8}}
    recipe["data"] = {"sample": "langid", "columns": {"text": "text"}}
    with pytest.raises(DataError, match=r"^langid:train:1: label: required to train or evaluate, but not given"):
        packed(recipe)
    with pytest.raises(DataError, match=r"^langid:train:1: labels: required to train or evaluate, but not given"):
        packed(recipe, "task.multiple=true")


def test_columns_of_a_sample_make_a_list(recipe):
    recipe |= {"task": {"name": "choice"}, "model": {"name": "rnn", "width": 8}}
    recipe["data"] = {"sample": "dates", "columns": {"text": "text", "choices": ["text", "target"]}}
    run = Run.parse(recipe)
    task = make_task(run)
    task.label_fields = ()
    _, example = next(read_split(run.data, "test", task, Skipped()))
    assert example.choices[0] == example.text != example.choices[1]
    wrong = run.data.model_copy(update={"columns": {"text": "text", "choices": ["text", "tarqet"]}})
    with pytest.raises(
        ConfigError, match=r"data.columns.choices.1: a row of the sample dates has no 'tarqet'; did you"
    ):
        list(read_split(wrong, "test", task, Skipped()))


def test_a_target_tokenizer_of_its_own_trains_end_to_end(recipe, tmp_path, pairs_file):
    pairs_file.write_text("".join(f"{a}\t{b.upper()} !\n" for a, b in reversed_pairs()))
    recipe["tokenizer"] = {"name": "characters", "target": {"name": "bytes"}}
    recipe["model"].update(width=32, dropout=0)
    pipeline = weft.train(recipe, ["train.steps=200"], tmp_path / "run")
    assert (len(pipeline.tokenizer), len(pipeline.tokenizer.target)) == (6 + 3, 256 + 2)
    assert pipeline.evaluate()["exact_match"] > 0.9
    again = weft.load(tmp_path / "run")
    assert again(["abcde"]) == pipeline(["abcde"])
    shown = again.attention(reversed_pairs()[0][0])
    assert shown.source == [*reversed_pairs()[0][0], "</s>"]
    assert shown.target[-3:] == [" ", "!", "</s>"]


def test_what_is_cut_is_counted_once_though_its_chunk_is_read_again(recipe, tmp_path):
    """A bad row sends its whole chunk through once more, one by one; the rows that are cut are still cut once."""
    path = tmp_path / "rows.tsv"
    path.write_text("abcdefghij\tab\nab\tab\nabcdefghij\tab\n")
    recipe["data"] = {"train": str(path), "max_length": 5, "truncation": "cut", "on_bad_rows": "skip"}
    run = Run.parse(recipe)
    task = Fussy(run.task)
    tokenizer = fit_tokenizer(run.tokenizer, run.data, task)
    packed, report = pack_split(run.data, "train", task, tokenizer)
    assert len(packed) == 2
    assert "skipped 1 row" in report
    assert "cut 2 sequences" in report


class Fussy(Translate):
    def encode_batch(self, examples, tokenizer, limit):
        items = super().encode_batch(examples, tokenizer, limit)
        if any(example.text == "ab" for example in examples):
            raise DataError("not this one")
        return items
