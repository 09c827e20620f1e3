"""A model whose weights are no numbers gives no answer: predict, embed, evaluate, stream and log_probs say so."""

import math

import pytest
import torch

from weft.config.run import Run
from weft.errors import DataError
from weft.pipeline import Pipeline
from weft.tasks.factory import build
from weft.tokenization.trainable import train_tokenizer

BERT = {"name": "bert", "width": 8, "heads": 2, "layers": 1, "max_positions": 64}
LABELS = ["a", "b"]
PASSAGE = {"question": "who reads", "passage": "one reads two words"}
CASES = {
    "lm": ({"name": "lm"}, {"name": "rnn", "width": 8}, "one two", None),
    "gpt": ({"name": "lm"}, {"name": "gpt", "width": 8, "heads": 2, "layers": 1}, "one two", None),
    "translate": (
        {"name": "translate"},
        {"name": "seq2seq", "width": 8},
        "one two",
        [{"text": "one", "target": "two"}],
    ),
    "classify": (
        {"name": "classify", "labels": LABELS},
        {"name": "cnn", "width": 6},
        "one two three four five",
        [{"text": "one two", "label": "a"}],
    ),
    "several labels": (
        {"name": "classify", "labels": LABELS, "multiple": True},
        BERT,
        "one two",
        [{"text": "one two", "labels": ["a"]}],
    ),
    "regression": ({"name": "classify", "regression": True}, BERT, "one two", [{"text": "one two", "label": 1.5}]),
    "tag": ({"name": "tag", "labels": LABELS}, BERT, "one two", [{"words": ["one", "two"], "tags": LABELS}]),
    "crf": (
        {"name": "tag", "labels": LABELS, "crf": True},
        {"name": "rnn", "width": 8},
        "one two",
        [{"words": ["one", "two"], "tags": LABELS}],
    ),
    "mlm": ({"name": "mlm", "next_sentence": False}, BERT, "one [MASK]", None),
    "choice": (
        {"name": "choice"},
        BERT,
        {"text": "one", "choices": ["two", "three"]},
        [{"text": "one", "choices": ["two", "three"], "label": 1}],
    ),
    "span": (
        {"name": "span", "unanswerable": False, "max_question_length": 16},
        BERT,
        PASSAGE,
        [{**PASSAGE, "answers": ["one"]}],
    ),
    "skipgram": ({"name": "skipgram"}, {"name": "word2vec", "width": 8}, "one two", None),
}


def pipeline_for(case):
    task, model, _, _ = CASES[case]
    recipe = {
        "task": task,
        "data": {"train": "none.txt", "max_length": 60},
        "tokenizer": {"name": "wordpiece" if model is BERT else "words"},
        "model": model,
        "train": {"steps": 1},
    }
    run = Run.parse(recipe)
    torch.manual_seed(0)
    made, head = build(run, train_tokenizer(run.tokenizer, ["one two three four five words reads who"] * 3))
    return Pipeline(run, made, made.tokenizer, head.eval())


def spoil(pipeline, value=math.nan):
    """Set one weight to a value that is no number: of the first matrix, so that it reaches all that follows."""
    with torch.no_grad():
        next(weight for weight in pipeline.head.parameters() if weight.ndim > 1).fill_(value)


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_number_is_no_answer(case):
    *_, question, labelled = CASES[case]
    pipeline = pipeline_for(case)
    assert "error" not in next(iter(pipeline.answers([question], on_error="return"))), "a sound model answers"
    if labelled:
        assert math.isfinite(pipeline.evaluate(labelled)["loss"])
    spoil(pipeline)
    with pytest.raises(DataError, match=r"example 1: .*NaN"):
        pipeline([question])
    (answer,) = pipeline.answers([question], on_error="return")
    assert answer.keys() == {"error"}
    assert "NaN" in answer["error"]
    if labelled:
        with pytest.raises(DataError, match="NaN"):
            pipeline.evaluate(labelled)


@pytest.mark.parametrize("case", ["lm", "gpt"])
def test_streams_and_probabilities_are_of_numbers(case):
    pipeline = pipeline_for(case)
    list(pipeline.stream("one"))
    pipeline.log_probs(["one two"])
    pipeline.evaluate([{"text": "one two"}])
    spoil(pipeline)
    with pytest.raises(DataError, match="NaN or infinite numbers for this prompt"):
        list(pipeline.stream("one"))
    with pytest.raises(DataError, match="text 1: the model computes NaN"):
        pipeline.log_probs(["one two"])
    with pytest.raises(DataError, match="evaluate: loss is not a number"):
        pipeline.evaluate([{"text": "one two"}])


@pytest.mark.parametrize("pool", ["mean", "last", "max", "tokens"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_vectors_are_of_numbers(pool, value):
    pipeline = pipeline_for("lm")
    texts = ["one", "one two three", "four five"]
    pipeline.embed(texts, pool=pool)
    with torch.no_grad():
        (row,) = pipeline.tokenizer.ids(["three"])[0]
        pipeline.head.body.embed.weight[row] = value  # of one word alone
    with pytest.raises(DataError, match="text 2: the model computes NaN or infinite numbers"):
        pipeline.embed(texts, pool=pool, layers=0 if pool != "tokens" else -1)
    assert len(pipeline.embed(["one", "four five"], pool=pool)) == 2, "others are answered"
