"""Outputs of a translation model and of transformers on a sample, for `parity`.

Both read the same source and target tokens. Compared are the hidden states of every layer, the logits, and the
translations by greedy search and by the model's own decoding configuration.
"""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.decoding.config import DecodingConfig
from weft.decoding.generate import generate
from weft.pipeline import Pipeline
from weft.tokens import Tokens

Outputs = dict[str, list[Tensor]]  # the tensors of each compared quantity


def source_and_target(pipeline: Pipeline, text: str, max_tokens: int) -> tuple[list[int], list[int]]:
    """Tokenize a text as source (with eos) and as target (with bos), each truncated to half of `max_tokens`."""
    tokenizer = pipeline.tokenizer
    source = [*tokenizer.encode(text).ids[: max_tokens // 2], tokenizer.specials.eos]
    return source, [tokenizer.target.specials.bos, *tokenizer.target.encode(text).ids[: max_tokens // 2]]


def tokens(pipeline: Pipeline, text: str, max_tokens: int) -> list[Tensor]:
    """Return the source and target tokens, without special tokens."""
    source, target = source_and_target(pipeline, text, max_tokens)
    return [torch.tensor(source[:-1]), torch.tensor(target[1:])]


@torch.no_grad()
def run_model(pipeline: Pipeline, source: list[int], target: list[int], steps: int) -> Outputs:
    """Return hidden states, logits and translations of a weft model."""
    head: Any = pipeline.head
    target_tokens, source_tokens = Tokens.pack([target]), Tokens.pack([source])
    encoded, decoded = head.body.states(target_tokens, source_tokens)
    outputs = {
        "encoder's states": encoded,
        "decoder's states": decoded,
        "logits": [head.body.logits(target_tokens, source_tokens)],
    }
    for name, config in decoding_configs(pipeline, steps).items():
        (best, *_) = generate(head.body, Tokens.pack([target[:1]]), head.eos, config, source_tokens, head.forbid)[0]
        outputs[name] = [torch.tensor([*best.ids, head.eos])]
    return outputs


def decoding_configs(pipeline: Pipeline, steps: int) -> dict[str, DecodingConfig]:
    """Return the decoding configurations to compare: greedy, and the model's own where that is a beam search."""
    config: Any = pipeline.task.options()
    limited = config.model_copy(
        update={"max_length": min(config.max_length, steps), "min_length": 0, "num_return_sequences": 1}
    )
    greedy = {"greedy text": limited.model_copy(update={"beam": 1})}
    return greedy if config.beam == 1 else {**greedy, f"text by beam {config.beam}": limited}


@torch.no_grad()
def run_transformers(folder: Path, pipeline: Pipeline, library: Any, text: str, max_tokens: int, steps: int) -> Outputs:
    """Return the outputs of transformers for the same tokens, and its own tokens where sentencepiece is installed."""
    source, target = source_and_target(pipeline, text, max_tokens)
    model = library.MarianMTModel.from_pretrained(folder, dtype="float32").eval()
    inputs = {"input_ids": torch.tensor([source]), "attention_mask": torch.ones(1, len(source), dtype=torch.long)}
    output = model(**inputs, decoder_input_ids=torch.tensor([target]), output_hidden_states=True)
    outputs = {
        "encoder's states": [layer[0] for layer in output.encoder_hidden_states],
        "decoder's states": [layer[0] for layer in output.decoder_hidden_states],
        "logits": [output.logits[0]],
    }
    special, overrides = pipeline.tokenizer.target.specials, {"min_length": 0, "num_return_sequences": 1}
    for name, config in decoding_configs(pipeline, steps).items():
        output = model.generate(**inputs, num_beams=config.beam, max_new_tokens=config.max_length, **overrides)
        ids = [id for id in output[0, 1:].tolist() if id not in (special.eos, special.pad)]
        outputs[name] = [torch.tensor([*ids, special.eos])]
    if find_spec("sentencepiece") is None:
        return outputs
    with warnings.catch_warnings():  # that sacremoses is recommended
        warnings.simplefilter("ignore")
        tokenizer = library.AutoTokenizer.from_pretrained(folder)
    source_ids, target_ids = (
        tokenizer(**{side: text}, add_special_tokens=False)["input_ids"] for side in ("text", "text_target")
    )
    return {
        "tokens": [torch.tensor(source_ids[: len(source) - 1]), torch.tensor(target_ids[: len(target) - 1])],
        **outputs,
    }
