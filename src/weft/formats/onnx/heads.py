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

from dataclasses import dataclass
from functools import reduce
from typing import Any

from weft.config.run import Run
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
from weft.nn.layers.pooling import PoolingMode
from weft.tasks.head import Head

BATCH, LENGTH, CHOICES = "batch_size", "sequence_length", "num_choices"
_SIDES = ("start_logits", "end_logits")
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
    tokens = _padded_tokens(graph, run)
    encoder = _Encoder(graph, run.task, head, tokens, hidden_states(graph, head.body, tokens))
    match run.task.name:
        case "embed":
            return _features(encoder, pooling)
        case "mlm":
            return _mlm(encoder)
        case "electra":
            return {"logits": (_discriminator(encoder), (BATCH, LENGTH))}
        case "span":
            logits = encoder.output(encoder.mixed())
            sides = {name: graph.add("Gather", logits, graph.number(side), axis=2) for side, name in enumerate(_SIDES)}
            return {name: (value, (BATCH, LENGTH)) for name, value in sides.items()}
        case "choice":
            shape = graph.add("Shape", "input_ids", start=0, end=2)
            return {"logits": (graph.add("Reshape", encoder.output(encoder.pooled()), shape), (BATCH, CHOICES))}
        case "tag":
            return {"logits": (encoder.output(encoder.mixed()), (BATCH, LENGTH, encoder.num_labels))}
    return {"logits": (encoder.output(encoder.pooled()), (BATCH, encoder.num_labels))}


def _padded_tokens(graph: Graph, run: Run) -> PaddedTokens:
    """Return the inputs as rows of tokens; each choice of a question is one."""
    names = list(model_inputs(run))
    if run.task.name == "choice":
        length = graph.add("Shape", "input_ids", start=2)
        shape = graph.add("Concat", graph.numbers(-1), length, axis=0)
        names = [graph.add("Reshape", name, shape) for name in names]
    ids, mask, *segments = names
    return PaddedTokens(ids, mask, segments[0] if segments else None)


@dataclass(frozen=True)
class _Encoder:
    """The hidden states of all layers in a graph, (B, T, D), and the task and the head that read them."""

    graph: Graph
    task: Any
    head: Any
    tokens: PaddedTokens
    states: list[str]

    @property
    def num_labels(self) -> int:
        """The number of outputs of the head's last layer."""
        return int(self.head.output.out_features)

    def output(self, x: str) -> str:
        """Return the head's last layer on what it reads."""
        return linear(self.graph, x, self.head.output)

    def mixed(self) -> str:
        """Return the hidden states that the head reads, (B, T, D): the last layer's, or a scalar mix of several."""
        mix = getattr(self.head, "mix", None)
        if mix is None:
            return self.states[-1]
        layers = self.head.body.mixable_layers if self.task.layers == "mix" else self.task.layers
        weighted = zip(layers, (mix.scale * mix.shares).tolist(), strict=True)
        terms = [self.graph.add("Mul", self.states[layer], self.graph.floats(share)) for layer, share in weighted]
        return reduce(lambda total, term: self.graph.add("Add", total, term), terms)

    def pooled(self) -> str:
        """Return the vector of each row that the head reads: the body's own, the mean of mixed layers, or all three."""
        if getattr(self.head, "concat", False):
            modes: tuple[PoolingMode, ...] = ("cls" if isinstance(self.head.body, BERT) else "last", "max", "mean")
            states = self.mixed()
            parts = [pool(self.graph, states, self.tokens.mask, mode) for mode in modes]
            return self.graph.add("Concat", *parts, axis=-1)
        if getattr(self.head, "mix", None) is None:
            return self.body_pooled()
        return pool(self.graph, self.mixed(), self.tokens.mask, "mean")

    def body_pooled(self) -> str:
        """Return the body's pooled output: of a GPT the last token's, of a BERT the first one's through its pooler."""
        body = self.head.body
        if not isinstance(body, BERT):
            return pool(self.graph, self.states[-1], self.tokens.mask, "last")
        first = pool(self.graph, self.states[-1], self.tokens.mask, "cls")
        if body.pooler is None:
            return first
        return ACTIVATIONS[body.config.pooler](self.graph, linear(self.graph, first, body.pooler))


def _features(encoder: _Encoder, pooling: Pooling | None) -> Outputs:
    """Return the hidden states, and the vectors of texts that the model has."""
    graph, last, body = encoder.graph, encoder.states[-1], encoder.head.body
    outputs: Outputs = {"last_hidden_state": (last, (BATCH, LENGTH, body.width))}
    if encoder.task.pooler and isinstance(body, BERT):
        outputs["pooler_output"] = encoder.body_pooled(), (BATCH, body.width)
    if pooling is not None:
        vector = pool(graph, last, encoder.tokens.mask, pooling.pool)
        outputs["sentence_embedding"] = normalize(graph, vector) if pooling.normalize else vector, (BATCH, body.width)
    return outputs


def _mlm(encoder: _Encoder) -> Outputs:
    """Return the logits and states of every token and, where segment pairs are told apart, the logits of each row."""
    graph, last, head, body = encoder.graph, encoder.states[-1], encoder.head, encoder.head.body
    hidden = ACTIVATIONS[body.config.activation](graph, linear(graph, last, body.transform))
    logits = linear(graph, layer_norm(graph, hidden, body.transform_norm), body.output)
    outputs: Outputs = {"logits": (logits, (BATCH, LENGTH, body.vocab))}
    outputs["last_hidden_state"] = last, (BATCH, LENGTH, body.width)
    if head.next is not None:
        outputs[PAIR_OUTPUTS[head.objective]] = linear(graph, encoder.body_pooled(), head.next), (BATCH, 2)
    return outputs


def _discriminator(encoder: _Encoder) -> str:
    """Return the logit of each token being replaced."""
    graph, head = encoder.graph, encoder.head
    hidden = ACTIVATIONS[head.body.config.activation](graph, linear(graph, encoder.states[-1], head.dense))
    return graph.add("Squeeze", encoder.output(hidden), graph.numbers(2))
