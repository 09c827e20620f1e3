"""From one format to another, by what is given and what is asked for, with a report on what is the same.

    Hugging Face directory -> weft checkpoint        weft checkpoint -> Hugging Face directory
    .arpa, .arpa.gz        -> weft checkpoint        an n-gram's checkpoint -> .arpa, .arpa.gz
    a folder of ELMo's options.json and weights (.hdf5) -> weft checkpoint

What was written is read again, and both answer a sample; where `transformers` is installed, it answers, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.hf import is_hf, save_hf
from weft.decode.search import Options, generate
from weft.errors import CheckpointError
from weft.models.base import Role
from weft.pipeline import Pipeline, load
from weft.tokens import Tokens

SAME, ROUNDING = 1e-4, 1e-5  # numbers that are no further apart count as the same; and this much of the largest
STEPS = 50  # tokens of the text that is generated
SAMPLE = "The café's 1,234 guests (naïve or not) said: don't! 東京 🙂\n    def f(x):\n        return x + 0.5  # Señor"
ARPA = (".arpa", ".arpa.gz")


@dataclass(frozen=True)
class Check:
    """One comparison: how far apart two answers are, and in how many numbers or tokens."""

    what: str
    against: str
    apart: float
    count: int
    largest: float = 0.0  # of the numbers that are compared

    @property
    def allowed(self) -> float:
        """How far apart they may be: GPT-2 has states of some thousands, which no two programs round alike."""
        return SAME + ROUNDING * self.largest

    @property
    def same(self) -> bool:
        """Whether they are the same, but for rounding."""
        return self.apart <= self.allowed


@dataclass(frozen=True)
class Report:
    """What was written, and what was compared."""

    path: Path
    checks: Sequence[Check] = ()

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headers and rows."""
        rows = [
            [one.what, one.against, f"{one.count:,}", f"{one.apart:.1e}", f"{one.allowed:.1e}"] for one in self.checks
        ]
        return ["compared", "with", "numbers", "largest difference", "allowed"], rows

    def demand(self) -> None:
        """Refuse a conversion that has changed something."""
        for one in self.checks:
            if not one.same:
                raise CheckpointError(
                    f"{self.path}: {one.what} differ by {one.apart:.3g} from those of {one.against}, where "
                    f"{one.allowed:.1g} is allowed; it is left there to be looked at"
                )


def convert(source: str | Path, target: str | Path) -> Report:
    """Convert a model into a new file or folder."""
    before, after = Path(source), Path(target)
    if str(before).endswith(ARPA) or str(after).endswith(ARPA):
        from weft.checkpoint.arpa import export_arpa, import_arpa

        return Report((import_arpa if str(before).endswith(ARPA) else export_arpa)(before, after))
    if any(before.glob("*.hdf5")):
        return Report(_elmo(before, after))
    given = load(before, device="cpu")
    if is_hf(before):
        given.save(after)
        return Report(after, _compared(given, load(after, device="cpu"), before))
    save_hf(after, given.run, given.tokenizer, given.head)
    return Report(after, _compared(given, load(after, device="cpu"), after))


def _elmo(folder: Path, target: Path) -> Path:
    """Read a folder of the files that ELMo was published as; a vocabulary is a file of words."""
    from weft.checkpoint.elmo import import_elmo

    options, weights, words = (sorted(folder.glob(one)) for one in ("*options.json", "*.hdf5", "*vocab*.txt"))
    if len(options) != 1 or len(weights) != 1 or len(words) > 1:
        found = ", ".join(path.name for path in (*options, *weights, *words))
        raise CheckpointError(
            f"{folder}: must hold one ELMo, that is one *options.json, one *.hdf5 and at most one *vocab*.txt, but has "
            f"{found}; put them into a folder of their own"
        )
    return import_elmo(options[0], weights[0], target, words[0] if words else None)


Answers = dict[str, list[Tensor]]


def _compared(given: Pipeline, back: Pipeline, folder: Path) -> list[Check]:
    """Compare a model with what was written of it, and with what transformers makes of the Hugging Face directory."""
    room = min(given.run.data.longest, back.run.data.longest)
    mine = _answers(given, room)
    checks = _checks(mine, _answers(back, room), "what was written, read again")
    if find_spec("transformers") is not None:
        try:
            theirs = _answers_of_transformers(folder, given.tokenizer.specials.bos, mine["tokens"][0], room)
        except Exception as error:  # whatever another library may have to say
            raise CheckpointError(f"{folder}: transformers cannot read it: {error}") from error
        checks += _checks(mine, theirs, "transformers")
    return checks


@torch.no_grad()
def _answers(pipeline: Pipeline, room: int) -> Answers:
    """Read the sample, and go on with it, where there is room for so many tokens."""
    body, specials = pipeline.head.body, pipeline.tokenizer.specials
    ids = pipeline.tokenizer.encode(SAMPLE).ids[: room // 2]
    read, roles = Tokens.pack([[specials.bos, *ids]]), body.roles(pipeline.run.model)
    found = {"tokens": [torch.tensor(ids)]}
    if Role.ENCODER in roles:
        found["hidden states"] = list(body.encode(read, range(pipeline.run.model.layers + 1)))  # type: ignore[attr-defined]
    if Role.SCORER in roles:
        found["logits"] = [body.logits(read)]
    if Role.GENERATOR in roles:
        steps = min(STEPS, room - len(read.ids))
        (best,) = generate(body, read, specials.eos, Options(max_length=steps))[0]
        found["greedy text"] = [torch.tensor([*best.ids, specials.eos][:steps])]
    return found


@torch.no_grad()
def _answers_of_transformers(folder: Path, bos: int, ids: Tensor, room: int) -> Answers:
    """Let transformers read the same tokens: its own tokenizer may read other ones."""
    library: Any = import_module("transformers")
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    model = library.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    read = torch.tensor([[bos, *ids.tolist()]])
    told = model(read, output_hidden_states=True)
    steps = min(STEPS, room - read.shape[1])
    seen = torch.ones_like(read)  # or it would look past tokens that it takes for padding
    text = model.generate(read, attention_mask=seen, max_new_tokens=steps, do_sample=False, pad_token_id=0)
    return {
        "tokens": [torch.tensor(tokenizer(SAMPLE, add_special_tokens=False)["input_ids"][: len(ids)])],
        "hidden states": [layer[0] for layer in told.hidden_states],
        "logits": [told.logits[0]],
        "greedy text": [text[0, read.shape[1] :]],
    }


def _checks(mine: Answers, theirs: Answers, against: str) -> list[Check]:
    return [_check(what, parts, theirs[what], against) for what, parts in mine.items() if what in theirs]


def _check(what: str, mine: Sequence[Tensor], theirs: Sequence[Tensor], against: str) -> Check:
    count = sum(one.numel() for one in mine)
    if [one.shape for one in mine] != [one.shape for one in theirs]:
        return Check(what, against, float("inf"), count)
    if not mine[0].is_floating_point():
        apart = [float((one != other).sum()) for one, other in zip(mine, theirs, strict=True)]
    else:
        apart = [
            float((one - other).abs().nan_to_num(torch.inf).max()) for one, other in zip(mine, theirs, strict=True)
        ]
    worst = max(range(len(apart)), key=apart.__getitem__)
    place = f", most in layer {worst}" if len(apart) > 1 else ""
    largest = float(mine[worst].abs().max()) if mine[worst].is_floating_point() else 0.0
    return Check(what + place, against, apart[worst], count, largest)


def _apart(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest difference; of tokens, how many differ."""
    if not mine.is_floating_point():
        return float((mine != theirs).sum())
    return float((mine - theirs).abs().nan_to_num(torch.inf).max())
