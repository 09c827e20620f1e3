"""Contrastive learning: batches, negatives, losses and vectors, with any encoder; metrics with and without scores."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.labelling import made
from torch.nn import functional as F

import weft
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.config.schema import Section
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.tasks.contrastive import ContrastiveExample, group_sequences
from weft.tasks.encoding import EvaluationData
from weft.training.run import train_run

LIMIT = TruncationPolicy(1024, "error")
PAIRS = [("a b c", "c b a"), ("d e", "e d"), ("f g h", "h g f"), ("b d f", "f d b"), ("a g", "g a"), ("c e h", "h e c")]
BERT = {"name": "bert", "width": 16, "heads": 2, "layers": 2, "max_positions": 32, "dropout": 0.0}
BODIES = {
    "bert": BERT,
    "gpt": {"name": "gpt", "width": 16, "heads": 2, "layers": 2, "max_positions": 32, "dropout": 0.0},
    "rnn": {"name": "rnn", "width": 8, "direction": "both"},
    "rnn-chars": {"name": "rnn", "width": 8, "chars": 5},
    "cnn": {"name": "cnn", "width": 9},
    "elmo": {"name": "elmo", "embedding": 4, "filters": {1: 4, 2: 4}, "width": 12, "cells": 8},
    "word2vec": {"name": "word2vec", "width": 6},
}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def pair_rows(pairs=PAIRS):
    return [{"text": text, "pair": pair} for text, pair in pairs]


@pytest.fixture
def recipe(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", pair_rows())
    return {
        "task": {"name": "contrastive"},
        "data": {"train": path, "valid": path},
        "tokenizer": {"name": "words"},
        "model": BERT,
        "train": {"steps": 4, "batch_size": 3, "lr": 0.003, "device": "cpu"},
    }


def asked(text, pair=None, negative=None, score=None):
    return ContrastiveExample(text=text, pair=pair, negative=negative, score=score)


def collated(task, *examples, limit=LIMIT):
    items = [item for own in task.encode_batch(examples, task.tokenizer, limit) for item in own]
    return task.collate(items, np.random.default_rng(0))


def loss_of(head, batch):
    return head(batch)[0]["pairs"]


# Examples to batches.


def test_a_batch_has_the_texts_their_positives_and_the_hard_negatives(recipe):
    task, _ = made(recipe)
    batch = collated(task, asked("a b", "b a"), asked("d e f", None, "h"), asked("g", "f", "c e"))
    bos, eos = task.tokenizer.specials.bos, task.tokenizer.specials.eos
    texts = ["a b", "d e f", "g", "b a", "d e f", "f", "h", "c e"]  # a text without a pair is its own positive
    assert [ids.tolist() for ids in batch.tokens.split()] == [[bos, *ids, eos] for ids in task.tokenizer.ids(texts)]
    assert batch.counts == {"pairs": 3}
    assert batch.labels.tolist() == [True, False, True]


def test_equal_and_linked_texts_are_one_group():
    texts = [[1], [2], [1], [5], [4], [6], [7], [7], [2], [8]]  # 1~4, 2~6, 1~7, 5~7; hard negatives 2 and 8
    groups = group_sequences([np.array(ids, np.int32) for ids in texts], 4).tolist()
    same = {tuple(ids) for ids, group in zip(texts, groups, strict=True) if group == groups[0]}
    assert same == {(1,), (4,), (5,), (7,)}
    assert groups[1] == groups[5] == groups[8]
    assert groups.count(groups[9]) == 1


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_groups_are_the_connected_parts(pairs):
    sequences = [np.array([text]) for text, _ in pairs] + [np.array([pair]) for _, pair in pairs]
    groups = group_sequences(sequences, len(pairs))
    reach = np.eye(10, dtype=bool)
    for text, pair in pairs:
        reach[text, pair] = reach[pair, text] = True
    reach = np.linalg.matrix_power(reach.astype(float), 10) > 0
    numbers = [int(ids[0]) for ids in sequences]
    assert [[a == b for b in groups] for a in groups] == [[bool(reach[a, b]) for b in numbers] for a in numbers]


@pytest.mark.parametrize(("policy", "left"), [("cut", [[4, 4]]), ("drop", [])])
def test_each_text_is_truncated_by_itself(recipe, policy, left):
    task, _ = made(recipe)
    (items,) = task.encode_batch([asked("a b", "c d e f")], task.tokenizer, TruncationPolicy(2, policy))
    assert [[len(ids) for ids in item[:2]] for item in items] == left
    with pytest.raises(ConfigError, match="data.truncation: task 'contrastive' cannot use 'window'"):
        made(recipe, "data.truncation=window")


# The loss.


@pytest.mark.parametrize("pool", ["mean", "cls", "max", "last"])
def test_the_loss_is_that_of_each_text_read_alone(recipe, pool):
    task, head = made(recipe, f"task.pool={pool}", "task.temperature=0.2")
    head.double().train()
    examples = [asked("a b c", "c b", "h h"), asked("d", "e f g"), asked("f g h")]
    batch = collated(task, *examples)

    def vector(text):
        alone = collated(task, asked(text)).tokens.split()[0]
        states = head.body.encode(weft.tokens.Tokens.pack([alone.tolist()]))[0]
        by_pool = {"mean": states.mean(0), "cls": states[0], "max": states.amax(0), "last": states[-1]}
        return head.projection(by_pool["cls"]).tanh() if pool == "cls" else by_pool[pool]

    texts, candidates = ["a b c", "d", "f g h"], ["c b", "e f g", "f g h", "h h"]
    cosines = torch.stack(
        [torch.stack([F.cosine_similarity(vector(a), vector(c), dim=0) for c in candidates]) for a in texts]
    )
    expected = -(cosines / 0.2).log_softmax(1).diagonal().sum()
    torch.testing.assert_close(loss_of(head, batch), expected)


def test_the_other_texts_of_a_batch_are_the_negatives(recipe):
    task, head = made(recipe)
    head.double()
    first, second = asked("a b c", "c b a"), asked("d e", "e d")
    joined = loss_of(head, collated(task, first, second))
    apart = loss_of(head, collated(task, first)) + loss_of(head, collated(task, second))
    assert apart.item() == pytest.approx(0, abs=1e-12)  # with no negatives there is nothing to learn
    assert joined > 0.01
    harder = loss_of(head, collated(task, asked("a b c", "c b a", "h h h"), second))
    assert harder > joined + 1e-3


def test_duplicates_in_a_batch_are_not_negatives(recipe):
    task, head = made(recipe)
    head.double()
    examples = [asked("a b c", "c b a"), asked("d e", "e d")]
    once = loss_of(head, collated(task, *examples))
    twice = loss_of(head, collated(task, *examples, *examples))
    # Each text meets the other text's positive twice, and never its own a second time.
    assert once < twice < 2 * (once + 2 * np.log(2))
    batch = collated(task, *examples, *examples)
    unmasked = batch.__class__(batch.tokens, torch.arange(8), batch.counts)
    assert loss_of(head, unmasked) > 4 * np.log(2) > twice  # the negative control: half of the mass is the duplicate's


def test_without_pairs_two_dropout_masks_make_the_difference(recipe):
    examples = [asked(text) for text, _ in PAIRS]
    task, head = made(recipe, "model.dropout=0.3")
    batch = collated(task, *examples)
    vectors = head.train().vectors(batch.tokens)
    assert not torch.allclose(vectors[: len(examples)], vectors[len(examples) :], atol=1e-3)
    vectors = head.eval().vectors(batch.tokens)  # the negative control
    torch.testing.assert_close(vectors[: len(examples)], vectors[len(examples) :])


def test_the_dense_layer_after_cls_is_for_training_alone(recipe):
    task, head = made(recipe, "task.pool=cls")
    batch = collated(task, asked("a b", "b a"), asked("d", "e"))
    trained, used = head.train().vectors(batch.tokens), head.eval().vectors(batch.tokens)
    assert not torch.allclose(trained, used, atol=1e-3)
    states = head.body.encode(batch.tokens)[0]
    torch.testing.assert_close(used, F.normalize(states[batch.tokens.starts[:-1].long()], dim=-1))
    assert made(recipe)[1].projection is None


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_every_encoder_learns_and_gives_its_vectors(recipe, body, pool):
    recipe |= {"model": BODIES[body], "task": {"name": "contrastive", "pool": pool}}
    task, head = made(recipe)
    for parameter in head.parameters():
        if parameter.ndim > 1 and not task.uses_chars:
            torch.nn.init.normal_(parameter, std=0.5)
    batch = collated(task, *(asked(*pair) for pair in PAIRS))
    loss = loss_of(head.train(), batch)
    loss.backward()
    assert loss.isfinite()
    assert [name for name, parameter in head.named_parameters() if parameter.grad is None] == []
    assert head.flops(batch) > 0
    pipeline = weft.Pipeline(Run.parse(read_recipe(recipe)), task, task.tokenizer, head.eval())
    texts = [text for text, _ in PAIRS]
    vectors = pipeline.embed(texts, pool=pool, normalize=True)
    np.testing.assert_allclose(vectors, head.vectors(batch.tokens)[: len(PAIRS)].detach().numpy(), rtol=0, atol=1e-5)


def test_in_bf16_the_loss_is_nearly_that_in_fp32(recipe):
    task, head = made(recipe, "task.pool=cls")
    batch = collated(task, *(asked(*pair) for pair in PAIRS))
    expected = loss_of(head, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(head, batch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.05, atol=0)
    assert loss != expected  # the negative control: bf16 was used


# Training.


def test_pairs_are_learned_and_a_run_goes_on_where_it_ended(recipe, tmp_path):
    def train(folder, *overrides, resume=False):
        run = Run.parse(read_recipe(recipe, ["model.dropout=0.1", *overrides]))
        return train_run(run, tmp_path / folder, resume)

    start, whole = train("start", "train.steps=1"), train("whole", "train.steps=30")
    train("parts", "train.steps=13")
    resumed = train("parts", "train.steps=30", resume=True)
    for name, value in whole.head.state_dict().items():
        assert torch.equal(value, resumed.head.state_dict()[name])
    evaluated = [weft.load(tmp_path / name).evaluate(recipe["data"]["valid"]) for name in ("start", "whole")]
    assert evaluated[1]["loss"] < evaluated[0]["loss"] / 2
    assert evaluated[1]["accuracy"] == 1
    assert start.progress.step == 1


def test_batches_that_are_accumulated_do_not_see_each_other(recipe, tmp_path):
    def losses(*overrides):
        run = Run.parse(read_recipe(recipe, ["train.steps=1", "train.report_every=1", *overrides]))
        train_run(run, tmp_path / "-".join(overrides).replace(".", ""))
        return json.loads((tmp_path / "-".join(overrides).replace(".", "") / "metrics.jsonl").read_text())["loss"]

    assert losses("train.batch_size=1", "train.accumulate=6") == pytest.approx(0, abs=1e-6)
    assert losses("train.batch_size=6") > 0.1


def test_texts_alone_are_learned_from(recipe, tmp_path):
    recipe["data"] = {"train": write_rows(tmp_path / "texts.jsonl", [{"text": text} for text, _ in PAIRS])}
    pipeline = weft.train(recipe, ["model.dropout=0.2", "train.batch_size=6", "train.steps=20"], tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < 1
    metrics = pipeline.evaluate([{"text": text} for text, _ in PAIRS])
    assert metrics["alignment"] == pytest.approx(0, abs=1e-6)
    assert metrics["uniformity"] < -0.1


# Evaluation.


def evaluated(task, head, examples):
    data = EvaluationData.of(task, [(str(place), example) for place, example in enumerate(examples)], LIMIT)
    return task.evaluate(head.eval(), data).metrics


def test_scores_are_correlated_with_cosines(recipe):
    task, head = made(recipe)
    scores = [5.0, 0.5, 2, 3.25, 1, 4]
    examples = [asked(*pair, None, score) for pair, score in zip(PAIRS, scores, strict=True)]
    vectors = head.eval().vectors(collated(task, *examples).tokens).detach()
    cosines = (vectors[:6] * vectors[6:]).sum(1)
    metrics = evaluated(task, head, examples)
    assert metrics == pytest.approx(
        {"spearman": stats.spearmanr(cosines, scores)[0], "pearson": stats.pearsonr(cosines, scores)[0]}, abs=1e-5
    )
    assert task.metric == "spearman"
    with pytest.raises(DataError, match="score: given for 5 of 6 examples; give one to all, or to none"):
        evaluated(task, head, [*examples[:5], asked("a")])


def test_without_scores_texts_are_to_find_their_pairs(recipe):
    task, head = made(recipe)
    examples = [asked(*pair) for pair in PAIRS] + [asked("g g", "g g", "c c c"), asked("a b c", "b b")]
    batch = collated(task, *examples)
    vectors = head.eval().vectors(batch.tokens).detach()
    first, second = vectors[:8], vectors[8:]
    cosines = first @ second.T
    cosines[0, 7] = cosines[7, 0] = -1  # "a b c" has two pairs
    between = torch.ones(8, 8, dtype=torch.bool).fill_diagonal_(False)
    between[0, 7] = between[7, 0] = False
    distances = torch.cdist(first, first)[between]
    metrics = evaluated(task, head, examples)
    assert metrics == pytest.approx(
        {
            "loss": loss_of(head, batch).item() / 8,
            "accuracy": (cosines.argmax(1) == torch.arange(8)).float().mean().item(),
            "alignment": (first - second[:8]).square().sum(1).mean().item(),
            "uniformity": (-2 * distances.square()).exp().mean().log().item(),  # Wang and Isola 2020
        },
        abs=1e-5,
    )
    assert task.metric == "accuracy"


def test_scores_are_not_trained_on(recipe, tmp_path):
    rows = [{**row, "score": 2.5} for row in pair_rows()]
    recipe["data"]["train"] = write_rows(tmp_path / "scored.jsonl", rows)
    with pytest.raises(DataError, match="data.train: its pairs have a score, the first 2.5, but task 'contrastive'"):
        weft.train(recipe, out=tmp_path / "run")
    recipe["data"] |= {"train": recipe["data"]["valid"], "valid": recipe["data"]["train"]}
    pipeline = weft.train(recipe, out=tmp_path / "run")
    assert set(pipeline.evaluate()) == {"spearman", "pearson"}


@pytest.mark.parametrize("metric", ["spearman", "pearson", "accuracy", "loss"])
def test_a_metric_that_the_data_do_not_allow_is_refused_before_training(recipe, tmp_path, metric):
    of_scores = metric in ("spearman", "pearson")
    rows = [row if of_scores else {**row, "score": 2.5} for row in pair_rows()]
    recipe["data"]["valid"] = write_rows(tmp_path / "valid.jsonl", rows)
    reason = "its rows have no score to correlate with" if of_scores else "its pairs have scores, to correlate with"
    with pytest.raises(ConfigError, match=f"train.metric: {metric} will not be given for data.valid: {reason}"):
        weft.train(recipe, [f"train.metric={metric}"], tmp_path / "run")
    examples = [ContrastiveExample(**row) for row in pair_rows()]
    allowed = [] if of_scores else examples
    scored = [example.model_copy(update={"score": 1.0}) for example in examples]
    assert made(recipe)[0].unavailable_metric(metric, allowed or scored) == ""
    with pytest.raises(ConfigError, match="train.metric: the task has no metric 'uniformity'"):
        made(recipe, "train.metric=uniformity")  # alone it selects nothing: random vectors are the most uniform


@pytest.mark.parametrize("score", ["much", True, "inf", None])
def test_a_score_is_a_number(score):
    if score is None:
        assert asked("a", "b", None, "2.5").score == 2.5  # as in a table
        return
    with pytest.raises(ValueError, match="must be a number, how alike the pair is"):
        asked("a", "b", None, score)


# Answers and vectors.


@pytest.fixture(params=["mean", "cls"])
def pipeline(recipe, tmp_path, request):
    weft.train(recipe, [f"task.pool={request.param}", "train.steps=1", "data.max_length=20"], tmp_path / "run")
    return weft.load(tmp_path / "run", device="cpu")


def test_a_pair_has_its_cosine_and_a_text_its_vector(pipeline):
    texts = ["a b c", "h g"]
    vectors = pipeline.embed(texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    pool = pipeline.run.task.pool
    np.testing.assert_array_equal(vectors, pipeline.embed(texts, pool=pool, normalize=True))
    other = pipeline.embed(texts, pool="last", normalize=True)  # the negative control
    assert np.abs(vectors - other).max() > 1e-3
    assert np.linalg.norm(pipeline.embed(texts, normalize=False), axis=1).min() > 1.1
    cosine = float(vectors[0] @ vectors[1])
    as_json = json.dumps({"text": texts[0], "pair": texts[1]})
    for answer in (*pipeline([tuple(texts)]), *pipeline(as_json), *pipeline({"text": "h g", "pair": "a b c"})):
        assert answer == {"score": pytest.approx(cosine, abs=2e-6)}
    (answer,) = pipeline("a b c")
    np.testing.assert_allclose(answer["vector"], vectors[0], rtol=0, atol=2e-6)
    assert pipeline('{"text": "a"}')[0].keys() == {"vector"}  # a text that happens to look so


def test_mixed_questions_keep_their_order(pipeline):
    answers = pipeline(["a b c d e f g h", ("a", "b"), "d"])
    assert [list(answer) for answer in answers] == [["vector"], ["score"], ["vector"]]
    np.testing.assert_allclose(answers[2]["vector"], pipeline.embed(["d"])[0], rtol=0, atol=2e-6)


def test_other_tasks_start_from_it(recipe, pipeline, tmp_path):
    path = write_rows(tmp_path / "labels.jsonl", [{"text": "a b", "label": "x"}, {"text": "c d", "label": "y"}])
    tuned = {**recipe, "task": {"name": "classify"}, "data": {"train": path}}
    del tuned["tokenizer"]
    tuned["model"] = {"weights": str(tmp_path / "run")}
    assert weft.train(tuned, ["train.steps=1"], tmp_path / "tuned")("a b")[0]["label"] in ("x", "y")


def test_options_have_no_place_here(pipeline):
    assert pipeline.task.options() == Section()
    assert pipeline.task.preview(asked("a", "b", "c", 2.5)) == ("a | b | c", "2.5")
