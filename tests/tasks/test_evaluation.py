"""Evaluation: means over tokens, on what is left, and wrong answers in order."""

import numpy as np
import pytest
import torch
from tests.conftest import reversed_pairs
from tests.evaluation import encoded

from weft.data.batching.packed_items import pack
from weft.data.truncation import TruncationPolicy
from weft.errors import DataError
from weft.tasks.capabilities import ErrorAnalysis, WrongAnswer
from weft.tasks.evaluation import evaluate, list_errors, mean_loss
from weft.tasks.translate import Translate, TranslateExample

WORDS = [word for word, _ in reversed_pairs()]
LIMIT = TruncationPolicy(1024, "error")


def test_a_label_that_is_too_long_is_named(reverser):
    example = TranslateExample(text=WORDS[0], target="a" * 999)
    with pytest.raises(DataError, match="got 999 tokens"):
        evaluate(reverser.task, reverser.head, encoded(reverser.task, [example], TruncationPolicy(20, "error")))


def test_the_mean_loss_weighs_tokens_and_not_batches(reverser):
    pairs = [TranslateExample(text=word, target=word[::-1][: 1 + index % 5]) for index, word in enumerate(WORDS)]
    items = [item for one in reverser.task.encode_batch(pairs, reverser.tokenizer, LIMIT) for item in one]
    data = pack(items)
    whole = mean_loss(reverser.task, reverser.head, data, 10**6)
    assert mean_loss(reverser.task, reverser.head, data, 30) == pytest.approx(whole, rel=1e-5)
    with torch.inference_mode():
        each = [reverser.head(reverser.task.collate([item], np.random.default_rng(0))) for item in items]
    sums = [float(found["tokens"]) for found, _ in each]
    counts = [len(target) - 1 for _, target in items]
    assert whole == pytest.approx(sum(sums) / sum(counts), rel=1e-5)
    means = sum(total / count for total, count in zip(sums, counts, strict=True)) / len(items)
    assert whole != pytest.approx(means, rel=1e-2)


def test_evaluation_leaves_dropout_as_it_was(reverser):
    examples = [TranslateExample(text=word, target=word[::-1]) for word in WORDS]
    try:
        for training in (True, False):
            reverser.head.train(training)
            found = evaluate(reverser.task, reverser.head, encoded(reverser.task, examples, LIMIT)).metrics
            assert reverser.head.training == training
            assert found["exact_match"] == 1
    finally:
        reverser.head.eval()


def test_evaluation_judges_what_is_left(reverser):
    examples = [TranslateExample(text=word, target=word[::-1]) for word in [*WORDS, "a" * 50]]
    found = evaluate(
        reverser.task, reverser.head, encoded(reverser.task, examples, TruncationPolicy(20, "drop"))
    ).metrics
    assert found["exact_match"] == 1
    with pytest.raises(DataError, match="not one example is left to evaluate on"):
        evaluate(reverser.task, reverser.head, encoded(reverser.task, examples, TruncationPolicy(1, "drop")))


class Judged(Translate, ErrorAnalysis):
    """Says of each answer what it was told."""

    def errors(self, answers, examples):
        return answers


def test_errors_are_the_worst_first_and_of_equal_ones_the_most_confident(reverser):
    task = Judged(reverser.task.config)
    answers = [
        None,
        WrongAnswer("a", "b", 0.9, quality=0.5),
        WrongAnswer("a", "c", 0.6, details={"words": ["w"]}),
        WrongAnswer("a", "d", 0.7),
    ]
    examples = [TranslateExample(text=str(number), target="gold") for number in range(4)]
    assert list_errors(task, answers, examples) == [
        {"text": "3", "gold": "a", "predicted": "d", "score": 0.7},
        {"text": "2", "gold": "a", "predicted": "c", "score": 0.6, "words": ["w"]},
        {"text": "1", "gold": "a", "predicted": "b", "score": 0.9},
    ]


def test_errors_are_made_only_where_they_are_asked_for(reverser):
    word = WORDS[0]
    examples = [TranslateExample(text=word, target=target) for target in (word[::-1], "x")]
    data = encoded(reverser.task, examples, LIMIT)
    assert evaluate(reverser.task, reverser.head, data).errors is None
    (error,) = evaluate(reverser.task, reverser.head, data, errors=True).errors
    assert (error["text"], error["gold"], error["predicted"]) == (word, "x", word[::-1])
