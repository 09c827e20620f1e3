"""ONNX models compute in ONNX Runtime, from padded rows, what weft computes without padding: every head and body."""

import numpy as np
import pytest
import torch
from tests import onnx_models
from tests.onnx_models import BERT, GPT, LABELS, make, padded, random_tokens, unpadded

from weft.formats.onnx.export import write_onnx
from weft.formats.sentence_transformers import Pooling
from weft.nn.layers.pooling import pool_tokens

DISTIL = {**BERT, "segments": 0, "pooler": "relu", "activation": "gelu-tanh"}
ROBERTA = {**BERT, "segments": 1, "offset": 2, "max_positions": 50, "eps": 1e-5}
ALBERT = {**BERT, "shared": True, "embedding": 8, "activation": "gelu-tanh"}
ELECTRA = {**BERT, "embedding": 8, "pooler": "gelu"}
PRUNED = {**BERT, "pruned_heads": {"0": [1], "1": [0, 2]}, "activation": "silu", "pooler": "none"}
POST_NORM = {**GPT, "norm": "post", "activation": "relu"}
LENGTHS = ([1], [5, 17, 1, 30, 2, 48, 9])  # of sequences in a batch


def per_token(head, tokens):
    return {"logits": head.scores(head.states(tokens))}


def per_text(head, tokens):
    return {"logits": head.scores(head.pooled_output(tokens))}


def spans(head, tokens):
    start, end = head.scores(tokens).unbind(-1)
    return {"start_logits": start, "end_logits": end}


def features(head, tokens):
    pooler = {} if head.body.pooler is None else {"pooler_output": head.body.pooled_output(tokens)}
    return {"last_hidden_state": head.body.encode(tokens)[0], **pooler}


def filled(head, tokens):
    pairs = {} if head.next is None else {head.pair_output: head.next(head.body.pooled_output(tokens))}
    return {"logits": head.body.logits(tokens), "last_hidden_state": head.body.encode(tokens)[0], **pairs}


def replaced(head, tokens):
    return {"logits": head.discriminate(tokens)}


CASES = {
    "embed": ({"name": "embed"}, BERT, features),
    "embed without a pooler": ({"name": "embed", "pooler": False}, ALBERT, features),
    "classify": ({"name": "classify", "labels": LABELS}, BERT, per_text),
    "regression": ({"name": "classify", "regression": True}, DISTIL, per_text),
    "several labels, mixed layers": (
        {"name": "classify", "labels": LABELS, "multiple": True, "layers": "mix"},
        ROBERTA,
        per_text,
    ),
    "classify, pruned heads": ({"name": "classify", "labels": LABELS}, PRUNED, per_text),
    "classify by a gpt": ({"name": "classify", "labels": LABELS}, GPT, per_text),
    "classify, concat pooling": ({"name": "classify", "labels": LABELS, "pooling": "concat"}, BERT, per_text),
    "classify by a gpt, concat pooling": ({"name": "classify", "labels": LABELS, "pooling": "concat"}, GPT, per_text),
    "tag": ({"name": "tag", "labels": LABELS, "scheme": "plain"}, ROBERTA, per_token),
    "tag by a gpt, mixed layers": (
        {"name": "tag", "labels": LABELS, "scheme": "plain", "layers": [0, 2]},
        POST_NORM,
        per_token,
    ),
    "span": ({"name": "span", "max_question_length": 20}, ELECTRA, spans),
    "mlm": ({"name": "mlm", "next_sentence": False}, DISTIL, filled),
    "mlm, next sentence": ({"name": "mlm"}, BERT, filled),
    "mlm, sentence order, an output of its own": (
        {"name": "mlm", "sentence_order": True},
        {**ALBERT, "tie": False},
        filled,
    ),
    "electra": ({"name": "electra", "generator_size": 0}, ELECTRA, replaced),
}


def write(pipeline, folder, pooling=None):
    folder.mkdir(exist_ok=True)
    write_onnx(folder, "model.onnx", pipeline.run, pipeline.tokenizer, pipeline.head, pooling)
    return folder / "model.onnx"


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_padded_rows_give_what_texts_without_padding_give(tmp_path, case):
    task, model, expected = CASES[case]
    pipeline = make(task, model)
    if "mlm" in case:
        pipeline.head.pair_output = "sop_logits" if "order" in case else "seq_relationship_logits"
    path = write(pipeline, tmp_path)
    for seed, lengths in enumerate(LENGTHS):
        tokens = random_tokens(pipeline, lengths, seed)
        outputs = onnx_models.run(path, padded(tokens))
        values = expected(pipeline.head, tokens)
        assert list(outputs) == list(values)
        for name, value in values.items():
            found = unpadded(tokens, outputs[name], value)
            np.testing.assert_allclose(found, value.numpy(), rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_choices_are_rows_of_a_question(tmp_path):
    pipeline = make({"name": "choice"})
    path = write(pipeline, tmp_path)
    tokens = random_tokens(pipeline, LENGTHS[1][:6])
    inputs = {name: value.reshape(2, 3, -1) for name, value in padded(tokens).items()}
    logits = onnx_models.run(path, inputs)["logits"]
    np.testing.assert_allclose(logits, pipeline.head.scores(tokens).reshape(2, 3).numpy(), rtol=1e-5, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("pool", ["mean", "cls", "max", "last"])
def test_a_sentence_embedding_is_pooled_without_the_padding(tmp_path, pool):
    pipeline = make({"name": "embed", "pooler": False}, GPT if pool == "last" else BERT)
    for lengths, normalize in zip(LENGTHS, (False, True), strict=True):
        path = write(pipeline, tmp_path / str(normalize), Pooling(pool, normalize))
        tokens = random_tokens(pipeline, lengths)
        value = pool_tokens(pipeline.head.body.encode(tokens)[0], tokens, pool)
        value = torch.nn.functional.normalize(value, dim=-1) if normalize else value
        found = onnx_models.run(path, padded(tokens))["sentence_embedding"]
        np.testing.assert_allclose(found, value.numpy(), rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_a_wrong_mask_or_weight_shows(tmp_path):
    """The negative control: padding that is attended to, or is pooled, and a weight that differs."""
    pipeline = make({"name": "embed", "pooler": False})
    path, tokens = write(pipeline, tmp_path, Pooling("mean")), random_tokens(pipeline, LENGTHS[1])
    inputs = padded(tokens)
    states = pipeline.head.body.encode(tokens)[0]
    wrong = onnx_models.run(path, {**inputs, "attention_mask": np.ones_like(inputs["attention_mask"])})
    for name, value in {"last_hidden_state": states, "sentence_embedding": pool_tokens(states, tokens, "mean")}.items():
        assert np.abs(unpadded(tokens, wrong[name], value) - value.numpy()).max() > 0.1
    pipeline.head.body.encoder.blocks[1].attention.in_proj.bias[-1] += 0.01
    right = onnx_models.run(path, inputs)["last_hidden_state"]
    changed = pipeline.head.body.encode(tokens)[0].numpy()
    assert np.abs(unpadded(tokens, right, states) - changed).max() > 1e-3


def test_more_tokens_than_positions_are_an_error(tmp_path):
    path = write(make({"name": "embed"}), tmp_path)
    ids = np.zeros((1, 49), np.int64)
    inputs = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), ids)
    with pytest.raises(Exception, match="48 by 49"):
        onnx_models.run(path, inputs)


def test_onnx_runtimes_optimizer_finds_what_it_merges(tmp_path):
    """Documented in docs/onnx.md."""
    from onnxruntime.transformers.optimizer import optimize_model

    path = write(make({"name": "embed"}), tmp_path)
    merged = optimize_model(str(path), "bert", num_heads=3, hidden_size=24, opt_level=0).get_fused_operator_statistics()
    assert (merged["Attention"], merged["BiasGelu"], merged["SkipLayerNormalization"]) == (2, 2, 5)


def test_a_weight_that_several_use_is_there_once(tmp_path):
    tied, own = make({"name": "mlm"}), make({"name": "mlm"}, {**BERT, "tie": False})
    sizes = [write(pipeline, tmp_path / str(number)).stat().st_size for number, pipeline in enumerate((tied, own))]
    assert sizes[1] - sizes[0] == pytest.approx(4 * tied.head.body.embed.weight.numel(), rel=0.05)
    shared, deep = (make({"name": "embed"}, {**ALBERT, "layers": layers}) for layers in (1, 2))
    sizes = [write(pipeline, tmp_path / f"albert{n}").stat().st_size for n, pipeline in enumerate((shared, deep))]
    block = sum(weight.numel() for weight in shared.head.body.encoder.blocks[0].parameters())
    assert sizes[1] - sizes[0] < 4 * block / 2
