"""`weft data check`: print the contents of a data file, or of a recipe's data, before anything is trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.console import JsonOption, OverridesArg, print_table, read_name
from weft.config.json import write_json
from weft.errors import ConfigError, WeftError

if TYPE_CHECKING:
    from weft.data.profile import ColumnProfile, FileProfile
    from weft.data.proposal import Proposal

TASKS = ("classify", "tag", "translate", "lm", "mlm", "span", "choice")  # that can be proposed
_MAX_LABELS = 20  # that are printed
_CANNOT = "cannot be read as it is set"


@dataclass
class DataCheck:
    """The profiles of the splits, the proposed task and data section, and what the task reads of each split."""

    task: dict[str, Any]
    profiles: dict[str, "FileProfile"]
    section: dict[str, Any]  # the recipe's data section
    fields: dict[Any, str] = field(default_factory=dict)  # column -> the field that it is read as
    # `train and valid` -> rows of the second that are in the first
    shared: dict[str, int] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)  # split -> what the task reads of it

    @property
    def unread(self) -> bool:
        """Return whether the task stops at a row of some split."""
        return any(result.startswith(_CANNOT) for result in self.read.values())


def data_check(
    name: Annotated[
        str, typer.Argument(parser=read_name, metavar="FILE|RECIPE", help="A data file or a pattern, or a recipe.")
    ],
    overrides: OverridesArg = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is in a data file: columns, lengths, labels, duplicates, what is odd; and the data section for it."""
    from weft.data.readers.lines import plural

    check = check_data(name, overrides or [])
    if as_json:
        splits = {split: profile.to_dict() for split, profile in check.profiles.items()}
        result = {"task": check.task, "splits": splits, "shared": check.shared, "read": check.read}
        typer.echo(write_json({**result, "data": check.section}))
        return
    for split, profile in check.profiles.items():
        _print_profile(split, profile, check)
    if "valid" in check.read and "valid" not in check.profiles:
        typer.echo(f"valid, held out of train: {check.read['valid']}\n")
    for pair, rows in check.shared.items():
        if rows:
            typer.echo(f"in both {pair}: {plural(rows, 'row')} with the same text")
    _print_section(check)


def check_data(name: str, overrides: Sequence[str], task: str | None = None) -> DataCheck:
    """Return what is in a file or in a recipe's data; a file's task is proposed, unless it is given."""
    from weft.config.run import named_section
    from weft.config.schema import read_section
    from weft.config.sections import Data
    from weft.data.profile import profile_sample, profile_source
    from weft.data.samples.datasets import SPLITS

    raw = _read_raw(name, overrides)
    if raw.get("tasks") is not None:
        raise ConfigError("tasks: have data of their own; name a file, or a recipe of one task")
    data = read_section(Data, raw.get("data", {}), "data")
    given = named_section("task", raw) if raw.get("task") is not None or data.sample is not None else None
    profiles: dict[str, FileProfile] = {}
    if data.sample is not None:
        for split in SPLITS:
            profiles[split] = profile_sample(data.sample, split, profiles.get("train"))
        check = DataCheck(dict(given or {}), profiles, {"sample": data.sample})
    else:
        sources = {split: source for split in SPLITS if (source := getattr(data, split))}
        for split, source in sources.items():
            profiles[split] = profile_source(source, data, profiles.get("train"))
        check = _check_files(raw, profiles, sources, task)
    check.shared = _shared_rows(profiles)
    check.read = _read_as_task(check, check.section if given is None else raw["data"])
    return check


def _check_files(
    raw: dict[str, Any], profiles: dict[str, "FileProfile"], sources: dict[str, Any], name: str | None
) -> DataCheck:
    """Return the check of files, with the task and the columns that the recipe has or else that are proposed."""
    from weft.data.proposal import Proposal, column_fields, propose

    task, given = raw.get("task") or {}, raw["data"]
    try:
        proposal = propose(profiles["train"], task["name"] if task.get("name") in TASKS else name)
    except WeftError:
        if not task:
            raise
        proposal = Proposal(task.get("name", "classify"), {})
    section = _section(given, proposal, profiles, sources)
    fields = column_fields(given.get("columns") or proposal.columns)
    return DataCheck(task or _task_section(proposal), profiles, section, fields)


def _read_raw(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    from weft.config.recipes import read_recipe, recipe_names

    if Path(name).suffix in (".yaml", ".yml") or (name in recipe_names() and not Path(name).is_file()):
        return read_recipe(name, overrides)
    for override in overrides:
        if not override.startswith("data."):
            raise ConfigError(
                f"{override!r}: a file has no recipe to change; give keys of data, such as data.format=tsv"
            )
    return read_recipe({"data": {"train": name}}, overrides)


def _task_section(proposal: "Proposal") -> dict[str, Any]:
    return {"name": proposal.task, **proposal.options}


def _section(
    given: dict[str, Any], proposal: "Proposal", profiles: dict[str, "FileProfile"], sources: dict[str, Any]
) -> dict[str, Any]:
    """Return the data section: what is given, completed by what the file needs."""
    proposed = proposal.data_section(profiles["train"], sources)
    if "columns" in given:
        proposed = {key: value for key, value in proposed.items() if key not in ("columns", "header")}
    return {**proposed, **{key: value for key, value in given.items() if key not in sources}}


def _shared_rows(profiles: dict[str, "FileProfile"]) -> dict[str, int]:
    names = list(profiles)
    pairs = [(first, second) for i, first in enumerate(names) for second in names[i + 1 :]]
    return {f"{first} and {second}": profiles[first].shared_rows(profiles[second]) for first, second in pairs}


def _read_as_task(check: DataCheck, section: dict[str, Any]) -> dict[str, str]:
    """Return for each split the number of examples that the task reads, or the error."""
    held_out = ["valid"] if section.get("validation_fraction") else []
    results = {}
    for split in [*check.profiles, *held_out]:
        try:
            results[split] = f"{count_examples(check.task, section, split):,} examples of {check.task['name']}"
        except WeftError as error:
            results[split] = f"{_CANNOT}: {error}"
    return results


def count_examples(task: Mapping[str, Any], section: Mapping[str, Any], split: str) -> int:
    """Return the number of examples that a task reads of a split; raise at a row that it cannot read."""
    from weft.config.schema import read_section
    from weft.config.sections import Data
    from weft.data.readers.examples import Skipped
    from weft.registry import resolve
    from weft.tasks.prepare import read_split

    task_class = resolve("task", task["name"])
    configured = task_class(read_section(task_class.Config, task, "task"))
    return sum(1 for _ in read_split(read_section(Data, section, "data"), split, configured, Skipped()))


def _print_profile(split: str, profile: "FileProfile", check: DataCheck) -> None:
    headers = ["column", "field", "type", "words", "characters", "values", "empty", "examples"]
    rows = [
        _column_row(column, check.fields.get(column.name, check.fields.get(number, "")))
        for number, column in enumerate(profile.columns)
    ]
    print_table(headers, rows, title=f"{split}: {profile.source}: {profile.layout.describe()}; {profile.rows:,} rows")
    for column in profile.columns:
        if column.labels:
            typer.echo(f"{column.name}: {_label_counts(column)}")
    for warning in profile.warnings():
        typer.echo(f"odd: {warning}")
    typer.echo(f"{split}: {check.read[split]}\n")


def _column_row(column: "ColumnProfile", field: str) -> list[str]:
    words, characters = column.words, column.characters
    values = "many" if column.values is None else f"{len(column.values):,}"
    lengths = [f"{part.median:,} / {part.p95:,} / {part.max:,}" if part.max else "" for part in (words, characters)]
    examples = " | ".join(example.replace("\n", " ") for example in column.examples)
    return [str(column.name), field, column.kind, *lengths, values, f"{column.empty:,}", examples]


def _label_counts(column: "ColumnProfile") -> str:
    shown = ", ".join(f"{label} {count:,}" for label, count in column.labels.most_common(_MAX_LABELS))
    more = len(column.labels) - _MAX_LABELS
    return shown + (f" and {more:,} more" if more > 0 else "")


def _print_section(check: DataCheck) -> None:
    from weft.data.proposal import flow_yaml, write_section

    typer.echo("words and characters: median / 95 % / max. For a recipe:\n")
    typer.echo(f"task: {flow_yaml(check.task)}")
    typer.echo(write_section("data", check.section))
