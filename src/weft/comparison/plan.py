"""The plan of a comparison: recipes and their variants at one budget, checked before the first is trained.

A recipe's section `compare` lists its variants. They are named, each with its overrides; or a list of overrides, named
by their values; or a product: every combination of the listed values.

    compare: {fixed: {model.attention: none}, gpt: {model: {name: gpt, width: 128}}, mine: {recipe: own.yaml}}
    compare: [model.cell=gru, model.cell=lstm model.layers=2]
    compare: {model.cell: [elman, lstm, gru], model.layers: [1, 2]}

A section with a `name`, a `preset` or `weights` of its own takes the place of the recipe's; other keys change one
value. `recipe` begins from another recipe. A plan is kept as `plan.json` in a comparison's folder, so that it can go
on.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from weft.checkpoint.atomic_io import wrap_os_errors, write_atomic
from weft.checkpoint.contents import differences
from weft.comparison.baselines import BASELINES
from weft.config.overrides import Overrides, apply_overrides
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.config.sections import Train
from weft.config.small_files import read_small_text
from weft.errors import CheckpointError, ConfigError, WeftError, abbreviate
from weft.formats.pretrained import read_run
from weft.models.base import SelfFitted
from weft.pipeline import run_name
from weft.registry import resolve
from weft.tasks.base import Task
from weft.tasks.capabilities import SelfFitting
from weft.tasks.factory import make_task
from weft.tasks.prepare import data_for, has_split

FILE = "plan.json"
PER_TOKEN = ("perplexity", "loss")
MAX_ENTRIES, MAX_SEEDS = 200, 100
_NAME = re.compile(r"\w[\w .,+=-]{0,79}")  # of an entry, and so of a folder
_TIME = re.compile(r"(?P<number>\d+(\.\d+)?)\s*[smh]?")
_BUDGET = re.compile(r"(?P<number>\d+(\.\d+)?(e\+?\d+)?)\s*(?P<unit>steps|flops)?", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """The budget of each recipe: `key` is the key of `train` that it sets, `text` is the budget as given."""

    key: str  # steps, time or flops
    value: Any
    text: str

    @classmethod
    def parse(cls, given: str | int | float) -> "Budget":
        """Read `60s`, `5m`, `2000`, `2000steps` or `1e15flops`."""
        text = str(given).strip()
        match = _BUDGET.fullmatch(text)
        key = "time" if match is None else (match["unit"] or ("steps" if text.isdigit() else "time")).lower()
        amount = _TIME.fullmatch(text) if key == "time" else match
        if amount is None:
            raise ConfigError(f"--budget: must be such as 60s, 5m, 2000steps or 1e15flops, but is {text[:60]!r}")
        number = float(amount["number"])
        if not 0 < number < math.inf:
            raise ConfigError(f"--budget: must be more than 0 and finite, such as 60s, but is {text[:60]!r}")
        value = text if key == "time" else number
        if key == "steps" and value != int(value):
            raise ConfigError(f"--budget: steps are whole, but got {text!r}; give 60s, 2000steps or 1e15flops")
        return cls(key, int(value) if key == "steps" else value, text)

    def overrides(self, fitted: bool, train: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of `train` that give a recipe this budget.

        A model that is fitted counts passes over the data: it keeps its own number, and is stopped by a time alone.
        """
        if fitted:
            passes = any(train.get(key) is not None for key in ("steps", "epochs"))
            return {"train.time": self.value if self.key == "time" else None if passes else train.get("time")}
        limits = dict.fromkeys(("train.steps", "train.time", "train.flops", "train.epochs"))
        return {**limits, f"train.{self.key}": self.value}


@dataclass(frozen=True)
class PlannedEntry:
    """A recipe to train, or a baseline to fit (`baseline` is its name) on the data of `run`."""

    name: str
    run: Run
    baseline: str | None = None

    @property
    def fitted(self) -> bool:
        """Return whether its model is fitted without a gradient: an n-gram model, word2vec."""
        return is_fitted(self.run)

    @property
    def kind(self) -> str:
        """Return how it came about: trained, fitted or baseline."""
        return "baseline" if self.baseline else "fitted" if self.fitted else "trained"


@dataclass(frozen=True)
class Plan:
    """The entries of a comparison, its budget and its seeds."""

    entries: Sequence[PlannedEntry]
    budget: Budget
    seeds: Sequence[int]

    @property
    def split(self) -> str:
        """The split that entries are evaluated on: test, else valid."""
        return data_for(self.entries[0].run.data, None)[1]

    def metric(self, task: Task) -> str:
        """Return the metric that orders the entries: of language models with different tokenizers, bits per byte.

        A task may know its own only once it has its labels.
        """
        runs = [entry.run for entry in self.entries]
        if runs[0].task.name == "lm" and any(run.tokenizer != runs[0].tokenizer for run in runs):
            return "bits_per_byte"
        return runs[0].train.metric or task.metric

    def jobs(self) -> list[tuple[PlannedEntry, int]]:
        """Return what is to be trained and evaluated: each entry with each seed; seeds do not change a baseline."""
        return [(entry, seed) for entry in self.entries for seed in (self.seeds[:1] if entry.baseline else self.seeds)]

    def folder(self, entry: PlannedEntry, seed: int) -> Path:
        """Return the folder of a run within that of the comparison."""
        return Path(entry.name) if len(self.seeds) == 1 or entry.baseline else Path(entry.name, f"seed-{seed}")

    def write(self, out: Path) -> None:
        """Write `plan.json`, atomically."""
        entries = {entry.name: {"run": entry.run.dump(), "baseline": entry.baseline} for entry in self.entries}
        plan = {"budget": self.budget.text, "seeds": list(self.seeds), "entries": entries}
        with wrap_os_errors(out, "cannot hold a comparison", "choose another --out"):
            out.mkdir(parents=True, exist_ok=True)
            write_atomic(out / FILE, json.dumps(plan, indent=1).encode())


def read_plan(out: Path) -> Plan:
    """Read the plan of a comparison that was begun in a folder."""
    path = out / FILE
    try:
        raw = json.loads(read_small_text(path))
        entries = [
            PlannedEntry(_checked_name(name), Run.parse(entry["run"]), entry["baseline"])
            for name, entry in raw["entries"].items()
        ]
        seeds = [int(seed) for seed in raw["seeds"]]
        if not entries or not seeds or any(entry.baseline not in (None, *BASELINES) for entry in entries):
            raise ValueError("it has no entries, no seeds or an unknown baseline")
        return Plan(entries, Budget.parse(raw["budget"]), seeds)
    except FileNotFoundError:
        raise CheckpointError(
            f"{out}: holds no comparison: {FILE} is not there; begin one without --resume and --add"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, WeftError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: cannot be read: {reason}; begin anew in another --out") from None


def make_plan(
    recipes: Sequence[str | Path], budget: str | int | float, overrides: Overrides, seeds: int, baselines: bool
) -> Plan:
    """Return the plan of a comparison; raise an error for recipes, seeds or budgets that cannot be compared."""
    if not 1 <= seeds <= MAX_SEEDS:
        raise ConfigError(f"--seeds: must be from 1 to {MAX_SEEDS}, but is {seeds}")
    limit, changes = Budget.parse(budget), overrides if isinstance(overrides, str | Mapping) else list(overrides)
    raws = dict(_named_once(variant for recipe in recipes for variant in variants(recipe)))
    entries = [_entry(name, raw, changes, limit) for name, raw in raws.items()]
    first = entries[0].run
    trained = [_with_seed(entry, first.train.seed) for entry in entries]
    names = BASELINES if baselines else {}
    added = [
        PlannedEntry(name, first, name)
        for name, baseline in names.items()
        if baseline.serves(first) and name not in raws
    ]
    plan = Plan([*added, *trained], limit, range(first.train.seed, first.train.seed + seeds))
    check_comparable(plan)
    return plan


def with_entries(plan: Plan, recipes: Sequence[str | Path], overrides: Overrides) -> Plan:
    """Return a plan with further recipes at its budget and seeds; raise an error if they cannot be compared."""
    known = [(entry.name, None) for entry in plan.entries]
    added = [variant for recipe in recipes for variant in variants(recipe)]
    list(_named_once([*known, *added]))
    changes = overrides if isinstance(overrides, str | Mapping) else list(overrides)
    entries = [_with_seed(_entry(*variant, changes, plan.budget), plan.seeds[0]) for variant in added]
    more = replace(plan, entries=[*plan.entries, *entries])
    check_comparable(more)
    return more


def variants(recipe: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the recipe, as plain data, of each variant; of a recipe without `compare` itself."""
    raw = read_recipe(recipe)
    listed = raw.pop("compare", None)
    if listed is None:
        yield run_name(recipe), raw
        return
    for name, changes in _listed(listed, f"{recipe}: compare"):
        with _in_entry(name):
            changed = _variant(raw, changes)
        yield name, changed


def _listed(listed: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the overrides of each variant of a section `compare`."""
    if isinstance(listed, Mapping) and listed and all(isinstance(values, list) for values in listed.values()):
        for values in product(*listed.values()):
            yield _name_of(values), dict(zip(listed, values, strict=True))
    elif isinstance(listed, Mapping) and listed:
        for name, changes in listed.items():
            if changes is not None and not isinstance(changes, Mapping | list | str):
                raise ConfigError(f"{place}.{name}: must have overrides, such as model.cell: gru, but is {changes!r}")
            yield str(name), changes or {}
    elif isinstance(listed, list) and listed:
        for changes in listed:
            pairs = changes if isinstance(changes, Mapping) else dict(_split(part, place) for part in _parts(changes))
            yield _name_of(pairs.values()), changes if isinstance(changes, Mapping) else _parts(changes)
    else:
        raise ConfigError(
            f"{place}: must list variants, such as {{gru: {{model.cell: gru}}}}, [model.cell=gru] or "
            f"{{model.cell: [lstm, gru]}}, but is {abbreviate(listed)}"
        )


def _parts(changes: Any) -> list[str]:
    return changes.split() if isinstance(changes, str) else [str(part) for part in changes or ()]


def _split(part: str, place: str) -> tuple[str, str]:
    key, equals, value = part.partition("=")
    if not equals:
        raise ConfigError(f"{place}: an override is key=value, such as model.cell=gru, but got {part!r}")
    return key, value


def _name_of(values: Iterable[Any]) -> str:
    """Return a name made of overrides' values: `lstm-2`."""
    words = (value.get("name", value.get("preset", "")) if isinstance(value, Mapping) else value for value in values)
    return re.sub(r"[^\w.,+=-]+", "_", "-".join(str(word) for word in words)).strip("._-") or "recipe"


def _variant(raw: Mapping[str, Any], changes: Any) -> dict[str, Any]:
    """Return a recipe with a variant's changes."""
    if not isinstance(changes, Mapping):
        return read_recipe(raw, changes)
    changed = read_recipe(changes.get("recipe", raw))
    changed.pop("compare", None)
    for key, value in changes.items():
        if key == "recipe":
            continue
        if isinstance(value, Mapping) and {"name", "preset", "weights"} & value.keys():
            changed[key] = dict(value)
        else:
            apply_overrides(changed, {key: value})
    return changed


def _named_once(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield names with their recipes; raise an error if two have one name, or there is none."""
    pairs = list(named)
    names = [name for name, _ in pairs]
    if len({name.casefold() for name in names}) != len(names) or not names:
        raise ConfigError(f"compare: needs recipes with different names, but got {', '.join(names) or 'none'}")
    if len(names) > MAX_ENTRIES:
        raise ConfigError(f"compare: takes up to {MAX_ENTRIES} entries, but got {len(names)}; list fewer")
    yield from ((_checked_name(name), raw) for name, raw in pairs)


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"compare: {name[:80]!r} names a folder: give letters, digits and .,+=- alone")
    return name


def is_fitted(run: Run) -> bool:
    """Return whether a run's model fits itself."""
    model, task = resolve("model", run.model.name), resolve("task", run.task.name)
    return issubclass(model, SelfFitted) and issubclass(task, SelfFitting)


def _entry(name: str, raw: dict[str, Any], changes: Any, budget: Budget) -> PlannedEntry:
    """Return a variant, checked, with the budget."""
    with _in_entry(name):
        apply_overrides(raw, changes)
        run = read_run(raw, budget.overrides(False, {}))
        return PlannedEntry(name, read_run(raw, budget.overrides(True, raw["train"])) if is_fitted(run) else run)


@contextmanager
def _in_entry(name: str) -> Iterator[None]:
    """Put the name of an entry before the message of an error that is raised inside."""
    try:
        yield
    except WeftError as error:
        raise type(error)(f"{name}: {error}") from None


def _with_seed(entry: PlannedEntry, seed: int) -> PlannedEntry:
    """Return an entry with the seed of all, once for each training."""
    train = entry.run.train.model_copy(update={"seed": seed, "seeds": 1})
    return replace(entry, run=entry.run.model_copy(update={"train": train}))


def check_comparable(plan: Plan) -> None:
    """Raise an error for entries whose results cannot stand in one table: another task, data, metric or batch."""
    entries = [entry for entry in plan.entries if not entry.baseline]
    if not has_split(entries[0].run.data, plan.split):
        raise ConfigError("compare: the recipes need data.test or data.valid to be evaluated on")
    check_same_task({entry.name: entry.run for entry in entries})
    metrics = {entry.name: _metric_of(entry.run) for entry in entries}
    _check_same(metrics, "the best model is chosen by train.metric", "set it to one value in both")
    chosen = entries[0].run.train.metric
    if chosen in PER_TOKEN:
        for entry in entries[1:]:
            _check_same_tokenizer(entries[0], entry, chosen)
    trained = {entry.name: entry.run.train for entry in entries if not entry.fitted}
    if plan.budget.key == "steps":
        sizes = {name: _tokens_per_step(train) for name, train in trained.items()}
        _check_same(sizes, f"at a budget of {plan.budget.text} a step has train.batch_tokens",
                    "set it to one value in both, by --set train.batch_tokens=…, or give a budget of time")  # fmt: skip


def _check_same(values: Mapping[str, Any], what: str, remedy: str) -> None:
    names = list(values)
    for name in names[1:]:
        if values[name] != values[names[0]]:
            raise ConfigError(
                f"compare: {what}, which is {values[names[0]]} in {names[0]} and {values[name]} in {name}: {remedy}"
            )


def _check_same_tokenizer(first: PlannedEntry, other: PlannedEntry, metric: str) -> None:
    kinds = ({"tokenizer": entry.run.tokenizer.model_dump()} for entry in (first, other))
    for key, (here, there) in differences(*kinds).items():
        raise ConfigError(
            f"compare: train.metric is {metric}, which counts tokens, and so depends on the tokenizer, but {key} is "
            f"{here!r} in {first.name} and {there!r} in {other.name}: give both one tokenizer, or set "
            "train.metric=bits_per_byte"
        )


def _metric_of(run: Run) -> str:
    return run.train.metric or make_task(run).metric


def _tokens_per_step(train: Train) -> str:
    size = f"{train.batch_size} items" if train.batch_tokens is None else f"{train.batch_tokens:,} tokens"
    return size if train.accumulate in (None, 1) else f"{size} × {train.accumulate}"


def check_same_task(runs: Mapping[str, Run]) -> None:
    """Raise an error if the recipes differ in task or data; how a model reads and regularises is no difference."""
    if several := next((name for name, run in runs.items() if run.task_names), None):
        names = ", ".join(runs[several].task_names)
        raise ConfigError(
            f"compare: {several} has several tasks ({names}), and a comparison is of one: "
            "give recipes with one task each; or train each by weft train, then weft evaluate RUN --task NAME"
        )
    (first, first_run), *others = runs.items()
    for name, run in others:
        sections = ({"task": side.task.model_dump(), "data": side.data.model_dump()} for side in (first_run, run))
        allowed = {*_OWN, *(["data.max_length"] if _length_may_differ(first_run, run) else [])}
        changed = {key: values for key, values in differences(*sections).items() if key not in allowed}
        if changed:
            key = "task.name" if "task.name" in changed else next(iter(changed))
            here, there = changed[key]
            others_too = [] if key == "task.name" else [other for other in changed if other != key]
            more = f" ({', '.join(others_too)} differ as well)" if others_too else ""
            raise ConfigError(
                f"compare: the recipes must have the same task and data, to compare their metrics, but {key} is "
                f"{here!r} in {first} and {there!r} in {name}{more}; set it to one value in both"
            )


# How a model regularises, which of its layers a head reads, and how a corpus is cut into sequences, are its own.
_OWN = {"task.dropout", "task.unknown", "task.layers", "task.crf", "task.sequences", "task.bptt", "task.stride"}
_OWN |= {"data.workers"}


def _length_may_differ(first: Run, other: Run) -> bool:
    """Return whether `max_length` may be what pretrained weights allow, and no example is left out for it."""
    weights = any(getattr(run.model, "weights", None) for run in (first, other))
    streams = first.data.truncation == other.data.truncation == "window" and first.task.name == "lm"
    return streams or (weights and other.data.truncation != "drop")
