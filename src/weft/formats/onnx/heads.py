"""The inputs and outputs of an ONNX model, by its task: their names are those of Optimum's exports.

B "batch_size", T "sequence_length", C "num_choices", K labels, V vocabulary, D width

every task      input_ids, attention_mask and, of a model with segments, token_type_ids (B, T); choice: (B, C, T)
embed           last_hidden_state (B, T, D); pooler_output (B, D), of a pooler; sentence_embedding (B, D)
classify        logits (B, K); of a regression (B, 1)
tag             logits (B, T, K)
span            start_logits, end_logits (B, T)
choice          logits (B, C)
mlm             logits (B, T, V); last_hidden_state; of an objective of segment pairs seq_relationship_logits or
                sop_logits (B, 2)
electra         logits (B, T): the larger, the more probably a token was replaced
"""

from functools import reduce
from typing import Any

from weft.config.schema import Run
from weft.formats.onnx.graph import Graph, Shape
from weft.formats.onnx.layers import (
    ACTIVATIONS,
    PaddedTokens,
    hidden_states,
    layer_norm,
    linear,
    normalize,
    pool,
)
from weft.formats.sentence_transformers import Pooling
from weft.models.bert import BERT
from weft.tasks.head import Head

BATCH, LENGTH, CHOICES = "batch_size", "sequence_length", "num_choices"
PAIR_OUTPUTS = {"next": "seq_relationship_logits", "order": "sop_logits"}  # by what is learnt of segment pairs

Inputs = dict[str, Shape]
Outputs = dict[str, tuple[str, Shape]]  # the value of each, and its shape


def has_segments(run: Run) -> bool:
    """Return whether a model tells the two texts of a pair by segments."""
    return int(getattr(run.model, "segments", 0)) > 1


def model_inputs(run: Run) -> Inputs:
    """Return the inputs of a model, each with its shape."""
    shape = (BATCH, CHOICES, LENGTH) if run.task.name == "choice" else (BATCH, LENGTH)
    names = ("input_ids", "attention_mask", *(["token_type_ids"] if has_segments(run) else []))
    return dict.fromkeys(names, shape)


def model_outputs(graph: Graph, run: Run, head: Head, pooling: Pooling | None) -> Outputs:
    """Add all nodes of a model, and return its outputs."""
    tokens, body = _padded_tokens(graph, run), head.body
    states = hidden_states(graph, body, tokens)
    match run.task.name:
        case "embed":
            return _features(graph, run, body, states[-1], tokens, pooling)
        case "mlm":
            return _mlm(graph, head, states[-1], tokens)
        case "electra":
            return {"logits": (_discriminator(graph, head, states[-1]), (BATCH, LENGTH))}
        case "span":
            logits = linear(graph, _mixed(graph, run, head, states), head.output)  # type: ignore[arg-type]
            sides = {name: graph.add("Gather", logits, graph.number(side), axis=2) for side, name in enumerate(_SIDES)}
            return {name: (value, (BATCH, LENGTH)) for name, value in sides.items()}
        case "tag":
            logits = linear(graph, _mixed(graph, run, head, states), head.output)  # type: ignore[arg-type]
            return {"logits": (logits, (BATCH, LENGTH, _num_outputs(head)))}
    logits = linear(graph, _pooled_output(graph, run, head, states, tokens), head.output)  # type: ignore[arg-type]
    if run.task.name == "choice":
        shape = graph.add("Shape", "input_ids", start=0, end=2)
        return {"logits": (graph.add("Reshape", logits, shape), (BATCH, CHOICES))}
    return {"logits": (logits, (BATCH, _num_outputs(head)))}


_SIDES = ("start_logits", "end_logits")


def _num_outputs(head: Any) -> int:
    return int(head.output.out_features)


def _padded_tokens(graph: Graph, run: Run) -> PaddedTokens:
    """Return the inputs as rows of tokens; each choice of a question is one."""
    names = list(model_inputs(run))
    if run.task.name == "choice":
        length = graph.add("Shape", "input_ids", start=2)
        shape = graph.add("Concat", graph.numbers(-1), length, axis=0)
        names = [graph.add("Reshape", name, shape) for name in names]
    ids, mask, *segments = names
    return PaddedTokens(ids, mask, segments[0] if segments else None)


def _mixed(graph: Graph, run: Run, head: Any, states: list[str]) -> str:
    """Return the hidden states that a head reads, (B, T, D): the last layer's, or a scalar mix of several."""
    if getattr(head, "mix", None) is None:
        return states[-1]
    layers = head.body.mixable_layers if run.task.layers == "mix" else run.task.layers  # type: ignore[attr-defined]
    shares = (head.mix.scale * head.mix.shares).tolist()
    terms = [graph.add("Mul", states[layer], graph.floats(share)) for layer, share in zip(layers, shares, strict=True)]
    return reduce(lambda total, term: graph.add("Add", total, term), terms)


def _pooled_output(graph: Graph, run: Run, head: Any, states: list[str], tokens: PaddedTokens) -> str:
    """Return the vector of each row that a head reads, (B, D): the body's own, or the mean of mixed layers."""
    if getattr(head, "mix", None) is not None:
        return pool(graph, _mixed(graph, run, head, states), tokens.mask, "mean")
    return _body_pooled(graph, head.body, states[-1], tokens)


def _body_pooled(graph: Graph, body: Any, last: str, tokens: PaddedTokens) -> str:
    """Return the body's pooled output: of a GPT the last token's, of a BERT the first one's through its pooler."""
    if not isinstance(body, BERT):
        return pool(graph, last, tokens.mask, "last")
    first = pool(graph, last, tokens.mask, "cls")
    return first if body.pooler is None else ACTIVATIONS[body.config.pooler](graph, linear(graph, first, body.pooler))


def _features(graph: Graph, run: Run, body: Any, last: str, tokens: PaddedTokens, pooling: Pooling | None) -> Outputs:
    """Return the hidden states, and the vectors of texts that the model has."""
    outputs: Outputs = {"last_hidden_state": (last, (BATCH, LENGTH, body.width))}
    if run.task.pooler and isinstance(body, BERT):  # type: ignore[attr-defined]
        outputs["pooler_output"] = (_body_pooled(graph, body, last, tokens), (BATCH, body.width))
    if pooling is not None:
        vector = pool(graph, last, tokens.mask, pooling.pool)
        vector = normalize(graph, vector) if pooling.normalize else vector
        outputs["sentence_embedding"] = (vector, (BATCH, body.width))
    return outputs


def _mlm(graph: Graph, head: Any, last: str, tokens: PaddedTokens) -> Outputs:
    """Return the logits of every token and, where segment pairs are told apart, those of each row."""
    body: BERT = head.body
    assert body.transform is not None
    assert body.transform_norm is not None
    assert body.output is not None
    hidden = ACTIVATIONS[body.config.activation](graph, linear(graph, last, body.transform))
    hidden = layer_norm(graph, hidden, body.transform_norm)
    outputs: Outputs = {"logits": (linear(graph, hidden, body.output), (BATCH, LENGTH, body.vocab))}
    outputs["last_hidden_state"] = last, (BATCH, LENGTH, body.width)
    if head.next is not None:
        pooled = _body_pooled(graph, body, last, tokens)
        outputs[PAIR_OUTPUTS[head.objective]] = (linear(graph, pooled, head.next), (BATCH, 2))
    return outputs


def _discriminator(graph: Graph, head: Any, last: str) -> str:
    """Return the logit of each token being replaced."""
    hidden = ACTIVATIONS[head.body.config.activation](graph, linear(graph, last, head.dense))
    return graph.add("Squeeze", linear(graph, hidden, head.output), graph.numbers(2))
