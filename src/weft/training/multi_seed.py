"""Training with several seeds: mean and standard deviation of the metrics of a recipe.

    seed-1/, seed-2/, …           the run directories of the seeds train.seed, train.seed + 1, …
    seeds.json                    the metrics of each, their mean and their standard deviation
    best, last, metrics.jsonl     links into the run that is the best by validation

Fine-tuning on few examples may fail with one seed and not with the next (Dodge et al. 2020), so that the result of one
seed says little. The standard deviation is that of a sample: its divisor is n - 1.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from weft.checkpoint.store import Store
from weft.config.run import Run
from weft.config.small_files import read_small_text
from weft.config.yaml import write_yaml
from weft.errors import CheckpointError, ConfigError
from weft.tasks.factory import check_options, make_task
from weft.tasks.metrics import metric_title
from weft.training.distributed import World, join_world, leave_world
from weft.training.finetuning import check_tuning
from weft.training.metric_ranking import metric_of
from weft.training.reporting import Notice, Reporter
from weft.training.run import Trained, train_run

FILE = "seeds.json"
MAX_SEED = 2**32  # seeds are below this

ComputeMetrics = Callable[[Trained], dict[str, float]]


@dataclass(frozen=True)
class SeedRun:
    """The run of one seed: its folder and the metrics of its best model."""

    seed: int
    folder: str
    metrics: dict[str, float | None]  # None: not finite


@dataclass(frozen=True)
class SeedRuns:
    """The runs that have ended, and the folder of the best by the validation `metric`."""

    metric: str
    best: str
    runs: Sequence[SeedRun]

    def mean(self) -> dict[str, float]:
        """Return the mean of each metric."""
        return {name: sum(values) / len(values) for name, values in self._values().items()}

    def deviation(self) -> dict[str, float]:
        """Return the standard deviation of each metric; NaN for a single run."""
        return {name: _deviation(values) for name, values in self._values().items()}

    def _values(self) -> dict[str, list[float]]:
        """Return the values of each metric, one per run."""
        return {name: [_to_float(run.metrics.get(name)) for run in self.runs] for name in self.runs[0].metrics}

    def table(self, positive_label: str | None = None) -> tuple[list[str], list[list[str]]]:
        """Return headers and rows: each run, then mean and standard deviation; `positive_label` is that of `f1`."""
        names, mean, deviation = list(self.mean()), self.mean(), self.deviation()
        rows = [[self._label(run), *(f"{_to_float(run.metrics.get(name)):.4f}" for name in names)] for run in self.runs]
        summary = ["mean ± std", *(f"{mean[name]:.4f} ± {deviation[name]:.4f}" for name in names)]
        return ["seed", *(metric_title(name, positive_label) for name in names)], [*rows, summary]

    def _label(self, run: SeedRun) -> str:
        return f"{run.seed} (best)" if run.folder == self.best else str(run.seed)

    def text(self) -> str:
        """Return the contents of `seeds.json`."""
        statistics = {"mean": _finite(self.mean()), "std": _finite(self.deviation())}
        return json.dumps({**asdict(self), **statistics}, indent=1)


def _to_float(value: float | None) -> float:
    return math.nan if value is None else value


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinity by None, since JSON has neither."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def read_seeds(out: Path) -> SeedRuns | None:
    """Read `seeds.json` in a directory; return None if there is none."""
    path = out / FILE
    try:
        raw = json.loads(read_small_text(path))
        if not (out / raw["best"]).is_dir():
            return None  # the runs that it describes were deleted
        return SeedRuns(raw["metric"], raw["best"], TypeAdapter(list[SeedRun]).validate_python(raw["runs"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: cannot be read: {reason}; delete it, and run again with --resume") from None


def check_single(out: Path) -> None:
    """Refuse to train one seed in a directory that holds runs of several seeds."""
    if folders := _started_runs(out):
        raise CheckpointError(
            f"{out}: holds trainings of several seeds, such as {folders[0].name}; go on with them by train.seeds and "
            "--resume, or choose another --out"
        )


def train_seeds(run: Run, out: Path, resume: bool, report: Reporter | None, compute_metrics: ComputeMetrics) -> Trained:
    """Train with each seed, or resume; return the best run by validation. `judge` computes the metrics of each."""
    _check(run, out, resume)
    world, store = join_world(run.train.device, run.train.rank_timeout), Store(out)
    with ExitStack() as stack:
        stack.callback(leave_world, world)
        if world.main:
            stack.enter_context(store.lock())
            store.write_text("run.yaml", write_yaml(run.dump()))
        world.barrier()  # every rank has read the directory before the main rank writes to it
        best = _train_all(run, store, resume, report if world.main else None, compute_metrics, world)
        world.barrier()
    return best


def _train_all(
    run: Run, store: Store, resume: bool, report: Reporter | None, compute_metrics: ComputeMetrics, world: World
) -> Trained:
    """Train the seeds one after the other; after each, write `seeds.json` and link the best run so far."""
    runs: list[SeedRun] = []
    best, best_folder = None, store.root
    for index in range(run.train.seeds):
        folder = store.root / f"seed-{index + 1}"
        train = run.train.model_copy(update={"seed": run.train.seed + index, "seeds": 1})
        if report:
            report(Notice(f"train.seeds: {index + 1} of {run.train.seeds}, with seed {train.seed}, in {folder}"))
        tokenizer = best.task.tokenizer if best else None
        trained = train_run(run.model_copy(update={"train": train}), folder, resume, report, tokenizer)
        if best is None or (trained.rank or []) < (best.rank or []):
            best, best_folder = trained, folder
        with world.sharing():
            metrics = compute_metrics(trained)
        if world.main:
            runs.append(SeedRun(train.seed, folder.name, _finite(metrics)))
            store.write_text(FILE, SeedRuns(metric_of(run, trained.task), best_folder.name, runs).text())
            store.adopt(best_folder)
    assert best, "there is one seed at least"
    if report and best.rank is None:
        report(Notice(f"train.seeds: there is no validation data to judge by, so {store.root / 'best'} is the first"))
    return best


def _check(run: Run, out: Path, resume: bool) -> None:
    """Refuse a directory that holds other runs, and seeds that are out of range."""
    check_tuning(run)
    check_options(make_task(run))
    if run.train.seed + run.train.seeds > MAX_SEED:
        raise ConfigError(
            f"train.seeds: {run.train.seeds} from train.seed={run.train.seed} on are more than there are, for a seed "
            f"is below {MAX_SEED}; begin with a smaller one"
        )
    if Store(out).checkpoints():
        raise CheckpointError(f"{out}: holds a run of one seed; choose another --out, or leave train.seeds out")
    if not resume and (folders := _started_runs(out)):
        raise CheckpointError(f"{folders[0]}: holds a run already; go on with it by --resume, or choose another --out")


def _started_runs(out: Path) -> list[Path]:
    """List the folders of seeds in a directory that hold a checkpoint."""
    return [folder for folder in sorted(out.glob("seed-*")) if Store(folder).last()]
