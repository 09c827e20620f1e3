"""A GPT from recipe to answers: trained, asked, lowered, looked into, taken to Hugging Face's format and back."""

import json

import pytest

import weft
from weft.conversion.convert import convert

LINES = ["one two three four five six seven eight nine ten", "a b c d e f g h i j k l m n o p"]


def recipe(folder, **parts):
    path = folder / "text.txt"
    path.write_text("\n".join(LINES * 8) + "\n", encoding="utf-8")
    made = {
        "task": {"name": "lm", "decode": {"sample": False}},  # a sample may go astray
        "data": {"train": str(path), "valid": str(path), "max_length": 48},
        "tokenizer": {"name": "bpe", "size": 300},
        "model": {"name": "gpt", "width": 32, "heads": 4, "layers": 2, "max_positions": 64, "dropout": 0.0},
        "train": {
            "steps": 220,
            "batch_tokens": 256,
            "lr": 6e-3,
            "schedule": "cosine",
            "warmup": 20,
            "report_every": 10,
        },
    }
    return {**made, **parts}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt")
    weft.train(recipe(folder), out=folder / "run")
    return folder / "run"


def test_it_learns_goes_on_and_stops(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] > 3
    assert rows[-1]["loss"] < 0.3
    pipeline = weft.load(run, device="cpu")
    assert pipeline("one two three")[0]["text"] == LINES[0].removeprefix("one two three")
    assert [one["text"] for one in pipeline(["a b c d", "five six"], {"stop": [" l", " nine"]})] == [
        " e f g h i j k",
        " seven eight",
    ]
    assert "".join(pipeline.stream("a b c")) == LINES[1].removeprefix("a b c")
    assert pipeline.evaluate(LINES)["bits_per_byte"] < 0.5


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_it_answers_the_same_in_fewer_bits(run, precision):
    pipeline = weft.load(run, device="cpu", precision=precision)
    assert pipeline("one two three")[0]["text"] == LINES[0].removeprefix("one two three")


def test_where_it_looks_is_behind(run):
    found = weft.load(run, device="cpu").attention("one two three")
    assert {(view.place, view.layer) for view in found.views} == {("decoder", 0), ("decoder", 1)}
    for view in found.views:
        assert view.rows == view.columns
        assert (view.weights[:, 0, 1:] == 0).all()
        assert view.weights.sum(-1) == pytest.approx(1, abs=1e-5)


def test_it_goes_to_the_other_format_and_comes_back(run, tmp_path):
    pytest.importorskip("transformers")
    for source, target in ((run, tmp_path / "hf"), (tmp_path / "hf", tmp_path / "weft")):
        report = convert(source, target)
        report.demand()
        assert {check.against for check in report.checks} > {"transformers"}
    for place in ("hf", "weft"):
        assert weft.load(tmp_path / place, device="cpu")("one two")[0]["text"] == LINES[0].removeprefix("one two")


def test_it_is_a_body_for_labels(tmp_path):
    rows = [f"{text}\t{label}\n" for text, label in (("one two", "words"), ("a b c", "letters")) for _ in range(20)]
    (tmp_path / "rows.tsv").write_text("".join(rows), encoding="utf-8")
    made = recipe(
        tmp_path,
        task={"name": "classify", "labels": ["words", "letters"]},
        data={"train": str(tmp_path / "rows.tsv"), "valid": str(tmp_path / "rows.tsv")},
    )
    pipeline = weft.train(made, ["train.steps=30"], tmp_path / "run")
    assert [answer["label"] for answer in pipeline(["a b c", "one two"])] == ["letters", "words"]
    assert pipeline.head.body.output is None
