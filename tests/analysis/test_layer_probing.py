"""Which layers know most: each choice against features and a regression made by hand, for texts and for words."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score
from tests.test_text_embedding import BODIES, made

import weft
from weft.analysis import layer_probing, logistic_regression
from weft.analysis.layer_probing import choices_of, encode_layers, layer_features, probing_task
from weft.analysis.logistic_regression import LogisticProbe
from weft.data.samples import datasets as samples
from weft.text_embedding import Combine

ROWS = [
    *(("train", {"text": text, "label": label}) for text, label in [
        ("the play was long", "long"), ("a short one", "short"), ("long and long", "long"),
        ("to play is short", "short"),
        ("they were long", "long"), ("we went to a short play", "short"), ("a long play", "long"), ("short", "short"),
    ]),
    *(("valid", {"text": text, "label": label}) for text, label in [
        ("a new long play", "long"), ("the short one", "short"), ("it was long", "long"),
    ]),
]  # fmt: skip
TAGGED = [
    (split, {"words": row["text"].split(), "tags": ["O" if len(word) < 4 else "B-X" for word in row["text"].split()]})
    for split, row in ROWS
]


@pytest.fixture(autouse=True)
def small_samples(monkeypatch):
    for name, task, rows in (("lengths", "classify", ROWS), ("marked", "tag", TAGGED)):
        sample = samples.Sample(name, "", task, tuple(rows[0][1]), lambda rows=rows: iter(rows))
        monkeypatch.setitem(samples.SAMPLES, name, sample)


@pytest.fixture(scope="module")
def bert():
    return made("bert-mlm")


def test_the_choices_are_those_of_the_papers_table():
    found = choices_of(range(13))
    names = [one.name for one in found]
    assert names == [
        "0 (embeddings)", *map(str, range(1, 11)), "11 (second to last)", "12 (last)",
        "sum of the last 4", "concat of the last 4", "sum of all 12",
    ]  # fmt: skip
    assert found[13].layers == found[14].layers == (9, 10, 11, 12)
    assert (found[13].combine, found[14].combine, found[15].layers) == ("sum", "concat", tuple(range(1, 13)))
    given = choices_of(range(13), [("-2:", "mean"), ([0, -1], "concat")])[-2:]
    assert [(one.name, one.layers) for one in given] == [("mean of 11, 12", (11, 12)), ("concat of 0, 12", (0, 12))]


@pytest.mark.parametrize(
    ("levels", "names"),
    [
        ((-1,), ["-1 (last)"]),
        ((0, 1), ["0 (embeddings)", "1 (last)"]),
        ((-2, -1), ["-2 (second to last)", "-1 (last)", "sum of the last 2", "concat of the last 2"]),
    ],
)
def test_a_shallow_model_has_fewer(levels, names):
    assert [one.name for one in choices_of(levels)] == names


def by_hand(pipeline, data, choice, pool):
    """Fit and score one choice by `embed` for texts, and for words by encoding each sentence alone."""
    rows = {split: [row for where, row in data if where == split] for split in ("train", "valid")}
    features = {
        split: np.concatenate([vectors(pipeline, row, choice, pool) for row in own]) for split, own in rows.items()
    }
    labels = {split: [one for row in own for one in row.get("tags", [row.get("label")])] for split, own in rows.items()}
    names = sorted(set(labels["train"]))
    found = LogisticProbe.fit(features["train"], np.array([names.index(one) for one in labels["train"]]), len(names))
    return accuracy_score(labels["valid"], [names[number] for number in found.predict(features["valid"])])


def vectors(pipeline, row, choice, pool):
    if "label" in row:
        return pipeline.embed([row["text"]], pool, choice.layers, choice.combine)
    ids = [pipeline.tokenizer.ids([word])[0] for word in row["words"]]
    firsts = np.cumsum([1, *map(len, ids)])[:-1]
    special = pipeline.tokenizer.specials
    tokens = weft.tokens.Tokens.pack([[special.bos, *(id for word in ids for id in word), special.eos]])
    with torch.inference_mode():
        states = pipeline.head.body.encode(tokens, choice.layers)[:, firsts]
    return (torch.cat(list(states), -1) if choice.combine == "concat" else states.sum(0)).numpy()


@pytest.mark.parametrize(
    ("name", "data", "pool"),
    [("lengths", ROWS, "mean"), ("lengths", ROWS, "cls"), ("lengths", ROWS, "last"), ("marked", TAGGED, "mean")],
)
def test_every_choice_is_scored_as_by_hand(bert, name, data, pool):
    found = bert.layer_scores(name, pool=pool, choices=[("1,3", "concat")])
    assert len(found.scores) == 5 + 2 + 1  # of four layers, the last four are all
    for one in found.scores:
        assert one.metrics["accuracy"] == pytest.approx(by_hand(bert, data, one.choice, pool)), one.choice
        assert one.width == (16 * len(one.choice.layers) if one.choice.combine == "concat" else 16)
    assert found.trained == len([row for split, row in data if split == "train" for _ in row.get("tags", [0])])
    assert found.best.metrics[found.metric] == max(one.metrics[found.metric] for one in found.scores)


def test_features_are_those_of_embed(bert):
    run, task = probing_task("lengths", [], bert.run, bert.head, bert.tokenizer)
    packed, _ = layer_probing.pack_split(run.data, "train", task, task.tokenizer)
    cache, labels = encode_layers(task, bert.head, packed, "mean")
    texts = [row["text"] for split, row in ROWS if split == "train"]
    assert [task.labels.names[number] for number in labels] == [row["label"] for split, row in ROWS if split == "train"]
    combine: Combine
    for combine in ("sum", "mean", "concat"):
        expected = bert.embed(texts, "mean", "1:", combine)
        np.testing.assert_allclose(layer_features(cache, [1, 2, 3, 4], combine), expected, atol=1e-4)


@pytest.mark.parametrize("body", ["gpt", "elmo", "rnn", "chars", "cnn", "word2vec", "elmo-tag"])
def test_any_body_will_do(body):
    pipeline = made(body)
    for name in ("lengths", "marked"):
        found = pipeline.layer_scores(name)
        assert {one.choice.layers for one in found.scores} >= {(level,) for level in pipeline.head.body.mixable_layers}


def test_blocks_and_batches_change_nothing(bert, monkeypatch):
    whole = bert.layer_scores("marked")
    monkeypatch.setattr(layer_probing, "BUDGET", 12)
    monkeypatch.setattr(logistic_regression, "_BLOCK", 40)
    assert bert.layer_scores("marked").to_dict() == whole.to_dict()


def test_data_may_be_a_recipe_or_files(bert, tmp_path):
    lines = {
        split: "".join(f"{row['label']}\t{row['text']}\n" for where, row in ROWS if where == split)
        for split in ("train", "valid")
    }
    for split, text in lines.items():
        (tmp_path / f"{split}.tsv").write_text(text)
    words = ["".join(f"{w}\t{t}\n" for w, t in zip(row["words"], row["tags"], strict=True)) for _, row in TAGGED]
    (tmp_path / "train.conll").write_text("\n".join(words))
    columns = [f"data.valid={tmp_path / 'valid.tsv'}", "data.columns={text: 1, label: 0}"]
    files = bert.layer_scores(tmp_path / "train.tsv", columns)
    assert files.to_dict() == bert.layer_scores("lengths").to_dict()
    recipe = {"task": {"name": "classify", "dropout": 0.3, "unknown": 0.1}, "data": {"sample": "lengths"}}
    (tmp_path / "own.yaml").write_text(json.dumps(recipe))
    assert bert.layer_scores(tmp_path / "own.yaml").to_dict() == bert.layer_scores(recipe).to_dict() == files.to_dict()
    tagged = bert.layer_scores(tmp_path / "train.conll", [f"data.test={tmp_path / 'train.conll'}"])
    assert (tagged.task, tagged.split, tagged.metric) == ("tag", "test", "f1")


def test_long_sentences_are_read_in_windows_and_joined(bert, monkeypatch):
    long = [(split, {"words": row["words"] * 12, "tags": row["tags"] * 12}) for split, row in TAGGED]
    sample = samples.Sample("longer", "", "tag", ("words", "tags"), lambda: iter(long))
    monkeypatch.setitem(samples.SAMPLES, "longer", sample)
    with pytest.raises(weft.DataError, match="longer:train:1: got 108 tokens, data.max_length is 30"):
        bert.layer_scores("longer")
    found = bert.layer_scores("longer", ["data.truncation=window"])
    assert found.scored == 12 * sum(len(row["tags"]) for split, row in TAGGED if split == "valid")


def test_long_pairs_are_cut_to_what_the_model_reads(bert, monkeypatch):
    long = [(split, {**row, "text": row["text"] * 5, "pair": row["text"] * 5}) for split, row in ROWS]
    sample = samples.Sample("pairs", "", "classify", ("text", "pair", "label"), lambda: iter(long))
    monkeypatch.setitem(samples.SAMPLES, "pairs", sample)
    with pytest.raises(weft.DataError, match="data.max_length is 29"):  # of 32, for three marks
        bert.layer_scores("pairs")
    assert bert.layer_scores("pairs", ["data.truncation=cut"]).scored == 3


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"data": "dates"}, weft.ConfigError, "task.name: layers are scored by labels.*but it is 'translate'"),
        ({"data": "gone.tsv"}, weft.ConfigError, "data.valid: required"),
        ({"data": "gone.tsv", "overrides": ["data.valid=gone.tsv"]}, weft.DataError, "gone.tsv: there is no such file"),
        ({"data": "lengths", "pool": "max"}, weft.ConfigError, "pool: must be one of mean, cls, last"),
        ({"data": "lengths", "choices": [("7", "sum")]}, weft.ConfigError, r"layers: this model has 0, 1.*\[7\]"),
        (
            {"data": {"task": {"name": "classify", "multiple": True}, "data": {"sample": "lengths"}}},
            weft.ConfigError,
            "task.multiple: layers are scored by one label per text or word",
        ),
        (
            {"data": "lengths", "choices": [("top", "sum")]},
            weft.ConfigError,
            "layers: must be a layer .* 'top' instead",
        ),
        ({"data": "gone", "choices": [("1", "add")]}, weft.ConfigError, "combine: there is no 'add'"),
        ({"data": "gone", "pool": "max"}, weft.ConfigError, "pool: must be one of"),  # before data is looked for
        ({"data": "lengths", "overrides": ["task.labels=[long]"]}, weft.DataError, "'short' is not in task.labels"),
    ],
)
def test_what_cannot_be_scored_is_named(bert, asked, error, message):
    with pytest.raises(error, match=message):
        bert.layer_scores(**asked)


def test_where_all_are_dropped_there_is_nothing_to_score_on(bert, tmp_path):
    for name, texts in (("train", ["long", "short"]), ("valid", ["a " * 30 + "long play"])):
        (tmp_path / f"{name}.tsv").write_text("".join(f"{text}\t{text[-5:].strip()}\n" for text in texts))
    changes = [f"data.valid={tmp_path / 'valid.tsv'}", "task.labels=[long, short, play]", "data.truncation=drop"]
    with pytest.raises(weft.DataError, match="data.valid: no example is left to score on; dropped 1 sequence"):
        bert.layer_scores(tmp_path / "train.tsv", changes)


def test_what_is_wrong_with_the_data_is_said_before_it_is_encoded(bert, tmp_path, monkeypatch):
    monkeypatch.delattr(layer_probing, "encode_layers")
    for name, rows in {
        "train": "a play\tnoun\nto\tother\n",
        "one": "a play\tnoun\nthe play\tnoun\n",
        "bare": "a play\nto\n",
        "other": "a play\tnoun\nto\tverb\n",
        "empty": "",
    }.items():
        (tmp_path / f"{name}.tsv").write_text(rows)
    monkeypatch.chdir(tmp_path)
    for train, valid, changes, message in (
        ("one", "train", [], "data.train: its labels are 'noun'"),
        ("one", "train", ["task.labels=[noun, other]"], "data.train: must have two labels or more, but has 'noun'"),
        ("bare", "train", [], "bare.tsv:1: label: "),
        ("train", "bare", [], "bare.tsv:1: label: "),
        ("train", "gone", [], "gone.tsv: there is no such file"),
        ("train", "other", [], "other.tsv:2: the label 'verb' is not in task.labels"),
        ("train", "empty", [], "empty.tsv"),
        ("empty", "train", [], "empty.tsv|data.train"),
    ):
        with pytest.raises(weft.DataError, match=message):
            bert.layer_scores(f"{train}.tsv", [f"data.valid={valid}.tsv", *changes])


def test_several_labels_a_text_are_refused(bert, monkeypatch):
    rows = [(split, {"text": row["text"], "labels": [row["label"]]}) for split, row in ROWS]
    monkeypatch.setitem(
        samples.SAMPLES, "several", samples.Sample("several", "", "classify", ("text",), lambda: iter(rows))
    )
    with pytest.raises(weft.ConfigError, match="layers are scored by one label per text or word"):
        bert.layer_scores("several", ["task.multiple=true"])


def test_what_does_not_encode_is_refused(monkeypatch):
    monkeypatch.setitem(BODIES, "ngram", ({"name": "lm"}, {"name": "ngram"}))
    with pytest.raises(weft.RoleError, match="gives texts no vectors: it does not encode"):
        made("ngram").layer_scores("lengths")


def test_the_model_is_left_as_it_was(bert):
    before = {name: value.clone() for name, value in bert.head.state_dict().items()}
    bert.layer_scores("lengths")
    assert all((value == before[name]).all() for name, value in bert.head.state_dict().items())


def test_features_in_a_wrong_order_are_caught(bert, monkeypatch):
    true = layer_probing.encode_layers

    def wrong(*given):
        cache, labels = true(*given)
        return cache[:, ::-1].copy(), labels

    monkeypatch.setattr(layer_probing, "encode_layers", wrong)
    with pytest.raises(AssertionError):
        test_every_choice_is_scored_as_by_hand(bert, "marked", TAGGED, "mean")
