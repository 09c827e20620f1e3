"""What a model that translates makes of a sample, and what transformers makes of the same, for `parity`.

Both read the same tokens on both sides: every layer's states, what follows each token, and what they write by
themselves, greedily and in the way that the model is made to search.
"""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.decoding.generate import DecodingConfig, generate
from weft.pipeline import Pipeline
from weft.tokens import Tokens

Answers = dict[str, list[Tensor]]


def sides(pipeline: Pipeline, text: str, room: int) -> tuple[list[int], list[int]]:
    """Cut a text as a source and as a target, both in half of the room."""
    tokenizer = pipeline.tokenizer
    source = [*tokenizer.encode(text).ids[: room // 2], tokenizer.specials.eos]
    return source, [tokenizer.target.specials.bos, *tokenizer.target.encode(text).ids[: room // 2]]


def tokens(pipeline: Pipeline, text: str, room: int) -> list[Tensor]:
    """Return the tokens of both sides, without what begins and ends them."""
    source, target = sides(pipeline, text, room)
    return [torch.tensor(source[:-1]), torch.tensor(target[1:])]


@torch.no_grad()
def answers(pipeline: Pipeline, source: list[int], target: list[int], steps: int) -> Answers:
    """Read both sides, and translate the source."""
    head: Any = pipeline.head
    read, given = Tokens.pack([target]), Tokens.pack([source])
    encoded, decoded = head.body.states(read, given)
    found = {"encoder's states": encoded, "decoder's states": decoded, "logits": [head.body.logits(read, given)]}
    for name, options in searches(pipeline, steps).items():
        (best, *_) = generate(head.body, Tokens.pack([target[:1]]), head.eos, options, given, head.forbid)[0]
        found[name] = [torch.tensor([*best.ids, head.eos])]
    return found


def searches(pipeline: Pipeline, steps: int) -> dict[str, DecodingConfig]:
    """Name the searches that are compared: the greedy one, and the model's own where that is a beam."""
    own: Any = pipeline.task.options()
    short = own.model_copy(update={"max_length": min(own.max_length, steps), "min_length": 0, "candidates": 1})
    greedy = {"greedy text": short.model_copy(update={"beam": 1})}
    return greedy if own.beam == 1 else {**greedy, f"text by beam {own.beam}": short}


@torch.no_grad()
def answers_there(folder: Path, pipeline: Pipeline, library: Any, text: str, room: int, steps: int) -> Answers:
    """Let transformers read the same tokens, and cut the text by itself where it can (it needs sentencepiece)."""
    source, target = sides(pipeline, text, room)
    model = library.MarianMTModel.from_pretrained(folder, dtype="float32").eval()
    given = {"input_ids": torch.tensor([source]), "attention_mask": torch.ones(1, len(source), dtype=torch.long)}
    told = model(**given, decoder_input_ids=torch.tensor([target]), output_hidden_states=True)
    found = {
        "encoder's states": [layer[0] for layer in told.encoder_hidden_states],
        "decoder's states": [layer[0] for layer in told.decoder_hidden_states],
        "logits": [told.logits[0]],
    }
    special, plain = pipeline.tokenizer.target.specials, {"min_length": 0, "num_return_sequences": 1}
    for name, options in searches(pipeline, steps).items():
        told = model.generate(**given, num_beams=options.beam, max_new_tokens=options.max_length, **plain)
        written = [id for id in told[0, 1:].tolist() if id not in (special.eos, special.pad)]
        found[name] = [torch.tensor([*written, special.eos])]
    if find_spec("sentencepiece") is None:
        return found
    with warnings.catch_warnings():  # of another package that it likes to have
        warnings.simplefilter("ignore")
        cut = library.AutoTokenizer.from_pretrained(folder)
    first, second = (cut(**{side: text}, add_special_tokens=False)["input_ids"] for side in ("text", "text_target"))
    return {"tokens": [torch.tensor(first[: len(source) - 1]), torch.tensor(second[: len(target) - 1])], **found}
