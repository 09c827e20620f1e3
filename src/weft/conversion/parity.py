"""Whether two models answer alike: the tokens of a sample, every layer's states, what the head makes of them, its text.

One is compared with what was written of it, read again, and with what `transformers`, where it is installed, makes of
the same directory. What is read is one text, or where a model reads pairs, a pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.conversion import parity_seq2seq
from weft.decoding.generate import DecodingConfig, generate
from weft.errors import CheckpointError
from weft.formats.huggingface.folder import class_for, family_for
from weft.models.base import Role
from weft.pipeline import Pipeline
from weft.tokens import Tokens

SAME, ROUNDING = 1e-4, 1e-5  # numbers that are no further apart count as the same; and this much of the largest
STEPS = 50  # tokens of the text that is generated
SAMPLE = "The café's 1,234 guests (naïve or not) said: don't! 東京 🙂\n    def f(x):\n        return x + 0.5  # Señor"
SECOND = "And what's more?"  # of a pair
AGAIN, THERE = "what was written, read again", "transformers"

Answers = dict[str, list[Tensor]]


@dataclass(frozen=True)
class Check:
    """One comparison: how far apart two answers are, and in how many numbers or tokens."""

    what: str
    against: str
    apart: float
    count: int
    largest: float = 0.0  # of the numbers that are compared
    layers: tuple[float, ...] = ()  # how far apart each of several layers is, where one is at all

    @property
    def allowed(self) -> float:
        """How far apart they may be: GPT-2 has states of some thousands, which no two programs round alike."""
        return SAME + ROUNDING * self.largest

    @property
    def same(self) -> bool:
        """Whether they are the same, but for rounding."""
        return self.apart <= self.allowed

    def rows(self) -> list[list[str]]:
        """Return it as rows of a table, one a layer."""
        parts = {f"{self.what.partition(', most in')[0]}, layer {n}": apart for n, apart in enumerate(self.layers)}
        each = f"{self.count // max(len(parts), 1):,}"
        told = parts or {self.what: self.apart}
        return [[what, self.against, each, f"{apart:.1e}", f"{self.allowed:.1e}"] for what, apart in told.items()]


def compared(given: Pipeline, back: Pipeline, folder: Path) -> list[Check]:
    """Compare a model with what was written of it, and with what transformers makes of the Hugging Face directory."""
    room = min(given.run.data.longest, back.run.data.longest)
    mine, again = (_answered(one, given, room) for one in (given, back))
    checks = _checks(mine, again, AGAIN)
    if find_spec("transformers") is not None:
        try:
            theirs = _answers_there(folder, given, room)
        except Exception as error:  # whatever another library may have to say
            raise CheckpointError(f"{folder}: transformers cannot read it: {error}") from error
        checks += _checks(mine, theirs, THERE)
    return checks


def _answered(pipeline: Pipeline, first: Pipeline, room: int) -> Answers:
    """Cut the sample, and read it as the `first` cuts it."""
    if pipeline.run.task.name == "translate":
        cut = {"tokens": parity_seq2seq.tokens(pipeline, SAMPLE, room)}
        return {**cut, **parity_seq2seq.answers(pipeline, *parity_seq2seq.sides(first, SAMPLE, room), STEPS)}
    return {"tokens": _tokens(pipeline, room), **_answers(pipeline, _sample(first, room), room)}


def _tokens(pipeline: Pipeline, room: int) -> list[Tensor]:
    """Cut the sample, and where a model reads pairs, the second text, and put a pair together."""
    tokenizer, special = pipeline.tokenizer, pipeline.tokenizer.specials
    found = [tokenizer.encode(SAMPLE).ids[: room // 2]]
    if family_for(pipeline.run).framed:
        second = tokenizer.encode(SECOND).ids
        found += [second[: room // 4], [special.bos, *second, *tokenizer.between, *second, special.eos]]
    return [torch.tensor(ids) for ids in found]


def _sample(pipeline: Pipeline, room: int) -> Tokens:
    """Lay out what all of them read: their tokenizers may not agree."""
    tokenizer, special = pipeline.tokenizer, pipeline.tokenizer.specials
    first, *rest = (ids.tolist() for ids in _tokens(pipeline, room))
    if not rest:
        return Tokens.pack([[special.bos, *first]])
    before, after = [special.bos, *first, *tokenizer.between], [*rest[0], special.eos]
    segments = torch.tensor([0] * len(before) + [1] * len(after))
    return replace(Tokens.pack([before + after]), segments=segments)


@torch.no_grad()
def _answers(pipeline: Pipeline, read: Tokens, room: int) -> Answers:
    """Read the sample, and go on with it, where there is room for so many tokens."""
    body, specials = pipeline.head.body, pipeline.tokenizer.specials
    roles, found = body.roles(pipeline.run.model), dict[str, list[Tensor]]()
    if Role.ENCODER in roles:
        found["hidden states"] = list(body.encode(read, range(pipeline.run.model.layers + 1)))  # type: ignore[attr-defined]
    found |= {what: [logits] for what, logits in _logits(pipeline, read).items()}
    if Role.GENERATOR in roles:
        steps = min(STEPS, room - len(read.ids))
        (best,) = generate(body, read, specials.eos, DecodingConfig(max_length=steps))[0]
        found["greedy text"] = [torch.tensor([*best.ids, specials.eos][:steps])]
    return found


def _logits(pipeline: Pipeline, read: Tokens) -> dict[str, Tensor]:
    """Return what stands on the body makes of the sample: a row a token, or one for all."""
    head: Any = pipeline.head
    match pipeline.run.task.name:
        case "lm":
            return {"logits": head.body.logits(read)}
        case "mlm":
            filled = {"logits": head.body.logits(read, direction=head.direction)}
            return filled if head.next is None else {**filled, "next sentence": head.next(head.body.summary(read))}
        case "classify":
            return {"logits": head.scores(head.summary(read))}
        case "tag":
            return {"logits": head.scores(head.states(read))}
        case "span":
            return {"logits": head.scores(read)}
        case "choice":
            return {"logits": head.scores(read)[:, None]}
        case "embed" if pipeline.run.task.summary:  # type: ignore[attr-defined]
            return {"summary": head.body.summary(read)}
    return {}


@torch.no_grad()
def _answers_there(folder: Path, given: Pipeline, room: int) -> Answers:
    """Let transformers read the same tokens: its own tokenizer may read other ones."""
    library: Any = import_module("transformers")
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    if given.run.task.name == "translate":
        return parity_seq2seq.answers_there(folder, given, library, SAMPLE, room, STEPS)
    read = _sample(given, room)
    model = getattr(library, class_for(given.run)).from_pretrained(folder, dtype="float32").eval()
    ids, seen = read.ids[None], torch.ones_like(read.ids)[None]  # or it would look past what it takes for padding
    kinds = {}
    if read.segments is not None and getattr(given.run.model, "segments", 0) > 1:
        kinds = {"token_type_ids": read.segments[None]}
    if given.run.task.name == "choice":
        ids, seen, kinds = ids[None], seen[None], {key: value[None] for key, value in kinds.items()}
    told = model(ids, attention_mask=seen, output_hidden_states=True, **kinds)
    found = {"hidden states": [layer[0] for layer in told.hidden_states], **_logits_there(told, given.run.task.name)}
    if not family_for(given.run).framed:
        steps = min(STEPS, room - ids.shape[1])
        text = model.generate(ids, attention_mask=seen, max_new_tokens=steps, do_sample=False, pad_token_id=0)
        found["greedy text"] = [text[0, ids.shape[1] :]]
    cut = library.AutoTokenizer.from_pretrained(folder)
    return {"tokens": _tokens_there(cut, _tokens(given, room)), **found}


def _tokens_there(tokenizer: Any, mine: Sequence[Tensor]) -> list[Tensor]:
    """Cut the same texts, and put a pair together; of a text that had no room, as much of it."""
    texts = [SAMPLE, SECOND][: len(mine)]
    found = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    found = [ids[: len(own)] for ids, own in zip(found, mine, strict=False)]
    return [torch.tensor(ids) for ids in (*found, tokenizer(SECOND, SECOND)["input_ids"])][: len(mine)]


def _logits_there(told: Any, task: str) -> Answers:
    match task:
        case "span":
            return {"logits": [torch.stack([told.start_logits[0], told.end_logits[0]], -1)]}
        case "classify" | "choice":
            return {"logits": [told.logits]}
        case "embed":
            pooled = getattr(told, "pooler_output", None)
            return {} if pooled is None else {"summary": [pooled]}
        case "mlm" if "prediction_logits" in told:
            follows = "sop_logits" if "sop_logits" in told else "seq_relationship_logits"
            return {"logits": [told.prediction_logits[0]], "next sentence": [told[follows]]}
    return {"logits": [told.logits[0]]}


def _checks(mine: Answers, theirs: Answers, against: str) -> list[Check]:
    return [_check(what, parts, theirs[what], against) for what, parts in mine.items() if what in theirs]


def _check(what: str, mine: Sequence[Tensor], theirs: Sequence[Tensor], against: str) -> Check:
    count = sum(one.numel() for one in mine)
    if [one.shape for one in mine] != [one.shape for one in theirs]:
        return Check(what, against, float("inf"), count)
    if not mine[0].is_floating_point() or not count:
        return Check(what, against, sum(map(_apart, mine, theirs)), count)
    apart = list(map(_apart, mine, theirs))
    worst = max(range(len(apart)), key=apart.__getitem__)
    several = len(apart) > 1 and apart[worst] > 0
    place, layers = (f", most in layer {worst}", tuple(apart)) if several else ("", ())
    return Check(what + place, against, apart[worst], count, float(mine[worst].abs().max()), layers)


def _apart(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest difference; of tokens, how many differ."""
    if not mine.is_floating_point() or not mine.numel():
        return float((mine != theirs).sum())
    return float((mine - theirs).abs().nan_to_num(torch.inf).max())
