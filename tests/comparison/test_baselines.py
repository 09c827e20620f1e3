"""Classical baselines: fitted on the training rows, answering as the task's own models do."""

import random

import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from weft.comparison.baselines import BASELINES, _shape, _word_features
from weft.config.run import Run
from weft.tasks.factory import make_task, resolve_run


def run_of(tmp_path, task, rows, valid=True, **data):
    (tmp_path / "rows.jsonl").write_text("".join(f"{row}\n" for row in rows))
    given = {
        "train": str(tmp_path / "rows.jsonl"),
        **({"valid": str(tmp_path / "rows.jsonl")} if valid else {}),
        **data,
    }
    recipe = {"task": task, "data": given, "tokenizer": {"name": "words"}, "model": {"name": "cnn"}}
    run = Run.parse({**recipe, "train": {"steps": 1}})
    built = make_task(run)
    return resolve_run(run, built), built


def json_rows(rows):
    import json

    return [json.dumps(row) for row in rows]


def topics(count=60, seed=0):
    rng = random.Random(seed)
    words = {"sea": "wave salt fish boat", "sky": "bird wind cloud sun"}
    labels = [rng.choice(list(words)) for _ in range(count)]
    return [{"text": " ".join(rng.choices(words[label].split(), k=4)), "label": label} for label in labels]


@pytest.mark.parametrize("name", ["bag of words", "character n-grams"])
def test_labels_follow_from_words_and_from_characters(tmp_path, name):
    run, task = run_of(tmp_path, {"name": "classify"}, json_rows(topics()))
    baseline = BASELINES[name].fit(run, task)
    unseen = [task.Example(**row) for row in topics(30, seed=1)]
    answers = baseline.answers(unseen)
    assert task.score(answers, unseen)["accuracy"] == 1
    for answer in answers:
        assert next(iter(answer["scores"])) == answer["label"]
        assert sum(answer["scores"].values()) == pytest.approx(1, abs=1e-5)
    options = BASELINES[name].options
    features = len(TfidfVectorizer(**options).fit([row["text"] for row in topics()]).vocabulary_)
    assert baseline.parameters == features + 1
    again = BASELINES[name].fit(run, task)
    assert again.answers(unseen) == answers, "it is the same each time"


def test_labels_that_are_chance_are_not_learnt(tmp_path):
    rng = random.Random(5)
    rows = [{"text": rng.choice("abcdef"), "label": rng.choice(["x", "y"])} for _ in range(200)]
    run, task = run_of(tmp_path, {"name": "classify"}, json_rows(rows[:100]), valid=False)
    unseen = [task.Example(**row) for row in rows[100:]]
    assert 0.3 < task.score(BASELINES["bag of words"].fit(run, task).answers(unseen), unseen)["accuracy"] < 0.7


def test_several_labels_and_pairs(tmp_path):
    rows = [{"text": "a b", "labels": ["x", "y"]}, {"text": "a c", "labels": ["x"]}, {"text": "c c", "labels": []}] * 5
    run, task = run_of(tmp_path, {"name": "classify", "multiple": True}, json_rows(rows))
    examples = [task.Example(**row) for row in rows[:3]]
    answers = BASELINES["bag of words"].fit(run, task).answers(examples)
    assert [sorted(answer["labels"]) for answer in answers] == [["x", "y"], ["x"], []]
    pairs = [{"text": "a", "pair": word, "label": label} for word, label in (("b", "yes"), ("c", "no"))] * 5
    run, task = run_of(tmp_path, {"name": "classify"}, json_rows(pairs))
    examples = [task.Example(**row) for row in pairs[:2]]
    assert [answer["label"] for answer in BASELINES["bag of words"].fit(run, task).answers(examples)] == ["yes", "no"]


def test_tags_follow_from_neighbours(tmp_path):
    rng = random.Random(3)
    sentences = [[rng.choice(["the", "to"]), rng.choice(["walk", "run", "play"])] for _ in range(40)]
    rows = [{"words": words, "tags": ["X", "NOUN" if words[0] == "the" else "VERB"]} for words in sentences]
    run, task = run_of(tmp_path, {"name": "tag", "scheme": "plain"}, json_rows(rows))
    baseline = BASELINES["words and neighbours"].fit(run, task)
    examples = [task.Example(**row) for row in rows]
    answers = baseline.answers(examples)
    assert task.score(answers, examples) == {"accuracy": 1.0}
    assert answers[0]["words"] == sentences[0]
    assert all(0 < score <= 1 for answer in answers for score in answer["scores"])


def test_a_word_has_a_shape_and_neighbours():
    assert [_shape(word) for word in ("Paris", "3.14", "USA", "co-op", "")] == ["Xx", "d.d", "X", "x-x", ""]
    first, second = _word_features(["New", "York"])
    assert first["word +1"] == second["word +0"] == "york"
    assert first["word -1"] == first["word -2"] == "\0"
    assert second["suffix 2"] == "rk"


def test_numbers_have_no_such_baseline(tmp_path):
    run, _ = run_of(tmp_path, {"name": "classify", "regression": True}, json_rows([{"text": "a", "label": 1.5}] * 3))
    assert not any(baseline.serves(run) for baseline in BASELINES.values())
