"""From one format to another, by what is given and what is asked for, with a report on what is the same.

    Hugging Face directory -> weft checkpoint        weft checkpoint -> Hugging Face directory
    .arpa, .arpa.gz        -> weft checkpoint        an n-gram's checkpoint -> .arpa, .arpa.gz
    a folder of ELMo's options.json and weights (.hdf5) -> weft checkpoint

What was written is read again, and both answer a sample; where `transformers` is installed, it answers, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.conversion.parity import Check, compared
from weft.errors import CheckpointError
from weft.formats.huggingface.folder import is_hf, save_hf
from weft.formats.huggingface.hub import find_model
from weft.formats.sentence_transformers import export_pooling, transformer_folder
from weft.pipeline import load

ARPA = (".arpa", ".arpa.gz")


@dataclass(frozen=True)
class Report:
    """What was written, and what was compared."""

    path: Path
    checks: Sequence[Check] = ()

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headers and rows."""
        rows = [row for one in self.checks for row in one.rows()]
        return ["compared", "with", "numbers", "largest difference", "allowed"], rows

    def largest(self) -> str:
        """Name the largest difference, by what is allowed."""
        worst = max(self.checks, key=lambda one: one.apart / one.allowed)
        return f"largest difference: {worst.apart:.1e}, in {worst.what}, with {worst.against}"

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
        from weft.formats.arpa import export_arpa, import_arpa

        return Report((import_arpa if str(before).endswith(ARPA) else export_arpa)(before, after))
    before = find_model(before)
    if any(before.glob("*.hdf5")):
        return Report(_elmo(before, after))
    given = load(before, device="cpu")
    before = transformer_folder(before)
    if is_hf(before):
        given.save(after)
        return Report(after, compared(given, load(after, device="cpu"), before))
    save_hf(after, given.run, given.tokenizer, given.head)
    if given.pooling is not None:
        export_pooling(after, given.pooling, given.head.body.width)
    return Report(after, compared(given, load(after, device="cpu"), after))


def _elmo(folder: Path, target: Path) -> Path:
    """Read a folder of the files that ELMo was published as; a vocabulary is a file of words."""
    from weft.formats.elmo import import_elmo

    options, weights, words = (sorted(folder.glob(one)) for one in ("*options.json", "*.hdf5", "*vocab*.txt"))
    if len(options) != 1 or len(weights) != 1 or len(words) > 1:
        found = ", ".join(path.name for path in (*options, *weights, *words))
        raise CheckpointError(
            f"{folder}: must hold one ELMo, that is one *options.json, one *.hdf5 and at most one *vocab*.txt, but has "
            f"{found}; put them into a folder of their own"
        )
    return import_elmo(options[0], weights[0], target, words[0] if words else None)
