"""Encoders of weft's own with fresh random weights, and their ONNX models in ONNX Runtime, on padded rows."""

import json

import numpy as np
import pytest
import torch

import weft
from tests.hf_folders import LINES
from tests.transformer_equations import spread_weights
from weft.config.run import Run
from weft.tasks.factory import build
from weft.tokenization.trainable import train_tokenizer
from weft.tokens import Tokens

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

BERT = {"name": "bert", "width": 24, "layers": 2, "heads": 3, "ffn_width": 40, "max_positions": 48}
GPT = {key: value for key, value in BERT.items() if key != "name"} | {"name": "gpt"}
LABELS = ["a", "b", "c"]


def make(task, model=BERT, tokenizer=None, seed=0):
    """Make a model with random weights and a tokenizer of its own."""
    tokenizer = tokenizer or {"name": "wordpiece", "size": 200}
    data = {"train": [], "max_length": 40}
    run = Run.parse({"task": task, "model": model, "tokenizer": tokenizer, "data": data, "train": {"steps": 1}})
    learnt = train_tokenizer(run.tokenizer, iter(LINES))
    made, head = build(run, learnt)
    torch.manual_seed(seed)
    with torch.no_grad():
        spread_weights(head, 0.25)
    return weft.Pipeline(run, made, learnt, head.eval())


def random_tokens(pipeline, lengths, seed=0):
    """Draw the ids and segments of sequences."""
    torch.manual_seed(seed)
    ids = torch.randint(len(pipeline.tokenizer), (sum(lengths),))
    tokens = Tokens.flat(ids, torch.tensor(lengths))
    return type(tokens)(**{**vars(tokens), "segments": torch.randint(2, ids.shape)})


def padded(tokens, seed=1):
    """Return the inputs (B, T) of an ONNX model; what fills the rows up is drawn, too."""
    shape, rng = (len(tokens), tokens.longest), np.random.default_rng(seed)
    mask = (np.arange(shape[1]) < tokens.lengths.numpy()[:, None]).astype(np.int64)
    inputs = {"attention_mask": mask, "input_ids": rng.integers(0, 100, shape)}
    inputs["token_type_ids"] = rng.integers(0, 2, shape)
    for name, values in (("input_ids", tokens.ids), ("token_type_ids", tokens.segments)):
        inputs[name][mask == 1] = values.numpy()
    return inputs


def run(path, inputs):
    """Run a model in ONNX Runtime; return its outputs by name."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    values = session.run(None, {name: inputs[name] for name in names})
    return dict(zip([output.name for output in session.get_outputs()], values, strict=True))


def unpadded(tokens, output, value):
    """Return an output without padding, flat as weft's value; one of rows, not of tokens, is as it is."""
    if output.ndim == value.ndim:
        return output
    return np.concatenate([row[:size] for row, size in zip(output, tokens.lengths.tolist(), strict=True)])


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))
