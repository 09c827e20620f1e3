"""Numerical parity of an ONNX model: tokens by the tokenizer beside it, and each output, for rows of one padded batch.

The model runs in ONNX Runtime where that is installed, else in onnx's own reference implementation. weft computes the
same rows without padding. They are padded with a token that the model knows, so that a mask which lets it through
shows.
"""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer as Engine
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from weft.conversion.parity import SAMPLE, SECOND, ParityCheck, compare, largest_value, task_logits
from weft.errors import CheckpointError
from weft.formats.onnx.heads import PAIR_OUTPUTS, has_segments, model_inputs
from weft.nn.layers.pooling import pool_tokens
from weft.pipeline import Pipeline
from weft.tasks.text_pairs import TextTokens, add_special_tokens
from weft.tokens import Tokens

TEXTS = ((SAMPLE,), (SECOND,), ("",), (SECOND, SAMPLE))  # a text or a pair each
RUNTIME, REFERENCE = "ONNX Runtime", "onnx's reference evaluator"


class Row(NamedTuple):
    """The tokens of a text or a pair, with the special ones, and the segment of each."""

    ids: list[int]
    segments: list[int]


def compare_onnx(original: Pipeline, path: Path) -> list[ParityCheck]:
    """Compare a model with its ONNX model, and its tokenizer with the one beside that."""
    rows = [_tokenize(original, *texts) for texts in TEXTS]
    checks = [_compare_tokens(rows, path.parent / "tokenizer.json")]
    longest: int = original.head.body.max_positions
    rows = [Row(ids[:longest], segments[:longest]) for ids, segments in rows]
    against, outputs = _run_onnx(path, _padded(original, rows))
    expected, largest = _expected_outputs(original, rows)
    for name, output in outputs.items():
        value = expected[name]
        if output.ndim > value.ndim:  # of tokens: (B, T, …) as (N, …)
            output = torch.cat([part[: len(row.ids)] for part, row in zip(output, rows, strict=True)])
        checks.append(compare(name, [value], [output], against, largest))
    return checks


def _tokenize(pipeline: Pipeline, *texts: str) -> Row:
    """Tokenize a text or a pair as in training."""
    lowercase = pipeline.pooling is not None and pipeline.pooling.lowercase
    sides = [TextTokens(pipeline.tokenizer.encode(text.lower() if lowercase else text).ids) for text in texts]
    (ids, _), second = add_special_tokens(sides[0], sides[1] if len(sides) > 1 else None, pipeline.tokenizer)
    start = second if second is not None and has_segments(pipeline.run) else len(ids)
    return Row(ids, [int(index >= start) for index in range(len(ids))])


def _compare_tokens(rows: Sequence[Row], path: Path) -> ParityCheck:
    """Compare the tokens, and the segments of pairs, with those of a tokenizer's file."""
    engine = Engine.from_file(str(path))
    encodings = [engine.encode(*texts) for texts in TEXTS]
    expected = [torch.tensor(row) for row in rows]
    return compare("tokens", expected, [torch.tensor([part.ids, part.type_ids]) for part in encodings], path.name)


def _padded(pipeline: Pipeline, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return the inputs of the ONNX model: the rows, filled up to the longest; as choices, those of one question."""
    filler = pipeline.tokenizer.specials.eos
    ids, segments = (pad_sequence(list(map(torch.tensor, part)), True, filler) for part in zip(*rows, strict=True))
    mask = pad_sequence([torch.ones(len(row.ids), dtype=torch.long) for row in rows], batch_first=True)
    values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments.clamp(max=1)}
    inputs = model_inputs(pipeline.run)
    return {name: values[name][(None,) * (len(shape) - 2)] for name, shape in inputs.items()}


def _run_onnx(path: Path, inputs: dict[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
    """Run a model; return the name of what ran it, and the outputs by row."""
    feeds = {name: value.numpy() for name, value in inputs.items()}
    against, run = (RUNTIME, _runtime) if find_spec("onnxruntime") is not None else (REFERENCE, _reference)
    try:
        names, values = run(str(path), feeds)
    except Exception as error:  # any error of the other library
        raise CheckpointError(f"{path.name}: {against} cannot run it: {error}") from error
    outputs = {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}
    if inputs["input_ids"].ndim > 2:  # one question, of several choices
        outputs = {name: value[0, :, None] for name, value in outputs.items()}
    return against, outputs


def _runtime(path: str, feeds: dict[str, np.ndarray]) -> tuple[list[str], list[np.ndarray]]:
    """Return the names and values of the outputs in ONNX Runtime."""
    session = import_module("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    return [output.name for output in session.get_outputs()], session.run(None, feeds)


def _reference(path: str, feeds: dict[str, np.ndarray]) -> tuple[list[str], list[np.ndarray]]:
    """Return the same in onnx's reference evaluator."""
    evaluator = import_module("onnx.reference").ReferenceEvaluator(path)
    return evaluator.output_names, evaluator.run(None, feeds)


@torch.no_grad()
def _expected_outputs(pipeline: Pipeline, rows: Sequence[Row]) -> tuple[dict[str, Tensor], float]:
    """Return weft's outputs by the names of the ONNX model, (B, …) or (N, …), and the largest value of any layer."""
    tokens = Tokens.pack([row.ids for row in rows])
    tokens = replace(tokens, segments=torch.tensor([segment for row in rows for segment in row.segments]))
    head: Any = pipeline.head
    logits = task_logits(pipeline, tokens)
    if pipeline.run.task.name == "span":
        start, end = logits["logits"].unbind(-1)
        logits = {"start_logits": start, "end_logits": end}
    names = {
        "next sentence": PAIR_OUTPUTS.get(getattr(head, "objective", None) or ""),
        "pooled output": "pooler_output",
    }
    values = {names.get(name) or name: value for name, value in logits.items()}
    states = head.body.encode(tokens, head.body.mixable_layers)
    if pipeline.run.task.name in ("embed", "mlm"):
        values["last_hidden_state"] = states[-1]
    if pipeline.pooling is not None:
        vectors = pool_tokens(states[-1], tokens, pipeline.pooling.pool)
        values["sentence_embedding"] = F.normalize(vectors, dim=-1) if pipeline.pooling.normalize else vectors
    return values, largest_value(states)
