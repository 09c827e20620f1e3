"""Numerical parity of a converted model: tokens of a sample, hidden states of every layer, logits, generated text.

A model is compared with its conversion, loaded again, and with `transformers`, where it is installed, on the same
Hugging Face directory. The sample is one text, or a pair of texts where the model reads pairs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.conversion import parity_seq2seq
from weft.conversion.parity_seq2seq import Outputs
from weft.decoding.config import DecodingConfig
from weft.decoding.generate import generate
from weft.errors import CheckpointError
from weft.formats.huggingface.folder import class_for, family_for
from weft.models.base import Role
from weft.pipeline import Pipeline
from weft.tokens import Tokens

ATOL, RTOL = 1e-4, 1e-5  # absolute tolerance; and relative to the largest value
STEPS = 50  # generated tokens
SAMPLE = "The café's 1,234 guests (naïve or not) said: don't! 東京 🙂\n    def f(x):\n        return x + 0.5  # Señor"
SECOND = "And what's more?"  # the second text of a pair
ROUND_TRIP, TRANSFORMERS = "what was written, read again", "transformers"


@dataclass(frozen=True)
class ParityCheck:
    """One comparison of outputs: their difference, and the count of numbers or tokens compared."""

    quantity: str
    against: str
    difference: float  # the largest of numbers; of tokens, how many differ
    count: int
    largest: float = 0.0  # largest absolute value, of hidden states as well: later layers pass their rounding on
    layers: tuple[float, ...] = ()  # the difference in each layer, where there are several and one differs

    @property
    def tolerance(self) -> float:
        """The largest difference allowed; partly relative, for hidden states of hundreds or thousands as in GPT-2."""
        return ATOL + RTOL * self.largest

    @property
    def matches(self) -> bool:
        """Return whether the outputs are equal up to rounding."""
        return self.difference <= self.tolerance

    def rows(self) -> list[list[str]]:
        """Return rows of a table, one a layer."""
        layers = {
            f"{self.quantity.partition(', most in')[0]}, layer {layer}": difference
            for layer, difference in enumerate(self.layers)
        }
        count = f"{self.count // max(len(layers), 1):,}"
        differences = layers or {self.quantity: self.difference}
        return [
            [quantity, self.against, count, f"{difference:.1e}", f"{self.tolerance:.1e}"]
            for quantity, difference in differences.items()
        ]


def compare_models(original: Pipeline, converted: Pipeline, folder: Path) -> list[ParityCheck]:
    """Compare a model with its conversion, and with transformers on the Hugging Face directory."""
    max_tokens = min(original.run.data.max_length, converted.run.data.max_length)
    expected, round_trip = (_run_sample(pipeline, original, max_tokens) for pipeline in (original, converted))
    checks = _compare_outputs(expected, round_trip, ROUND_TRIP)
    if find_spec("transformers") is not None:
        try:
            reference = _run_transformers(folder, original, max_tokens)
        except Exception as error:  # any error of the other library
            raise CheckpointError(f"{folder}: transformers cannot read it: {error}") from error
        checks += _compare_outputs(expected, reference, TRANSFORMERS)
    return checks


def _run_sample(pipeline: Pipeline, first: Pipeline, max_tokens: int) -> Outputs:
    """Return a model's tokens of the sample, and its outputs for the tokens of the model `first`."""
    if pipeline.run.task.name == "translate":
        tokens = {"tokens": parity_seq2seq.tokens(pipeline, SAMPLE, max_tokens)}
        source, target = parity_seq2seq.source_and_target(first, SAMPLE, max_tokens)
        return {**tokens, **parity_seq2seq.run_model(pipeline, source, target, STEPS)}
    return {
        "tokens": _sample_tokens(pipeline, max_tokens),
        **_run_model(pipeline, _sample_input(first, max_tokens), max_tokens),
    }


def _sample_tokens(pipeline: Pipeline, max_tokens: int) -> list[Tensor]:
    """Tokenize the sample and, where the model reads pairs, the second text and a pair."""
    tokenizer, special = pipeline.tokenizer, pipeline.tokenizer.specials
    sequences = [tokenizer.encode(SAMPLE).ids[: max_tokens // 2]]
    if family_for(pipeline.run).framed:
        second = tokenizer.encode(SECOND).ids
        sequences += [
            second[: max_tokens // 4],
            [special.bos, *second, *tokenizer.pair_separator, *second, special.eos],
        ]
    return [torch.tensor(ids) for ids in sequences]


def _sample_input(pipeline: Pipeline, max_tokens: int) -> Tokens:
    """Return the input of all models as the first one tokenizes it: tokenizers may differ."""
    tokenizer, special = pipeline.tokenizer, pipeline.tokenizer.specials
    first, *rest = (ids.tolist() for ids in _sample_tokens(pipeline, max_tokens))
    if not rest:
        return Tokens.pack([[special.bos, *first]])
    before, after = [special.bos, *first, *tokenizer.pair_separator], [*rest[0], special.eos]
    segments = torch.tensor([0] * len(before) + [1] * len(after))
    return replace(Tokens.pack([before + after]), segments=segments)


@torch.no_grad()
def _run_model(pipeline: Pipeline, sample: Tokens, max_tokens: int) -> Outputs:
    """Return hidden states and logits of the sample and, of a generator, its greedy continuation."""
    body, specials = pipeline.head.body, pipeline.tokenizer.specials
    roles, outputs = body.roles(pipeline.run.model), dict[str, list[Tensor]]()
    if Role.ENCODER in roles:
        outputs["hidden states"] = list(body.encode(sample, range(pipeline.run.model.layers + 1)))  # type: ignore[attr-defined]
    outputs |= {name: [logits] for name, logits in task_logits(pipeline, sample).items()}
    if Role.GENERATOR in roles:
        steps = min(STEPS, max_tokens - len(sample.ids))
        (best,) = generate(body, sample, specials.eos, DecodingConfig(max_length=steps))[0]
        outputs["greedy text"] = [torch.tensor([*best.ids, specials.eos][:steps])]
    return outputs


def task_logits(pipeline: Pipeline, sample: Tokens) -> dict[str, Tensor]:
    """Return the head's logits for the sample: one row a token, or one row in all."""
    head: Any = pipeline.head
    match pipeline.run.task.name:
        case "lm":
            return {"logits": head.body.logits(sample)}
        case "mlm":
            outputs = {"logits": head.body.logits(sample, direction=head.direction)}
            return (
                outputs
                if head.next is None
                else {**outputs, "next sentence": head.next(head.body.pooled_output(sample))}
            )
        case "electra":
            return {"logits": head.discriminate(sample)}
        case "classify":
            return {"logits": head.scores(head.pooled_output(sample))}
        case "tag":
            return {"logits": head.scores(head.states(sample))}
        case "span":
            return {"logits": head.scores(sample)}
        case "choice":
            return {"logits": head.scores(sample)[:, None]}
        case "embed" if pipeline.run.task.pooler:  # type: ignore[attr-defined]
            return {"pooled output": head.body.pooled_output(sample)}
    return {}


@torch.no_grad()
def _run_transformers(folder: Path, original: Pipeline, max_tokens: int) -> Outputs:
    """Return the outputs of transformers for the same tokens: its own tokenizer may differ."""
    library: Any = import_module("transformers")
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    if original.run.task.name == "translate":
        return parity_seq2seq.run_transformers(folder, original, library, SAMPLE, max_tokens, STEPS)
    sample = _sample_input(original, max_tokens)
    model = getattr(library, class_for(original.run)).from_pretrained(folder, dtype="float32").eval()
    ids, mask = sample.ids[None], torch.ones_like(sample.ids)[None]  # otherwise it infers padding from the ids
    token_types = {}
    if sample.segments is not None and getattr(original.run.model, "segments", 0) > 1:
        token_types = {"token_type_ids": sample.segments[None]}
    if original.run.task.name == "choice":
        ids, mask, token_types = ids[None], mask[None], {key: value[None] for key, value in token_types.items()}
    output = model(ids, attention_mask=mask, output_hidden_states=True, **token_types)
    outputs = {
        "hidden states": [layer[0] for layer in output.hidden_states],
        **_transformers_logits(output, original.run.task.name),
    }
    if not family_for(original.run).framed:
        steps = min(STEPS, max_tokens - ids.shape[1])
        text = model.generate(ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, pad_token_id=0)
        outputs["greedy text"] = [text[0, ids.shape[1] :]]
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    return {"tokens": _transformers_tokens(tokenizer, _sample_tokens(original, max_tokens)), **outputs}


def _transformers_tokens(tokenizer: Any, expected: Sequence[Tensor]) -> list[Tensor]:
    """Tokenize the same texts and pair with a tokenizer of transformers, truncated to the same lengths."""
    texts = [SAMPLE, SECOND][: len(expected)]
    sequences = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    sequences = [ids[: len(truncated)] for ids, truncated in zip(sequences, expected, strict=False)]
    return [torch.tensor(ids) for ids in (*sequences, tokenizer(SECOND, SECOND)["input_ids"])][: len(expected)]


def _transformers_logits(output: Any, task: str) -> Outputs:
    match task:
        case "span":
            return {"logits": [torch.stack([output.start_logits[0], output.end_logits[0]], -1)]}
        case "classify" | "choice":
            return {"logits": [output.logits]}
        case "embed":
            pooled = getattr(output, "pooler_output", None)
            return {} if pooled is None else {"pooled output": [pooled]}
        case "mlm" if "prediction_logits" in output:
            key = "sop_logits" if "sop_logits" in output else "seq_relationship_logits"
            return {"logits": [output.prediction_logits[0]], "next sentence": [output[key]]}
    return {"logits": [output.logits[0]]}


def _compare_outputs(expected: Outputs, reference: Outputs, against: str) -> list[ParityCheck]:
    largest = largest_value(tensor for tensors in expected.values() for tensor in tensors)
    return [
        compare(quantity, tensors, reference[quantity], against, largest)
        for quantity, tensors in expected.items()
        if quantity in reference
    ]


def largest_value(tensors: Iterable[Tensor]) -> float:
    """Return the largest absolute value; of tokens none."""
    floats = (tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel())
    return max((float(tensor.abs().max()) for tensor in floats), default=0.0)


def compare(
    quantity: str, expected: Sequence[Tensor], reference: Sequence[Tensor], against: str, largest: float = 0.0
) -> ParityCheck:
    """Compare tensors with those of another model: floats, of several layers where there are several, or tokens.

    `largest` is the largest value on the way to them.
    """
    count = sum(tensor.numel() for tensor in expected)
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in reference]:
        return ParityCheck(quantity, against, float("inf"), count)
    if not expected[0].is_floating_point() or not count:
        return ParityCheck(quantity, against, sum(map(_difference, expected, reference)), count)
    differences = list(map(_difference, expected, reference))
    worst = max(range(len(differences)), key=differences.__getitem__)
    several = len(differences) > 1 and differences[worst] > 0
    worst_layer, layers = (f", most in layer {worst}", tuple(differences)) if several else ("", ())
    largest = max(largest, largest_value(expected))
    return ParityCheck(quantity + worst_layer, against, differences[worst], count, largest, layers)


def _difference(expected: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference; of tokens, how many differ."""
    if not expected.is_floating_point() or not expected.numel():
        return float((expected != reference).sum())
    return float((expected - reference).abs().nan_to_num(torch.inf).max())
