"""`weft init`: write a first recipe for a data file, by what is in the file."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.console import OverridesArg, read_name, read_path
from weft.cli.data_check import TASKS, DataCheck, check_data, count_examples
from weft.cli.starter import MIN_VALIDATION_ROWS, StarterRecipe, measure_data, propose_recipe, validation_fraction
from weft.config.starters import NEEDS_VALIDATION
from weft.errors import ConfigError, WeftError

if TYPE_CHECKING:
    from weft.config.run import Run

_VALID_NAMES = ("valid", "val", "dev", "validation", "trial")
_NAME_COMMENTS = {
    "classify": "a label, or a number, for a text or a pair of texts",
    "tag": "a label for each word",
    "translate": "a text from a text",
    "lm": "a language model: the text goes on",
    "mlm": "a masked language model, as BERT is pretrained",
    "span": "the answer to a question, in a passage",
    "choice": "which of several texts fits",
    "words": "whole words",
    "characters": "single characters",
    "bpe": "sub-words by byte-pair encoding",
    "wordpiece": "sub-words, as BERT has them",
}
_PRETRAINED = """\
# A pretrained model does far better here: leave out tokenizer, and set lr: 1e-4 and
# model: {weights: encoder-en}, for English; or a folder, or a name on the hub
"""


def init(
    file: Annotated[
        str, typer.Argument(parser=read_name, metavar="FILE", help="A data file or a pattern, to train on.")
    ],
    overrides: OverridesArg = None,
    task: Annotated[
        str | None,
        typer.Option("--task", help=f"{', '.join(TASKS[:-1])} or {TASKS[-1]}; by the file if not given."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", parser=read_path, help="The recipe to write; nothing is overwritten.")
    ] = Path("mine.yaml"),
) -> None:
    """Write a first recipe for a data file: task, columns, tokenizer, model and training by what the file holds."""
    if out.exists():
        raise ConfigError(f"--out: {out} is there already; give another name with -o, or remove it")
    changes = [*_find_splits(file, overrides or []), *(overrides or [])]
    check = check_data(file, changes, task)
    text = write_recipe(file, check, propose_recipe(check, measure_data(check, *_machine())))
    run = _parse_recipe(text)
    try:
        with out.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}") from None
    typer.echo(_next_commands(out, check, run))


def _find_splits(file: str, overrides: Sequence[str]) -> list[str]:
    """Return overrides for the validation and test data that lie beside train.csv as dev.csv and test.csv."""
    path, changes = Path(file), []
    given = {override.partition("=")[0] for override in overrides}
    if "data.validation_fraction" in given:
        given.add("data.valid")
    for key, names in (("data.valid", _VALID_NAMES), ("data.test", ("test",))):
        beside = [path.with_name(path.name.replace("train", name)) for name in names if "train" in path.name]
        changes += [f"{key}={other}" for other in beside if other.is_file() and key not in given][:1]
    return changes


def _machine() -> tuple[bool, int]:
    """Return whether there is a GPU, and the number of cores that PyTorch uses."""
    import torch

    return torch.cuda.is_available(), torch.get_num_threads()


def write_recipe(file: str, check: DataCheck, recipe: StarterRecipe) -> str:
    """Return the recipe as YAML, with a comment on each line."""
    from weft.data.proposal import write_section

    profile = check.profiles["train"]
    sections = {**recipe.sections, "data": _data_section(check, recipe.sections["data"])}
    validates = "valid" in check.profiles or "validation_fraction" in sections["data"]
    if not validates:
        sections["train"] = {key: value for key, value in sections["train"].items() if key not in NEEDS_VALIDATION}
    parts = [
        f"# A first recipe for {file}, by weft init: {profile.layout.describe()}; {profile.rows:,} rows.\n",
        *(f"# Odd: {warning}\n" for warning in profile.warnings()),
    ]
    for name, section in sections.items():
        if not section:  # the tokenizer comes with the weights
            continue
        if name == "model" and recipe.advise_pretrained:
            parts.append(_PRETRAINED)
        comments = _comments(name, section.get("name", ""), recipe.note)
        ordered = {key: section[key] for key in comments if key in section}
        parts.append(write_section(name, ordered, comments) + "\n")
        if name == "data" and not validates:
            parts.append("  # Too few rows to hold some out for validation: name a file of them, as valid: FILE\n")
    return "".join(parts)


def _data_section(check: DataCheck, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data section: the files and how they are read, validation data, the length of sequences."""
    section = {**limits, **check.section}
    if check.profiles["train"].skipped.count or check.unread:
        section.setdefault("on_bad_rows", "skip")
    held_out = {**section, "validation_fraction": validation_fraction(check.profiles["train"].rows)}
    if (
        "valid" not in check.profiles
        and "validation_fraction" not in section
        and _has_rows_to_hold_out(check, held_out)
    ):
        return held_out
    return section


def _has_rows_to_hold_out(check: DataCheck, section: Mapping[str, Any]) -> bool:
    """Return whether there are enough rows to evaluate on a share of them."""
    try:
        return count_examples(check.task, section, "valid") >= MIN_VALIDATION_ROWS
    except WeftError:  # too few rows
        return False


def _comments(section: str, name: str, note: str) -> dict[str, str]:
    """Return a comment for each key of a section, in their order: its meaning as `weft models` shows it."""
    from weft.config.options import options_of
    from weft.config.sections import Data, Train
    from weft.registry import resolve

    own = note if section == "model" else _NAME_COMMENTS.get(name, "")
    comments = {"name": own, "preset": "a size of this model; weft models lists them"}
    schema: Any = {"data": Data, "train": Train}.get(section) or resolve(section, name).Config  # type: ignore[arg-type]
    return comments | {option.key: re.sub(r"(; |^)null: .*", "", option.meaning) for option in options_of(schema)}


def _parse_recipe(text: str) -> "Run":
    """Return the run of a recipe; raise before a file is written if what was proposed is not valid."""
    from weft.config.yaml import read_yaml
    from weft.formats.pretrained import read_run
    from weft.tasks.factory import make_task

    raw: Mapping[str, Any] = read_yaml(text, "the proposed recipe")
    run = read_run(raw)
    make_task(run)
    return run


def _next_commands(out: Path, check: DataCheck, run: "Run") -> str:
    from weft.registry import resolve
    from weft.tasks.prepare import has_split

    name, folder = run.task.name, Path("runs") / out.stem
    data = "" if has_split(run.data, "valid") or run.data.test else " FILE"
    question = "A TEXT WITH A [MASK]" if name == "mlm" else resolve("task", name).json_example or "A TEXT"
    if "pair" in check.fields.values():
        question = '{"text": "…", "pair": "…"}'
    return "\n".join(
        [
            f"{out}: {name}, {check.profiles['train'].rows:,} rows. Next:",
            f"  weft data show {out}",
            f"  weft train {out} --plan",
            f"  weft train {out}",
            f"  weft evaluate {folder}{data}",
            f"  weft predict {folder} '{question}'",
        ]
    )
