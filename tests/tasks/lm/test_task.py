"""The language-modelling task, on small recurrent models; other models have tests of their own."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.evaluation import encoded

import weft
from weft.config.run import Run
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError, RoleError
from weft.tasks.batch import IGNORE_INDEX
from weft.tasks.evaluation import evaluate
from weft.tasks.factory import build, make_task
from weft.tokenization.trainable import train_tokenizer
from weft.tokens import Tokens

TEXTS = ["the cat sat on the mat", "a dog sat", "", "the dog and the cat ran", "sat the mat on a cat"]


def recipe(**changes):
    raw = {
        "task": {"name": "lm"},
        "data": {"train": "none.txt", "max_length": 8},
        "tokenizer": {"name": "bpe", "size": 270},
        "model": {"name": "rnn", "width": 16},
        "train": {"steps": 1},
    }
    for key, value in changes.items():
        raw[key] = {**raw[key], **value}
    return Run.parse(raw)


def build_task(run):
    torch.manual_seed(0)
    tokenizer = train_tokenizer(run.tokenizer, iter(TEXTS * 3))
    task, head = build(run, tokenizer)
    return task, head.double().eval().requires_grad_(False)


def examples(task, texts=TEXTS):
    return [task.Example(text=text) for text in texts]


def by_hand(task, head, text, carried=()):
    """Return the loss of each token of a text, from the logits of its whole prefix."""
    ids = task.tokenizer.ids([text])[0]
    specials = task.tokenizer.specials
    read, follow = [specials.bos, *ids], [*ids, specials.eos]
    logits = head.body.logits(Tokens.pack([[*carried, *read]])).detach().log_softmax(-1)[len(carried) :]
    return [-float(row[id]) for row, id in zip(logits, follow, strict=True)], read


def test_documents_on_their_own_have_the_loss_of_the_equation():
    task, head = build_task(recipe(task={"sequences": "documents"}, data={"truncation": "error", "max_length": 64}))
    losses = [one for text in TEXTS for one in by_hand(task, head, text)[0]]
    result = task.evaluate(head, encoded(task, examples(task), TruncationPolicy(64, "error"))).metrics
    assert result["loss"] == pytest.approx(np.mean(losses), rel=1e-9)
    assert result["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-9)
    size = sum(len(text) + 1 for text in TEXTS)
    assert result["bits_per_byte"] == pytest.approx(sum(losses) / math.log(2) / size, rel=1e-9)


def test_a_stream_that_is_read_on_has_the_loss_of_one_long_text():
    task, head = build_task(recipe(task={"sequences": "bptt", "bptt": 5}))
    losses, carried = [], []
    for text in TEXTS:
        own, read = by_hand(task, head, text, carried)
        losses, carried = losses + own, carried + read
    result = task.evaluate(head, encoded(task, examples(task), TruncationPolicy(8, "error"))).metrics
    assert result["loss"] == pytest.approx(np.mean(losses), rel=1e-9)


def test_rows_of_a_long_stream_have_come_to_what_they_remember():
    task, head = build_task(recipe(task={"sequences": "bptt", "bptt": 32}))
    texts = TEXTS * 120
    whole = [id for text in texts for id in by_hand_ids(task, text)]
    logits = head.body.logits(Tokens.pack([whole])).detach().log_softmax(-1)
    follow = torch.tensor([*whole[1:], task.tokenizer.specials.bos])
    follow[follow == task.tokenizer.specials.bos] = task.tokenizer.specials.eos
    must = -float(logits.gather(1, follow[:, None]).mean())
    result = task.evaluate(head, encoded(task, examples(task, texts), TruncationPolicy(8, "error"))).metrics["loss"]
    assert len(whole) > 4 * 1024  # several rows
    assert result == pytest.approx(must, rel=1e-6)


def by_hand_ids(task, text):
    return [task.tokenizer.specials.bos, *task.tokenizer.ids([text])[0]]


@pytest.mark.parametrize("stride", [None, 1, 3, 8])
def test_windows_of_a_stream_see_as_far_back_as_the_stride_leaves_them(stride):
    task, head = build_task(recipe(task={"sequences": "windows", "stride": stride}))
    ids = [id for text in TEXTS for id in by_hand_ids(task, text)]
    specials, width = task.tokenizer.specials, 8
    losses = []
    for place in range(len(ids)):
        step = stride or width
        first = 0 if place < width else (place - width) // step * step + step
        logits = head.body.logits(Tokens.pack([ids[first : place + 1]])).detach().log_softmax(-1)[-1]
        follow = ids[place + 1] if place + 1 < len(ids) else specials.bos
        losses.append(-float(logits[specials.eos if follow == specials.bos else follow]))
    result = task.evaluate(head, encoded(task, examples(task), TruncationPolicy(8, "error"))).metrics
    assert result["loss"] == pytest.approx(np.mean(losses), rel=1e-9)


@given(st.lists(st.text("abc ", max_size=12), min_size=1, max_size=4))
@settings(max_examples=12)
def test_a_text_alone_is_as_likely_as_in_company(texts):
    task, head = build_task(recipe())
    together = task.log_probs(head, texts)
    assert together == pytest.approx([task.log_probs(head, [text])[0] for text in texts], rel=1e-9)
    assert together == pytest.approx([-sum(by_hand(task, head, text)[0]) for text in texts], rel=1e-9)


@pytest.mark.parametrize("stride", [None, 1, 3, 8])
def test_windows_of_a_backward_model_see_as_far_ahead_as_the_stride_leaves_them(stride):
    task, head = build_task(recipe(task={"sequences": "windows", "stride": stride}, model={"direction": "backward"}))
    ids = [id for text in TEXTS for id in by_hand_ids(task, text)]
    specials, width, step, losses = task.tokenizer.specials, 8, stride or 8, []
    read = [specials.eos if id == specials.bos else id for id in [*ids[1:], specials.bos]]
    for place in range(len(ids)):
        mirrored = len(ids) - 1 - place
        last = len(ids) - (0 if mirrored < width else (mirrored - width) // step * step + step)
        logits = head.body.logits(Tokens.pack([read[place:last]]), direction="backward").log_softmax(-1)[0]
        losses.append(-float(logits[ids[place]]))
    result = task.evaluate(head, encoded(task, examples(task), TruncationPolicy(8, "error"))).metrics
    assert result["loss"] == pytest.approx(np.mean(losses), rel=1e-9)


@pytest.mark.parametrize("direction", ["backward", "both"])
def test_other_directions_have_their_targets(direction):
    task, head = build_task(recipe(model={"direction": direction}, task={"sequences": "documents"}))
    items = task.encode_batch(examples(task, ["the cat", "a dog"]), task.tokenizer, TruncationPolicy(64, "error"))
    batch = task.collate([item for items in items for item in items], np.random.default_rng(0))
    for read, wanted in zip(batch.tokens.split(), batch.tokens.split(batch.targets), strict=True):
        if direction == "backward":
            assert wanted.tolist()[1:] == read.tolist()[:-1]
            assert int(wanted[0]) == task.tokenizer.specials.bos
        else:
            assert wanted.tolist() == [IGNORE_INDEX, *read.tolist()[1:-1], IGNORE_INDEX]
    assert batch.counts == {"tokens": int((batch.targets != IGNORE_INDEX).sum())}
    assert math.isfinite(float(head(batch)[0]["tokens"]))


def test_what_sees_both_sides_has_no_bits_per_byte_and_says_so():
    task, head = build_task(recipe(model={"direction": "both"}))
    result = task.evaluate(head, encoded(task, examples(task), TruncationPolicy(64, "error")))
    assert "bits_per_byte" not in result.metrics
    assert "not that of the text" in result.note
    with pytest.raises(RoleError, match="does not generate"):
        head.predict(task.collate([(np.array([0, 5]), np.array([5, 1]))], np.random.default_rng(0)), task.options())


def test_pieces_of_a_long_document_leave_no_token_out():
    task, _ = build_task(recipe(task={"sequences": "documents"}))
    whole = [*by_hand_ids(task, TEXTS[0])[1:], task.tokenizer.specials.eos]
    items = task.encode(task.Example(text=TEXTS[0]), task.tokenizer, TruncationPolicy(4, "window"))
    assert len(items) > 2
    assert [id for item in items for id in item[1].tolist()] == whole
    assert all(a[1][-1] == b[0][0] for a, b in pairwise(items))


def test_bits_per_byte_after_a_drop_are_of_the_texts_that_are_left():
    task, head = build_task(recipe(task={"sequences": "documents"}))
    texts = sorted(TEXTS, key=len)[:-1]
    kept = max(len(by_hand_ids(task, text)) for text in texts)
    dropped = task.evaluate(head, encoded(task, examples(task), TruncationPolicy(kept, "drop")))
    expected = task.evaluate(head, encoded(task, examples(task, texts), TruncationPolicy(kept, "error")))
    assert dropped.metrics["bits_per_byte"] == pytest.approx(expected.metrics["bits_per_byte"])


@pytest.mark.parametrize(("policy", "given"), [("window", True), ("cut", False)])
def test_text_that_is_left_out_is_not_divided_by(policy, given):
    """Its bytes would count, and its tokens would not."""
    task, head = build_task(recipe(task={"sequences": "documents"}))
    result = task.evaluate(head, encoded(task, examples(task), TruncationPolicy(8, policy)))
    assert ("bits_per_byte" in result.metrics) is given
    assert given or "data.truncation leaves out some of the text" in result.note


def test_nothing_to_judge_by_is_an_error_and_not_a_perplexity_of_one():
    task, head = build_task(recipe(task={"sequences": "documents"}))
    with pytest.raises(DataError, match="not one example is left"):
        evaluate(task, head, encoded(task, examples(task), TruncationPolicy(0, "drop")))
    with pytest.raises(DataError, match="not one example is left"):
        evaluate(task, head, encoded(task, [], TruncationPolicy(8, "error")))


def test_bits_per_byte_that_will_not_be_given_are_refused_before_training(tmp_path):
    (tmp_path / "a.txt").write_text("The cat, he sat\n" * 4)
    data = {"train": str(tmp_path / "a.txt"), "valid": str(tmp_path / "a.txt")}
    lossy = {"name": "words", "lowercase": True}
    raw = {**recipe().dump(), "data": data, "tokenizer": lossy, "train": {"steps": 1, "metric": "bits_per_byte"}}
    with pytest.raises(ConfigError, match="train.metric: bits_per_byte will not be given .* loses some of the text"):
        weft.train(raw, out=tmp_path / "run")


def test_a_model_of_few_positions_is_judged_though_it_could_not_write_so_much(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(text for text in TEXTS if text) + "\n")
    data = {"train": str(tmp_path / "a.txt"), "valid": str(tmp_path / "a.txt"), "max_length": 32}
    small = {"name": "gpt", "width": 8, "heads": 1, "layers": 1, "max_positions": 32}
    raw = {**recipe().dump(), "task": {"name": "lm", "sequences": "documents"}, "data": data, "model": small}
    assert weft.train(raw, out=tmp_path / "run").evaluate()["perplexity"] > 1


def test_words_that_are_not_known_pay_for_their_spelling():
    run = recipe(tokenizer={"name": "words", "size": 8, "split": "whitespace"}, task={"sequences": "documents"})
    run = Run.parse({**run.dump(), "tokenizer": {"name": "words", "size": 8, "split": "whitespace"}})
    task, head = build_task(run)
    known, strange = "the cat", "the zebra"
    first, second = (
        task.evaluate(head, encoded(task, examples(task, [text]), TruncationPolicy(64, "error"))).metrics
        for text in (known, strange)
    )
    paid = second["bits_per_byte"] * (len(strange) + 1) - second["loss"] * 3 / math.log(2)
    assert paid == pytest.approx(math.log2(257) * (len("zebra") + 1))
    assert first["bits_per_byte"] * (len(known) + 1) == pytest.approx(first["loss"] * 3 / math.log(2))


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [({"name": "words", "size": 50}, "the cat."), ({"name": "bpe", "size": 270, "lowercase": True}, "The cat")],
)
def test_a_tokenizer_that_loses_text_gets_no_bits_per_byte(tokenizer, text):
    task, head = build_task(Run.parse({**recipe().dump(), "tokenizer": tokenizer}))
    result = task.evaluate(head, encoded(task, examples(task, [text]), TruncationPolicy(64, "error")))
    assert "bits_per_byte" not in result.metrics
    assert "loses some of the text" in result.note


def test_the_unknown_word_in_a_text_that_is_already_cut_is_known_as_such():
    run = Run.parse({**recipe().dump(), "tokenizer": {"name": "words", "size": 50, "split": "whitespace"}})
    task, _ = build_task(run)
    specials = task.tokenizer.specials
    assert task.tokenizer.ids(["the <unk> @-@ </s>"])[0][1] == specials.unk
    assert task.tokenizer.ids(["</s> <s>"])[0] == [specials.unk, specials.unk]


def test_a_model_that_sees_both_sides_has_no_bits_per_byte():
    with pytest.raises(ConfigError, match="train.metric: a model that sees both sides of a word has no bits_per_byte"):
        make_task(recipe(model={"direction": "both"}, train={"metric": "bits_per_byte"}))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    (folder / "train.txt").write_text("\n".join(TEXTS[:2] + TEXTS[3:]) * 20)
    raw = recipe(
        data={"train": str(folder / "train.txt"), "valid": str(folder / "train.txt")},
        task={"bptt": 8},
        train={"steps": 60, "lr": 0.02, "batch_tokens": 64, "eval_every": 30},
    )
    weft.train(raw, out=folder / "run")
    return folder / "run"


def test_a_model_learns_and_goes_on(run):
    pipeline = weft.load(run, "cpu")
    assert pipeline.evaluate()["perplexity"] < 6
    (answer,) = pipeline("the cat", {"max_length": 5, "logprobs": True})
    assert answer["logprob"] == pytest.approx(sum(value for _, value in answer["tokens"]), abs=1e-4)
    whole = pipeline.log_probs(["the cat" + answer["text"]])[0]
    assert whole < answer["logprob"] < 0


def test_a_stream_and_an_answer_are_the_same_and_end_before_a_stop_word(run):
    pipeline = weft.load(run, "cpu")
    options = {"sample": True, "seed": 3, "max_length": 30, "min_length": 20}
    (whole,) = pipeline("the", options)
    assert "".join(pipeline.stream("the", options)) == whole["text"]
    word = whole["text"][4:6]
    assert len(word) == 2
    (cut,) = pipeline("the", {**options, "stop": [word]})
    with pytest.raises(ConfigError, match="options.stop.0: .* at least 1 character"):
        pipeline("the", {**options, "stop": [""]})
    assert cut["text"] == whole["text"][: whole["text"].index(word)]
    assert cut["logprob"] >= whole["logprob"]
    assert "".join(pipeline.stream("the", {**options, "stop": [word]})) == cut["text"]


def test_it_samples_unless_it_is_asked_not_to(run):
    pipeline = weft.load(run, "cpu")
    assert pipeline("the", {"max_length": 30}) == pipeline("the", {"max_length": 30, "sample": True})
    assert pipeline("the", {"max_length": 30}) != pipeline("the", {"max_length": 30, "seed": 1})
    greedy = pipeline("the", {"max_length": 30, "sample": False})
    assert greedy == pipeline("the", {"max_length": 30, "top_k": 1}) != pipeline("the", {"max_length": 30})


@pytest.mark.parametrize("search", [{"sample": False}, {"seed": 2}, {"sample": False, "beam": 3}])
def test_what_must_not_be_written_or_repeated_is_not(run, search):
    pipeline = weft.load(run, "cpu")
    options = {"max_length": 30, "min_length": 20, **search}
    (plain,) = pipeline("the", options)
    word = plain["text"].split()[1]
    (other,) = pipeline("the", {**options, "bad_words": [word]})
    assert word not in other["text"].split()
    free, once = (
        list(pairwise(name for name, _ in pipeline("the", {**options, "logprobs": True, **more})[0]["tokens"]))
        for more in ({}, {"no_repeat_ngram_size": 2, "min_length": 0})
    )
    assert len(set(once)) == len(once)
    assert len(set(free)) < len(free), "the negative control"
    (penalized,) = pipeline("the", {**options, "repetition_penalty": 1.5, "logprobs": True})
    assert penalized["text"] != plain["text"]
    own = sum(value for _, value in penalized["tokens"])
    assert penalized["logprob"] == pytest.approx(own, abs=1e-4), "the model's own, not the penalized"


def test_minimal_pairs_are_judged_by_which_is_likelier(run, tmp_path):
    pipeline = weft.load(run, "cpu")
    pairs = [
        ("the cat sat on the mat", "cat the sat mat on the"),
        ("a dog sat", "sat dog a"),
        ("dog a sat", "a dog sat"),
    ]
    lines = [
        json.dumps({"sentence_good": good, "sentence_bad": bad, "UID": "order", "linguistics_term": "syntax"})
        for good, bad in pairs
    ]
    (tmp_path / "order.jsonl").write_text("\n".join(lines) + "\n")
    result = pipeline.minimal_pairs(tmp_path)
    must = [pipeline.log_probs([good])[0] > pipeline.log_probs([bad])[0] for good, bad in pairs]
    assert must == [True, True, False]
    assert result.accuracy == result.phenomena["syntax"] == pytest.approx(2 / 3)
    (tmp_path / "bad.jsonl").write_text('{"sentence_good": 1}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:1: must be an object"):
        pipeline.minimal_pairs(tmp_path)
    with pytest.raises(DataError, match="none: is no folder"):
        pipeline.minimal_pairs(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no .jsonl files"):
        pipeline.minimal_pairs(tmp_path / "empty")


def test_a_prepared_corpus_is_judged_as_its_text_is(tmp_path):
    from weft.tasks.corpus.build import prepare

    (tmp_path / "a.txt").write_text("\n".join(text for text in TEXTS if text) + "\n")
    data = {"train": str(tmp_path / "a.txt"), "valid": str(tmp_path / "a.txt")}
    prepare(recipe(data=data), tmp_path / "corpus", ("train", "valid"), 1)
    folder = str(tmp_path / "corpus")
    train = {"steps": 2, "eval_every": 1}
    plain = weft.train(recipe(data=data, train=train), out=tmp_path / "plain")
    read = weft.train(recipe(data={"train": folder, "valid": folder}, train=train), out=tmp_path / "prepared")
    assert read.evaluate() == pytest.approx(plain.evaluate())


def test_one_text_needs_no_list_and_what_is_no_text_has_no_probability(run):
    pipeline = weft.load(run, "cpu")
    assert pipeline.log_probs("the cat") == pipeline.log_probs(["the cat"])
    with pytest.raises(DataError, match="log_probs: takes texts, but got 3; give strings"):
        pipeline.log_probs(["the cat", 3])


def test_pairs_take_the_place_of_data(run, tmp_path):
    from typer.testing import CliRunner

    from weft.cli.main import app

    message = CliRunner().invoke(app, ["evaluate", str(run), "text.txt", "--blimp", str(tmp_path)]).exception
    assert isinstance(message, ConfigError)
    assert "--blimp: replaces DATA" in str(message)


def test_a_model_that_goes_both_ways_has_no_last_loss_to_look_back_from():
    from weft.analysis.gradient_flow import gradient_norms

    sizes = {"embedding": 4, "filters": {1: 4}, "highways": 1, "width": 8, "cells": 8}
    run = Run.parse({**recipe().model_dump(), "model": {"name": "elmo", **sizes}})
    task, head = build_task(run)
    items = task.encode(task.Example(text="a dog"), task.tokenizer, TruncationPolicy(100, "error"))
    with pytest.raises(RoleError, match="'elmo' is bidirectional"):
        gradient_norms(task, head, task.collate(items, np.random.default_rng(0)))
