"""Inference: answers in order, independent of the batch, in bounded memory."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import reversed_pairs
from tests.test_text_embedding import made

from weft.data.truncation import TruncationPolicy
from weft.errors import DataError
from weft.tasks import inference as module
from weft.tasks.inference import predict
from weft.tasks.translate import Translate, TranslateExample

WORDS = [word for word, _ in reversed_pairs()]
ODD = ["", "a", "fedcba" * 6, "zz"]  # of other lengths than it was trained on, and unknown letters
LIMIT = TruncationPolicy(1024, "error")


def ask(pipeline, words, budget=16384, task=None, **options):
    task = task or pipeline.task
    chosen = task.Options(max_length=60, **options)
    examples = (TranslateExample(text=word) for word in words)
    return list(predict(task, pipeline.head, examples, LIMIT, chosen, budget))


def same(ours, theirs):
    return all(
        a["text"] == b["text"] and a["score"] == pytest.approx(b["score"], abs=2e-5)
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.fixture(scope="module")
def alone(reverser):
    return {word: ask(reverser, [word])[0] for word in [*WORDS[:12], *ODD]}


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_an_answer_does_not_hang_on_its_neighbours(reverser, alone, data):
    words = data.draw(st.lists(st.sampled_from(sorted(alone)), min_size=1, max_size=30))
    budget = data.draw(st.sampled_from([1, 40, 300, 16384]))
    assert same(ask(reverser, words, budget), [alone[word] for word in words])


class Leaky(Translate):
    """Cuts every source of a batch to the shortest."""

    def collate(self, items, rng):
        least = min(len(source) for source, _ in items)
        return super().collate([(source[-least:], target) for source, target in items], rng)


def test_an_answer_that_does_is_caught(reverser, alone):
    task = Leaky(reverser.task.config)
    task.tokenizer = reverser.tokenizer
    words = sorted(alone)
    assert same(ask(reverser, words, budget=1, task=task), [alone[word] for word in words])
    assert not same(ask(reverser, words, task=task), [alone[word] for word in words])


def test_beams_do_not_hang_on_neighbours_either(reverser):
    words = [*WORDS[:6], *ODD]
    alone = [ask(reverser, [word], beam=3, num_return_sequences=3)[0] for word in words]
    together = ask(reverser, words, beam=3, num_return_sequences=3)
    for ours, theirs in zip(together, alone, strict=True):
        assert same(ours["candidates"], theirs["candidates"])


@pytest.mark.parametrize("at_once", [1, 7, 64, 1024])
def test_order_is_kept_over_chunks_and_samples_do_not_change(reverser, monkeypatch, at_once):
    words = [WORDS[index % len(WORDS)] + "a" * (index % 4) for index in range(100)]
    expected = ask(reverser, words, sample=True, temperature=2.0)
    monkeypatch.setattr(module, "INFERENCE_CHUNK", at_once)
    assert same(ask(reverser, words, sample=True, temperature=2.0), expected)


class Tracked(TranslateExample):
    pass


def test_a_stream_is_read_a_chunk_ahead_and_then_let_go(reverser, monkeypatch):
    monkeypatch.setattr(module, "INFERENCE_CHUNK", 32)
    live, read, most = weakref.WeakSet(), 0, 0

    def stream():
        nonlocal read, most
        for number in range(640):
            example = Tracked(text=WORDS[number % len(WORDS)])
            live.add(example)
            read, most = number + 1, max(most, len(live))
            yield example

    answers = predict(reverser.task, reverser.head, stream(), LIMIT, reverser.task.options())
    for done, answer in enumerate(answers):
        assert answer["text"] == WORDS[done % len(WORDS)][::-1]
        assert read - done <= 32
    assert read == 640
    assert most <= 2 * 32 + 1  # the chunk that is read while the one before it goes


def test_a_list_would_be_caught_by_that(reverser, monkeypatch):
    monkeypatch.setattr(module, "INFERENCE_CHUNK", 10**6)
    read = 0

    def stream():
        nonlocal read
        for word in WORDS:
            read += 1
            yield TranslateExample(text=word)

    next(predict(reverser.task, reverser.head, stream(), LIMIT, reverser.task.options()))
    assert read == len(WORDS)


def test_nothing_in_nothing_out(reverser):
    assert ask(reverser, []) == []


def test_an_example_that_is_dropped_or_too_long_is_named(reverser):
    examples = [TranslateExample(text="ab"), TranslateExample(text="a" * 9)]
    chosen = reverser.task.options()
    for policy, said in (("drop", "example 12: nothing is left of it"), ("error", "example 12: got 9 tokens")):
        with pytest.raises(DataError, match=said):
            list(predict(reverser.task, reverser.head, examples, TruncationPolicy(5, policy), chosen, start=10))


def test_an_example_that_the_model_cannot_read_is_named():
    bert = made("bert", longest=100)  # which reads 32 tokens
    texts = ["it was long", "a short one", *["so it was " * 12] * 2, "to play"]
    with pytest.raises(DataError, match=r"^example 8: a sequence has 3\d+ tokens, but the model has learned 32 pos"):
        list(bert.answers(texts, start=5))
    assert len(list(bert.answers(texts[:2]))) == 2


class Blind(Translate):
    """Makes nothing of an example."""

    def encode_batch(self, examples, tokenizer, limit):
        return [[] for _ in examples]


def test_where_nothing_was_cut_nothing_is_said_of_it(reverser):
    task = Blind(reverser.task.config)
    task.tokenizer = reverser.tokenizer
    with pytest.raises(DataError, match=r"example 1: nothing is left of it to answer$"):
        ask(reverser, ["ab"], task=task)


def test_what_is_right_is_not_needed_to_answer(reverser):
    example = TranslateExample(text=WORDS[0], target="a" * 999)
    chosen = reverser.task.options()
    (answer,) = predict(reverser.task, reverser.head, [example], TruncationPolicy(20, "error"), chosen)
    assert answer["text"] == WORDS[0][::-1]


@pytest.mark.parametrize("options", [{}, {"beam": 3}, {"sample": True, "seed": 4}])
def test_batches_that_are_answered_side_by_side_answer_the_same(reverser, monkeypatch, two_threads, options):
    words = [*WORDS, *ODD]
    whole = ask(reverser, words, **options)
    monkeypatch.setattr(
        module, "MAX_LOGITS", 7 * reverser.head.logits_per_item(reverser.task.Options(**options))
    )  # seven at a time
    assert same(ask(reverser, words, **options), whole)
    assert torch.get_num_threads() == 2
    assert not same(ask(reverser, words[::-1], **options), whole)
