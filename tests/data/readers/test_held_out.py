"""Validation data held out of the training data: the same rows each time, of each label its share, none in both."""

import json
import random
from collections import Counter

import pytest
from tests.notices import Told

import weft
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.config.schema import read_section
from weft.config.sections import Data
from weft.data.readers import held_out
from weft.data.readers.examples import Skipped
from weft.data.readers.held_out import RowKind, read_held_out
from weft.errors import ConfigError, DataError
from weft.tasks.classification.task import ClassifyExample
from weft.tasks.corpus.build import prepare
from weft.tasks.factory import make_task
from weft.tasks.prepare import read_split

ROWS = [(f"text {n}", "rare" if n % 20 == 0 else "often") for n in range(200)]
STRATIFIED = RowKind(ClassifyExample, ("text", "pair"), "label")
PLAIN = RowKind(ClassifyExample, ("text", "pair"), None)


def write(path, rows):
    path.write_text("".join(f"{text}\t{label}\n" for text, label in rows), encoding="utf-8")
    return path


def split(path, kind=STRATIFIED, fraction=0.1, **keys):
    data = Data(train=str(path), columns={"text": 0, "label": 1}, validation_fraction=fraction, **keys)
    return [
        [(example.text, example.label) for _, example in read_held_out(data, name, kind, Skipped())]
        for name in ("train", "valid")
    ]


def test_every_row_is_in_one_part_and_each_label_has_its_share(tmp_path):
    train, valid = split(write(tmp_path / "a.tsv", ROWS))
    assert sorted(train + valid) == sorted(ROWS)
    assert Counter(label for _, label in valid) == {"often": 19, "rare": 1}
    train, valid = split(write(tmp_path / "a.tsv", ROWS), PLAIN, 0.25)
    assert (len(train), len(valid)) == (150, 50)


def test_the_split_goes_by_the_text_and_not_by_its_place(tmp_path):
    shuffled = random.Random(1).sample(ROWS, len(ROWS))
    first, second = (split(write(tmp_path / name, rows)) for name, rows in (("a.tsv", ROWS), ("b.tsv", shuffled)))
    assert set(first[1]) == set(second[1])
    assert [row for row in shuffled if row in second[1]] == second[1]
    assert first[1] != ROWS[-len(first[1]) :]  # not the last rows


def test_rows_with_equal_texts_stay_together(tmp_path):
    train, valid = split(write(tmp_path / "a.tsv", ROWS * 3), fraction=0.3)
    assert valid
    assert not set(train) & set(valid)


def test_a_label_is_never_held_out_whole_and_rare_ones_have_their_share_together(tmp_path):
    single = [(f"text {n}", f"label {n}") for n in range(50)]
    pairs = [(f"other {n}", f"pair {n // 2}") for n in range(100)]
    train, valid = split(write(tmp_path / "a.tsv", single + pairs), fraction=0.4)
    assert {label for _, label in train} == {label for _, label in single + pairs}
    assert len(valid) > 20


def test_many_rows_are_split_by_the_fraction_of_all_hashes(tmp_path, monkeypatch):
    path = write(tmp_path / "a.tsv", [(f"text {n}", "often") for n in range(4000)])
    exact = split(path, PLAIN, 0.2)[1]
    held_out._find_thresholds.cache_clear()
    monkeypatch.setattr(held_out, "MAX_HASHES", 100)
    for kind in (PLAIN, STRATIFIED):
        rough = split(path, kind, 0.2)[1]
        assert 700 < len(rough) < 900
        assert len(set(rough) & set(exact)) == min(len(rough), len(exact))  # the smallest hashes, too
    held_out._find_thresholds.cache_clear()


def test_a_file_that_has_changed_is_split_anew(tmp_path):
    path = write(tmp_path / "a.tsv", ROWS)
    split(path)
    assert len(split(write(path, ROWS[:50]))[1]) == 5


def test_too_few_rows_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"validation_fraction: 0.1 of the 4 rows of .*a.tsv leaves none to evaluate"):
        split(write(tmp_path / "a.tsv", ROWS[:4]))
    same = [("one text", "often")] * 40
    with pytest.raises(DataError, match="leaves none"):
        split(write(tmp_path / "a.tsv", same))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"train": "a.tsv", "valid": "b.tsv"}, "data.valid is validation data already; leave one of the two out"),
        ({"sample": "langid"}, "data.sample has validation data of its own"),
    ],
)
def test_validation_data_given_twice_is_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        read_section(Data, {**section, "validation_fraction": 0.1}, "data")
    assert read_section(Data, section, "data")


def recipe_for(path, **task):
    return {
        "task": {"name": "classify", **task},
        "data": {"train": str(path), "columns": {"text": 0, "label": 1}, "validation_fraction": 0.1},
        "tokenizer": {"name": "words"},
        "model": {"name": "cnn", "width": 9, "embedding": 8},
        "train": {"epochs": 2, "batch_size": 50, "patience": 5},
    }


def test_only_single_labels_are_stratified(tmp_path):
    rows = [(text, float(n)) for n, (text, _) in enumerate(ROWS)]
    numbers = make_task(Run.parse(recipe_for(write(tmp_path / "a.tsv", rows), regression=True)))
    assert (numbers.stratify_by, make_task(Run.parse(recipe_for("a.tsv"))).stratify_by) == (None, "label")
    run = Run.parse(recipe_for(write(tmp_path / "a.tsv", rows), regression=True))
    assert len(list(read_split(run.data, "valid", numbers, Skipped()))) == 20


def test_a_training_evaluates_on_what_it_did_not_learn_from_and_resumes(tmp_path):
    notices, recipe = Told(), recipe_for(write(tmp_path / "a.tsv", [*ROWS, ("once", "alone")]))
    model = weft.train(recipe, out=tmp_path / "run", report=notices)
    assert "data.validation_fraction: 20 rows of data.train held out for evaluations" in notices.notices
    assert set(model.task.labels.names) == {"often", "rare", "alone"}
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("valid" in row for row in rows) == 2
    assert model.evaluate()["accuracy"] == rows[-1]["valid"]["accuracy"]
    weft.train(recipe, ["train.epochs=3"], tmp_path / "run", resume=True)
    with pytest.raises(weft.CheckpointError, match="data.validation_fraction was 0.1 and is 0.2 now"):
        weft.train(recipe, ["data.validation_fraction=0.2"], tmp_path / "run", resume=True)


def test_what_is_odd_is_told_once(tmp_path):
    path = write(tmp_path / "a.tsv", [*ROWS, ("", "often")])
    notices = Told()
    weft.train(recipe_for(path), ["train.epochs=1"], tmp_path / "run", report=notices)
    assert sum("with an empty text" in notice for notice in notices.notices) == 1


def test_a_prepared_corpus_is_refused(tmp_path):
    raw = recipe_for(write(tmp_path / "a.tsv", ROWS))
    with pytest.raises(ConfigError, match="validation_fraction: a prepared corpus has splits of its own"):
        prepare(Run.parse(raw), tmp_path / "corpus", workers=1)
    plain = read_recipe(raw, ["data.validation_fraction=null", "train.patience=null"])
    prepare(Run.parse(plain), tmp_path / "corpus", workers=1)
    with pytest.raises(ConfigError, match="corpus is prepared: it has tokens, but no rows that can be held out"):
        weft.train(raw, [f"data.train={tmp_path / 'corpus'}"], tmp_path / "run")
