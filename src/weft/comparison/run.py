"""Several recipes trained at one budget, each in a run's directory of its own, and compared on the same examples.

out/plan.json                 what is compared: checked before the first training, kept to go on
out/NAME/                     the run of an entry; with several seeds out/NAME/seed-1/, …
out/NAME/evaluation.json      its answers to the test examples, and what they took
out/comparison.json           `ComparisonResults`, from which the report is made
out/report.html, report.md, comparison.csv
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from weft.checkpoint.atomic_io import wrap_os_errors, write_atomic
from weft.checkpoint.contents import read_recipe_of
from weft.checkpoint.store import Store, resolve_checkpoint
from weft.comparison import measure
from weft.comparison.assemble import Assembly
from weft.comparison.baselines import BASELINES
from weft.comparison.devices import visible_devices, work_on_devices, work_on_ray
from weft.comparison.evaluate import (
    Evaluation,
    evaluate_baseline,
    evaluate_pipeline,
    read_evaluation,
    test_examples,
)
from weft.comparison.plan import FILE as PLAN_FILE
from weft.comparison.plan import Plan, PlannedEntry, make_plan, read_plan, with_entries
from weft.comparison.quantities import format_budget
from weft.comparison.ranking import mean_over_seeds, quality, ranked
from weft.comparison.report import write_report
from weft.comparison.results import ComparisonResults, Entry
from weft.comparison.table import result_table
from weft.config.overrides import Overrides
from weft.config.run import Run
from weft.errors import CheckpointError, ConfigError, TrainingError, WeftError
from weft.pipeline import train
from weft.ray_engine import is_ray
from weft.tasks.base import Task
from weft.tasks.factory import make_task, resolve_run
from weft.training.reporting import Reporter

FILE = "comparison.json"
REPORT = "report.html"

Table = tuple[list[str], list[list[str]]]  # headers and rows
MakeReporter = Callable[[str], Reporter]


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison, and the folder with its runs and its report; it shows itself in a notebook."""

    results: ComparisonResults
    folder: Path

    @property
    def report(self) -> Path:
        """The page."""
        return self.folder / REPORT

    @property
    def trained_for(self) -> str:
        """The budget in words: `1,000 steps`, or the time as given."""
        return format_budget(self.results.budget)

    def table(self) -> Table:
        """Return headers and rows of text: the best entry first."""
        return result_table(self.results)

    def to_dataframe(self) -> Any:
        """Return the figures as a pandas DataFrame, a row an entry, the best first; `_std` is over several seeds."""
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise ConfigError("to_dataframe: needs pandas, which is not installed: pip install pandas") from None
        return pandas.DataFrame([_figures(self.results, entry) for entry in ranked(self.results)]).set_index("entry")

    def _repr_html_(self) -> str:
        headers, rows = self.table()
        head = "".join(f"<th>{escape(cell)}</th>" for cell in headers)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _figures(results: ComparisonResults, entry: Entry) -> dict[str, Any]:
    """Return an entry's figures as numbers; None where there are none."""
    row: dict[str, Any] = {"entry": entry.name, "kind": entry.kind, "model": entry.model}
    for name in results.metric_names:
        over_seeds = quality(entry, name)
        row[name] = over_seeds.mean if over_seeds else None
        if len(results.seeds) > 1:
            row[f"{name}_std"] = over_seeds.spread if over_seeds else None
    for key in ("parameters", "disk_bytes", "latency_p50", "latency_p99", "throughput"):
        row[key] = getattr(entry, key)
    for key in ("seconds", "steps", "tokens_per_s", "mfu", "peak_memory", "flops"):
        row[key] = mean_over_seeds(entry, attrgetter(key))
    row["p_value"] = entry.versus_best.p_value if entry.versus_best else None
    row["failure"] = entry.failure
    return row


def compare(
    recipes: str | Path | Sequence[str | Path] = (),
    budget: str | int | None = None,
    out: str | Path = "compared",
    overrides: Overrides = (),
    reporter: MakeReporter | None = None,
    seeds: int | None = None,
    baselines: bool = True,
    resume: bool = False,
    add: str | Path | Sequence[str | Path] = (),
    engine: str = "local",
) -> Comparison:
    """Train each recipe at one budget, by default 60s, in a folder of `out`; write `report.html` and the figures.

    `budget` is a time (`60s`, `5m`), a number of steps (`2000`, `2000steps`) or of operations (`1e15flops`). A recipe
    with a section `compare` stands for its variants. `overrides` change every recipe: `["model.width=64"]` or a
    mapping. Each recipe is trained with `seeds` seeds. `baselines`: classical ones stand beside models of labels and
    tags. `resume` goes on with the comparison in `out`; `add` trains more recipes in it, at its budget.
    With `engine="ray"` the trainings are spread over a Ray cluster, whose machines share `out`.
    """
    on_ray = is_ray(engine)
    recipes, added = _listed(recipes), _listed(add)
    folder = Path(out)
    if resume or added:
        plan = _resumed_plan(folder, recipes, budget, overrides, seeds, baselines, added)
    else:
        plan = make_plan(
            recipes, "60s" if budget is None else budget, overrides, 1 if seeds is None else seeds, baselines
        )
        _check_new(folder, plan)
    if (folder / REPORT).is_dir():
        raise CheckpointError(f"{out}/{REPORT}: must be a file, but is a folder; choose another --out")
    with wrap_os_errors(folder, "cannot hold a comparison", "choose another --out"):
        folder.mkdir(parents=True, exist_ok=True)
    with Store(folder).lock():
        plan.write(folder)
        results = _results(plan, folder, _train_all(plan, folder, reporter, on_ray))
        _write(results, folder)
    return Comparison(results, folder)


def read_comparison(out: str | Path) -> Comparison:
    """Read a comparison that was finished, and write its report again; nothing is trained."""
    path = Path(out) / FILE
    try:
        results = ComparisonResults.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is not there: no comparison was finished; go on with --resume") from None
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{path}: cannot be read: {str(error).splitlines()[0]}; go on with --resume") from None
    write_report(results, Path(out))
    return Comparison(results, Path(out))


def _listed(recipes: str | Path | Sequence[str | Path]) -> list[str | Path]:
    return [recipes] if isinstance(recipes, str | Path) else list(recipes)


def _check_new(folder: Path, plan: Plan) -> None:
    """Refuse a folder that holds a comparison, or a run in the place of one of its own."""
    if (folder / PLAN_FILE).exists():
        raise CheckpointError(f"{folder}: holds a comparison already; go on by --resume, or choose another --out")
    for entry, seed in plan.jobs():
        if Store(folder / plan.folder(entry, seed)).last():
            raise CheckpointError(f"{folder / plan.folder(entry, seed)}: holds a run already; choose another --out")


def _resumed_plan(
    folder: Path,
    recipes: Sequence[str | Path],
    budget: str | int | None,
    overrides: Overrides,
    seeds: int | None,
    baselines: bool,
    added: Sequence[str | Path],
) -> Plan:
    """Return the plan of the comparison in a folder, with what is added; refuse one that is not what is asked for."""
    plan = read_plan(folder)
    if recipes:
        requested = make_plan(recipes, budget or plan.budget.text, overrides, seeds or len(plan.seeds), baselines)
        theirs = {entry.name: entry.run for entry in plan.entries}
        if changed := [entry.name for entry in requested.entries if theirs.get(entry.name) != entry.run]:
            raise CheckpointError(
                f"{folder}: its comparison has no such {changed[0]!r}, or with other settings; leave the recipes out "
                "to go on with it as it is, or choose another --out"
            )
    elif overrides and not added:
        raise ConfigError("--set: changes recipes, and with --resume they are those of the comparison; leave it out")
    for option, given, kept in (("--budget", budget, plan.budget.text), ("--seeds", seeds, len(plan.seeds))):
        if given is not None and str(given) != str(kept):
            raise CheckpointError(f"{option}: the comparison in {folder} has {kept}, but got {given}; leave it out")
    return with_entries(plan, added, overrides) if added else plan


def _train_all(plan: Plan, folder: Path, reporter: MakeReporter | None, on_ray: bool) -> dict[str, str]:
    """Train and evaluate what is not yet; return why entries failed, by name."""
    jobs = [job for job in plan.jobs() if read_evaluation(folder / plan.folder(*job)) is None]
    if on_ray and jobs:
        return work_on_ray(plan, folder, jobs)
    devices = visible_devices()
    if len(devices) > 1 and len(jobs) > 1:
        return work_on_devices(plan, folder, jobs, devices)
    failures: dict[str, str] = {}
    for entry, seed in jobs:
        if entry.name not in failures and (reason := work(plan, entry, seed, folder, reporter)):
            failures[entry.name] = reason
    return failures


def work(plan: Plan, entry: PlannedEntry, seed: int, out: Path, reporter: MakeReporter | None = None) -> str | None:
    """Train an entry with a seed, or go on with it, evaluate it, and keep the evaluation; return why that failed."""
    try:
        measure.reset_peak_memory()
        _evaluate(plan, entry, seed, out, reporter).write(out / plan.folder(entry, seed))
    except CheckpointError:
        raise  # of the disk, or of a run that is not as it was left: not of the model
    except (WeftError, MemoryError, RuntimeError) as error:
        if not isinstance(error, WeftError | MemoryError) and not re.search("alloc|memory", str(error), re.IGNORECASE):
            raise
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        text = str(error).splitlines()[0] if str(error) else "an allocation failed"
        return text if isinstance(error, WeftError) else f"out of memory: {text}"
    return None


def _evaluate(plan: Plan, entry: PlannedEntry, seed: int, out: Path, reporter: MakeReporter | None) -> Evaluation:
    if entry.baseline:
        task = make_task(entry.run)
        run = resolve_run(entry.run, task)
        return evaluate_baseline(plan, entry, BASELINES[entry.baseline].fit(run, task), out)
    folder = out / plan.folder(entry, seed)
    run = entry.run.model_copy(update={"train": entry.run.train.model_copy(update={"seed": seed})})
    name = str(plan.folder(entry, seed))
    pipeline = train(run, (), folder, Store(folder).last() is not None, reporter(name) if reporter else None)
    return evaluate_pipeline(plan, entry, seed, pipeline, out)


def _results(plan: Plan, folder: Path, failures: dict[str, str]) -> ComparisonResults:
    """Return the results of all evaluations; raise an error where every entry failed."""
    evaluations: dict[str, list[Evaluation]] = {}
    for entry, seed in plan.jobs():
        if entry.name not in failures and (evaluation := read_evaluation(folder / plan.folder(entry, seed))):
            evaluations.setdefault(entry.name, []).append(evaluation)
    if not evaluations:
        name, reason = next(iter(failures.items()))
        raise TrainingError(f"compare: no entry has a result; {name} failed: {reason}")
    task = _task(plan, folder, evaluations)
    examples = [example for _, example in test_examples(_first(plan), plan.split, task)]
    return Assembly(plan, task, examples, evaluations, failures).results()


def _first(plan: Plan) -> PlannedEntry:
    return next(entry for entry in plan.entries if not entry.baseline)


def _task(plan: Plan, folder: Path, evaluations: dict[str, list[Evaluation]]) -> Task:
    """Return the task with its labels: those of a trained run, else from the training data."""
    trained = [entry for entry in plan.entries if not entry.baseline and entry.name in evaluations]
    if not trained:
        task = make_task(_first(plan).run)
        resolve_run(_first(plan).run, task)
        return task
    checkpoint = resolve_checkpoint(folder / plan.folder(trained[0], plan.seeds[0]))
    return make_task(Run.parse(read_recipe_of(checkpoint)))


def _write(results: ComparisonResults, folder: Path) -> None:
    with wrap_os_errors(folder, f"{FILE} could not be written", "free some room or mend the disk, then --resume"):
        write_atomic(folder / FILE, results.model_dump_json(indent=1).encode("utf-8", "surrogatepass"))
    write_report(results, folder)
