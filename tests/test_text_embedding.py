"""Text embeddings: each pooling against its equation, alone and in batches; layers, special tokens, limits, order."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from weft import text_embedding as embedding
from weft.config.run import Run
from weft.formats.sentence_transformers import Pooling
from weft.pipeline import Pipeline
from weft.tasks.factory import build
from weft.text_embedding import chosen_layers
from weft.tokenization.trainable import train_tokenizer
from weft.tokens import Tokens

TEXTS = [
    "the play was long and the actors were tired",
    "a play",
    "",
    "they display what players play with , and play it well",
    "we went to see a new play , a short one",
    "to play is to win",
    "the",
]
LABELS = {"name": "classify", "labels": ["a", "b"]}
BERT = {"name": "bert", "width": 16, "heads": 2, "layers": 4, "max_positions": 32}
ELMO = {"name": "elmo", "embedding": 4, "filters": {1: 4, 2: 4}, "width": 12, "cells": 8}
BODIES = {
    "bert": (LABELS, BERT),
    "bert-mlm": ({"name": "mlm"}, BERT),
    "gpt": ({"name": "lm"}, {"name": "gpt", "width": 8, "heads": 2, "layers": 4, "max_positions": 32}),
    "gpt-classify": (LABELS, {"name": "gpt", "width": 8, "heads": 2, "layers": 2, "max_positions": 32}),
    "elmo": ({"name": "lm"}, ELMO),
    "elmo-tag": ({"name": "tag", "labels": ["a", "b"]}, ELMO),
    "rnn": ({"name": "lm"}, {"name": "rnn", "width": 8, "layers": 2}),
    "rnn-back": ({"name": "lm", "sequences": "documents"}, {"name": "rnn", "width": 8, "direction": "backward"}),
    "chars": (LABELS, {"name": "rnn", "direction": "both", "width": 8, "chars": 5}),
    "cnn": (LABELS, {"name": "cnn", "width": 9}),
    "word2vec": ({"name": "skipgram"}, {"name": "word2vec", "width": 6}),
}


def made(body, tokenizer="words", longest=28):
    task, model = BODIES[body]
    kind = "wordpiece" if body == "bert-mlm" else tokenizer
    size = {"min_count": 2} if kind == "words" else {"size": 300}
    data = {"train": "none.txt", "max_length": longest}
    raw = {"task": task, "data": data, "tokenizer": {"name": kind, **size}, "model": model, "train": {"steps": 1}}
    run = Run.parse(raw)
    torch.manual_seed(0)
    task, head = build(run, train_tokenizer(run.tokenizer, iter(TEXTS)))
    if not task.uses_chars:  # what fills a spelling up must stay nought
        for parameter in head.parameters():  # or vectors of a fresh word2vec would be next to nothing
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.5)
    return Pipeline(run, task, task.tokenizer, head.eval())


@pytest.fixture(scope="module", params=BODIES)
def pipeline(request):
    return made(request.param)


@pytest.fixture(scope="module")
def bert():
    return made("bert")


def special_tokens_of(name, special):
    """Return the special tokens around a text in each of the bodies above."""
    by_name = {
        "gpt": ([special.bos], []),
        "rnn": ([special.bos], []),
        "rnn-back": ([], [special.eos]),
        "word2vec": ([], []),
    }
    return by_name.get(name, ([special.bos], [special.eos]))


@torch.inference_mode()
def alone(pipeline, text, layers=(-1,)):
    """Return the hidden states (L, T, D) of a text alone in its batch, and its tokens."""
    task = pipeline.task
    name = next(key for key, (own, model) in BODIES.items() if made_of(pipeline, own, model))
    before, after = special_tokens_of(name, task.tokenizer.specials)
    ids = task.tokenizer.ids([text])[0]
    if name == "word2vec":
        ids = [id for id in ids if id != task.tokenizer.specials.unk]
    tokens = Tokens.pack([[*before, *ids, *after]])
    if task.uses_chars:
        tokens = tokens.with_chars([np.concatenate(task.char_ids([text])[0])])
    return pipeline.head.body.encode(tokens, layers), tokens


def made_of(pipeline, task, model):
    recipe = pipeline.run.dump()
    return all(recipe["task"].get(key) == value for key, value in task.items()) and all(
        recipe["model"].get(key) == value for key, value in model.items() if key != "filters"
    )


@torch.inference_mode()
def by_hand(pipeline, text, pool, layers=(-1,), combine="sum"):
    states, tokens = alone(pipeline, text, layers)
    if pool == "pooler":
        return pipeline.head.body.pooled_output(tokens)[0].numpy()
    joined = {"sum": states.sum(0), "mean": states.mean(0), "concat": torch.cat(list(states), -1)}[combine]
    x = joined.numpy()  # (T, D)
    if pool == "tokens":
        return x
    if not len(x):
        return np.zeros(x.shape[1], np.float32)
    return {"mean": x.mean(0), "max": x.max(0), "cls": x[0], "last": x[-1]}[pool]


@pytest.mark.parametrize("pool", ["mean", "max", "cls", "last", "pooler"])
def test_a_vector_is_what_its_equation_says(pipeline, pool):
    vectors = pipeline.embed(TEXTS, pool)
    assert vectors.dtype == np.float32
    texts = [text for text in TEXTS if text] if pool == "pooler" else TEXTS
    expected = {text: by_hand(pipeline, text, pool) for text in texts}
    assert vectors.shape == (len(TEXTS), len(expected["the"]))
    for text, row in zip(TEXTS, vectors, strict=True):
        if text in expected:
            np.testing.assert_allclose(row, expected[text], atol=2e-5)


def test_the_pools_differ(bert):
    vectors = [bert.embed(TEXTS[:1], pool) for pool in ("mean", "max", "cls", "last", "pooler")]
    for place, vector in enumerate(vectors):
        for other in vectors[place + 1 :]:
            assert np.abs(vector - other).max() > 0.01


def test_each_token_has_a_vector(pipeline):
    vectors = pipeline.embed(TEXTS, "tokens")
    assert isinstance(vectors, list)
    for text, rows in zip(TEXTS, vectors, strict=True):
        assert rows.dtype == np.float32
        assert len(rows) == len(pipeline.embedder("tokens").tokens(text))
        np.testing.assert_allclose(rows, by_hand(pipeline, text, "tokens"), atol=2e-5)


@pytest.mark.isa
@settings(max_examples=12, deadline=None)
@given(order=st.permutations(range(len(TEXTS))), pool=st.sampled_from(["mean", "max", "last", "pooler"]))
def test_a_text_has_the_same_vector_in_any_company(order, pool):
    pipeline = _bert()
    apart = np.concatenate([pipeline.embed([TEXTS[number]], pool) for number in order])
    np.testing.assert_allclose(pipeline.embed([TEXTS[number] for number in order], pool), apart, atol=2e-5)


@pytest.mark.isa
@settings(max_examples=12, deadline=None)
@given(order=st.lists(st.integers(0, len(TEXTS) - 1), min_size=1, max_size=60))
def test_it_is_the_same_to_the_last_bit_in_any_order(order):
    pipeline = _bert()
    vectors, turned = (pipeline.embed([TEXTS[number] for number in part]) for part in (order, order[::-1]))
    assert np.array_equal(vectors, turned[::-1])
    assert len({row.tobytes() for row in vectors}) == len(set(order))


def _bert(kept=[]):  # noqa: B006
    if not kept:
        kept.append(made("bert"))
    return kept[0]


def test_the_order_is_the_callers_however_texts_are_cut_into_chunks_and_batches(pipeline, monkeypatch):
    texts = [TEXTS[number * 5 % len(TEXTS)] for number in range(40)]
    whole, tokens = pipeline.embed(texts), pipeline.embed(texts, "tokens")
    monkeypatch.setattr(embedding, "CHUNK_SIZE", 3)
    monkeypatch.setattr(embedding, "BUDGET", 20)
    monkeypatch.setattr(embedding, "MAX_CHARS_PER_TOKEN_VECTORS", 50)
    np.testing.assert_allclose(pipeline.embed(iter(texts)), whole, atol=2e-5)
    for vectors, expected in zip(pipeline.embed(texts, "tokens"), tokens, strict=True):
        np.testing.assert_allclose(vectors, expected, atol=2e-5)
    assert [len(vectors) for vectors in pipeline.embedder().stream(texts)] == [3] * 13 + [1]


def test_a_stream_is_read_no_further_than_needed(bert, monkeypatch):
    monkeypatch.setattr(embedding, "CHUNK_SIZE", 2)
    seen = []
    stream = bert.embedder().stream(seen.append(text) or text for text in TEXTS)
    assert next(stream).shape == (2, 16)
    assert len(seen) <= 4
    stream.close()


@pytest.mark.parametrize("combine", ["sum", "mean", "concat"])
@pytest.mark.parametrize(
    ("layers", "chosen"), [("-4:", (1, 2, 3, 4)), ([1, 3], (1, 3)), ("0,2", (0, 2)), (":", range(5)), ("-2", (3,))]
)
def test_layers_are_combined(bert, layers, chosen, combine):
    for pool in ("mean", "max", "cls"):
        expected = [by_hand(bert, text, pool, tuple(chosen), combine) for text in TEXTS]
        np.testing.assert_allclose(bert.embed(TEXTS, pool, layers, combine), expected, atol=1e-4)


def test_one_layer_is_itself_whatever_the_combination():
    assert chosen_layers(-1, range(5)) == chosen_layers([-1], range(5)) == chosen_layers("-1", range(5)) == (-1,)
    assert chosen_layers(np.int64(2), range(5)) == (2,)
    assert chosen_layers("-9:2", range(5)) == (0, 1)
    assert chosen_layers("-4:", (-2, -1)) == (-2, -1)


@pytest.mark.parametrize("layers", ["", "a", "1:2:3", "9:", [], [1.5], True, [True], 1.0, "1;2", None])
def test_layers_that_are_none_are_refused(bert, layers):
    with pytest.raises(weft.ConfigError, match="layers: must be a layer such as -1"):
        bert.embed(TEXTS, layers=layers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 7}, "layers: a bert has 0, the embeddings, to 4"),
        ({"pool": "men"}, "pool: there is no 'men'; did you mean 'mean'"),
        ({"combine": "add"}, "combine: there is no 'add'; known: concat, mean, sum"),
        ({"pool": "pooler", "layers": "-2:"}, "the pooled output is the body's own"),
    ],
)
def test_what_is_asked_wrongly_is_named(bert, options, message):
    with pytest.raises(weft.ConfigError, match=message):
        bert.embed(TEXTS, **options)


@pytest.mark.parametrize("texts", [["a", None], ["a", 3], ["a", ["b"]], ["a", {"text": "b"}]])
def test_what_is_no_text_is_named(bert, texts):
    with pytest.raises(weft.DataError, match="text 2: must be a text, but is"):
        bert.embed(texts)


def test_a_lone_text_is_a_list_of_one_and_no_text_is_none(bert):
    np.testing.assert_array_equal(bert.embed(TEXTS[0]), bert.embed(TEXTS[:1]))
    assert bert.embed([]).shape == (0, 16)
    assert bert.embed([], layers="-2:", combine="concat").shape == (0, 32)
    assert bert.embed([], "tokens") == []


def test_unknown_words_alone_have_the_vector_nought_in_word2vec():
    pipeline = made("word2vec")
    vectors = pipeline.embed(["zebra", "play zebra", "play"])
    assert not vectors[0].any()
    np.testing.assert_array_equal(vectors[1], vectors[2])
    assert pipeline.embed(["zebra"], "tokens")[0].shape == (0, 6)
    assert not pipeline.embed(["zebra", "yak"], "last").any()


def test_errors_are_kept_and_the_other_texts_have_their_vectors(bert):
    long = " ".join(["the"] * 40)
    texts = [TEXTS[0], long, weft.DataError("is broken"), 3, TEXTS[1]]
    embedder = bert.embedder(on_error="nan")
    vectors = embedder.all(texts)
    np.testing.assert_allclose(vectors[[0, 4]], bert.embed([TEXTS[0], TEXTS[1]]), atol=1e-5)
    assert np.isnan(vectors[1:4]).all()
    assert list(embedder.errors) == [3, 4, 2]
    assert "has 42 tokens" in str(embedder.errors[2])
    assert str(embedder.errors[4]) == "must be a text, but is 3 instead"
    assert [len(tokens) for tokens in bert.embedder("tokens", on_error="nan").all(texts)][1:4] == [0, 0, 0]
    with pytest.raises(weft.DataError, match="text 3: is broken"):
        bert.embed([TEXTS[0], TEXTS[1], texts[2]])


@pytest.mark.parametrize(("truncation", "cuts"), [("cut", True), ("window", True), ("drop", False), ("error", False)])
def test_the_recipe_says_whether_long_texts_are_cut(bert, truncation, cuts):
    data = bert.run.data.model_copy(update={"truncation": truncation})
    pipeline = replace(bert, run=bert.run.model_copy(update={"data": data}))
    assert pipeline.embedder().truncate is cuts
    assert pipeline.embedder(truncate=not cuts).truncate is not cuts


def test_too_long_a_text_is_an_error_unless_it_is_to_be_cut(bert):
    words = TEXTS[0].split()
    long = [*TEXTS, " ".join(words * 4), " ".join(words * 5)]
    with pytest.raises(
        weft.DataError, match=r"text 8: has 38 tokens, special tokens included, and 30 are read; .*truncate"
    ):
        bert.embed(long)
    cut = " ".join((words * 4)[:28])
    embedder = bert.embedder(truncate=True)
    np.testing.assert_allclose(embedder.all(long)[-2:], bert.embed([cut, cut]), atol=2e-5)
    assert embedder.cut == 2
    spelt = made("elmo", longest=7)
    np.testing.assert_allclose(
        spelt.embed([TEXTS[0], "a play"], truncate=True), spelt.embed([" ".join(words[:7]), "a play"]), atol=2e-5
    )
    backward = made("rnn-back", longest=4)
    assert backward.embedder("tokens", truncate=True).tokens("the the play play a a a a") == [
        *("the", "the", "play", "play", "a", "</s>")
    ]


def test_the_model_says_how_much_it_reads(bert):
    wide = made("bert", longest=1000)
    assert wide.embedder().longest == 32
    assert bert.embedder().longest == 30
    assert replace(bert, pooling=Pooling("cls", longest=9)).embedder().longest == 9


def test_a_models_own_pooling_is_the_default(bert):
    own = replace(bert, pooling=Pooling("cls", normalize=True, lowercase=True))
    vectors = own.embed([text.upper() for text in TEXTS])
    np.testing.assert_allclose(vectors, bert.embed(TEXTS, "cls", normalize=True), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(own.embed(TEXTS, "max", normalize=False), bert.embed(TEXTS, "max"))
    assert np.abs(bert.embed([TEXTS[0].upper()], "cls", normalize=True) - vectors[:1]).max() > 1e-3


def test_what_does_not_encode_is_refused(monkeypatch):
    monkeypatch.setitem(BODIES, "ngram", ({"name": "lm"}, {"name": "ngram"}))
    with pytest.raises(weft.RoleError, match="'ngram', as configured, gives texts no vectors"):
        made("ngram").embed(["abc"])


@pytest.mark.isa
def test_lower_precision_is_near(bert, tmp_path):
    folder = bert.save(tmp_path / "saved")
    exact = bert.embed(TEXTS, normalize=True)
    for precision in ("bf16", "int8"):
        vectors = weft.load(folder, "cpu", precision=precision).embed(TEXTS, normalize=True)
        assert vectors.dtype == np.float32
        assert (vectors * exact).sum(1).min() > 0.98


def test_training_mode_has_no_say(bert):
    vectors = bert.embed(TEXTS)
    bert.head.train()
    np.testing.assert_array_equal(bert.embed(TEXTS), vectors)


# Negative controls: wrong pooling is caught.


@pytest.mark.parametrize("broken", ["padding counts", "specials left out", "neighbours mix"])
def test_a_wrong_pool_is_caught(bert, broken, monkeypatch):
    true = embedding.pooled

    def wrong(states, tokens, pool, combine):
        lengths = tokens.lengths.clone()
        if broken == "padding counts":
            return true(states, tokens, pool, combine) * (lengths / lengths.max())[:, None]
        if broken == "specials left out":
            rows = [part[:, 1:-1].mean(1)[0] for part in states.split(lengths.tolist(), 1)]
            return torch.stack(rows).nan_to_num()
        return true(states.roll(1, 1), tokens, pool, combine)

    monkeypatch.setattr(embedding, "pooled", wrong)
    with pytest.raises(AssertionError):
        test_a_vector_is_what_its_equation_says(bert, "mean")


def test_an_order_that_is_lost_is_caught(bert, monkeypatch):
    true = embedding._TokenizedTexts
    wrong = lambda ids, lengths, rows, *others: true(ids, lengths, rows[::-1], *others)  # noqa: E731
    monkeypatch.setattr(embedding, "_TokenizedTexts", wrong)
    with pytest.raises(AssertionError):
        test_a_vector_is_what_its_equation_says(bert, "mean")
