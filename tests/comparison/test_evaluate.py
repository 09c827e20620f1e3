"""What is kept of an evaluation, and the texts that language models are shown on."""

import math

import numpy as np

from weft.comparison.evaluate import Evaluation, passages, read_evaluation, surprise
from weft.comparison.measure import latencies, machine
from weft.comparison.results import SeedResult


def test_an_evaluation_is_read_as_it_was_written(tmp_path):
    losses = {"nats": [1.5, math.inf], "tokens": [2.0, 3.0], "bytes": [4.0, 5.0], "spelling": None}
    answers = [{"text": "a\nβ", "score": -0.5}]
    evaluation = Evaluation(
        result=SeedResult(seed=1, metrics={"perplexity": None}, seconds=0.1),
        rows=[0, 2],
        answers=answers,
        losses=losses,
    )
    evaluation.write(tmp_path / "run")
    again = read_evaluation(tmp_path / "run")
    assert again == evaluation
    assert again.text_losses().metric("perplexity", np.array([0])) == math.exp(0.75)
    assert again.text_losses().metric("perplexity") == math.inf
    (tmp_path / "run" / "evaluation.json").write_text("{")
    assert read_evaluation(tmp_path / "run") is None
    assert read_evaluation(tmp_path) is None


def test_passages_are_the_beginnings_of_texts_spread_over_all():
    texts = ["word " * 100 + str(number) for number in range(30)]
    chosen = passages(["short", *texts])
    assert len(chosen) == 3
    assert all(len(text) <= 300 and text in texts[0] for text in chosen)
    assert passages(["a", "b"]) == ["a", "b"]
    assert passages([]) == []


def test_latencies_are_quantiles_of_what_is_timed():
    calls = []
    p50, p99 = latencies(calls.append, [1, 2, 3])
    assert calls == [1, 2, 3, 1, 2, 3], "what comes first is not timed"
    assert 0 <= p50 <= p99
    assert latencies(calls.append, []) is None
    assert {"processor", "cores", "torch", "python"} <= machine().keys()


def test_surprise_is_the_probability_of_each_piece(tmp_path):
    import weft

    (tmp_path / "texts.txt").write_text("the cat sat on a mat\n" * 6)
    recipe = {
        "task": {"name": "lm"},
        "data": {"train": str(tmp_path / "texts.txt"), "truncation": "window"},
        "tokenizer": {"name": "bytes"},
        "model": {"name": "ngram", "order": 3},
        "train": {"steps": 1},
    }
    pipeline = weft.train(recipe, out=tmp_path / "run")
    text = "the cät sat"
    pieces = surprise(pipeline, text)
    assert "".join(piece for piece, _ in pieces) == text
    assert [piece for piece, _ in pieces] == list(text), "the two bytes of a character are one piece"
    bits = {place: cost for place, (_, cost) in enumerate(pieces)}
    assert max(bits, key=bits.get) == text.index("ä"), "it never saw one"
    ended = surprise(pipeline, text[:3])
    whole = -pipeline.log_probs([text[:3]])[0] / math.log(2)
    assert sum(cost for _, cost in ended) < whole, "without the end of the text"
