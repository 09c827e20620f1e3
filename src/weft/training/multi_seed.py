"""Several trainings that differ in their seed alone: how good a recipe is, and how much of that is luck.

    seed-1/, seed-2/, …           each a run's directory, of the seeds train.seed, train.seed + 1, …
    seeds.json                    the metrics of each, their mean and their standard deviation
    best, last, metrics.jsonl     links into the run that is the best by validation

Fine-tuning on few examples may fail with one seed and not with the next (Dodge et al. 2020), so that one figure says
little. The standard deviation is that of a sample: its divisor is n - 1.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from weft.checkpoint.store import Store
from weft.config.schema import Run
from weft.config.yaml import write_yaml
from weft.errors import CheckpointError, ConfigError
from weft.tasks.factory import make_task
from weft.training.distributed import World, join_world, leave_world
from weft.training.finetuning import check_tuning
from weft.training.model_selection import metric_of
from weft.training.reporting import Notice, Reporter
from weft.training.run import Trained, train_run

FILE = "seeds.json"
MOST = 2**32  # seeds there are

Judge = Callable[[Trained], dict[str, float]]


@dataclass(frozen=True)
class Seeded:
    """One of the trainings: where it is, and how good its best model."""

    seed: int
    folder: str
    metrics: dict[str, float | None]  # None: what is no number


@dataclass(frozen=True)
class Seeds:
    """All trainings that have ended, and the folder of the one that is the best by validation, by its `metric`."""

    metric: str
    best: str
    runs: Sequence[Seeded]

    def mean(self) -> dict[str, float]:
        """Return the mean of each metric."""
        return {name: sum(values) / len(values) for name, values in self._values().items()}

    def deviation(self) -> dict[str, float]:
        """Return the standard deviation of each metric; of one training it is no number."""
        return {name: _deviation(values) for name, values in self._values().items()}

    def _values(self) -> dict[str, list[float]]:
        """Collect what each metric was."""
        return {name: [_number(one.metrics.get(name)) for one in self.runs] for name in self.runs[0].metrics}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headers and rows: each training, and what they have in common."""
        names, mean, deviation = list(self.mean()), self.mean(), self.deviation()
        rows = [[self._name(one), *(f"{_number(one.metrics.get(name)):.4f}" for name in names)] for one in self.runs]
        both = ["mean ± std", *(f"{mean[name]:.4f} ± {deviation[name]:.4f}" for name in names)]
        return ["seed", *names], [*rows, both]

    def _name(self, one: Seeded) -> str:
        return f"{one.seed} (best)" if one.folder == self.best else str(one.seed)

    def text(self) -> str:
        """Return what `seeds.json` holds."""
        shared = {"mean": _plain(self.mean()), "std": _plain(self.deviation())}
        return json.dumps({**asdict(self), **shared}, indent=1)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _plain(values: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no word for what is not a number: it becomes null."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def read_seeds(out: Path) -> Seeds | None:
    """Read what trainings of several seeds have left in a directory; None, if it holds none."""
    path = out / FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not (out / raw["best"]).is_dir():
            return None  # it tells of what is no longer there
        return Seeds(raw["metric"], raw["best"], TypeAdapter(list[Seeded]).validate_python(raw["runs"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        told = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: cannot be read: {told}; delete it, and run again with --resume") from None


def check_single(out: Path) -> None:
    """Refuse to train once where several were trained."""
    if held := _held(out):
        raise CheckpointError(
            f"{out}: holds trainings of several seeds, such as {held[0].name}; go on with them by train.seeds and "
            "--resume, or choose another --out"
        )


def train_seeds(run: Run, out: Path, resume: bool, report: Reporter | None, judge: Judge) -> Trained:
    """Train with each seed, or go on where that stopped; return the best by validation, as `judge` measures all."""
    _check(run, out, resume)
    world, store = join_world(run.train.device), Store(out)
    with ExitStack() as stack:
        stack.callback(leave_world, world)
        if world.main:
            stack.enter_context(store.lock())
            store.write_text("run.yaml", write_yaml(run.dump()))
        world.barrier()  # all have seen what was there
        best = _train_all(run, store, resume, report if world.main else None, judge, world)
        world.barrier()
    return best


def _train_all(run: Run, store: Store, resume: bool, report: Reporter | None, judge: Judge, world: World) -> Trained:
    done: list[Seeded] = []
    best, leader = None, store.root
    for number in range(run.train.seeds):
        folder = store.root / f"seed-{number + 1}"
        own = run.train.model_copy(update={"seed": run.train.seed + number, "seeds": 1})
        if report:
            report(Notice(f"train.seeds: {number + 1} of {run.train.seeds}, with seed {own.seed}, in {folder}"))
        known = best.task.tokenizer if best else None
        trained = train_run(run.model_copy(update={"train": own}), folder, resume, report, known)
        if best is None or (trained.rank or []) < (best.rank or []):
            best, leader = trained, folder
        if world.main:  # the others wait where the next training begins
            done.append(Seeded(own.seed, folder.name, _plain(judge(trained))))
            store.write_text(FILE, Seeds(metric_of(run, trained.task), leader.name, done).text())
            store.adopt(leader)
    assert best, "there is one seed at least"
    if report and best.rank is None:
        report(Notice(f"train.seeds: there is no validation data to judge by, so {store.root / 'best'} is the first"))
    return best


def _check(run: Run, out: Path, resume: bool) -> None:
    """Refuse a directory that holds something else, and seeds that are none."""
    check_tuning(run)
    make_task(run)
    if run.train.seed + run.train.seeds > MOST:
        raise ConfigError(
            f"train.seeds: {run.train.seeds} from train.seed={run.train.seed} on are more than there are, for a seed "
            f"is below {MOST}; begin with a smaller one"
        )
    if Store(out).checkpoints():
        raise CheckpointError(f"{out}: holds a run of one seed; choose another --out, or leave train.seeds out")
    if not resume and (held := _held(out)):
        raise CheckpointError(f"{held[0]}: holds a run already; go on with it by --resume, or choose another --out")


def _held(out: Path) -> list[Path]:
    """List the trainings in a directory that have begun."""
    return [folder for folder in sorted(out.glob("seed-*")) if Store(folder).last()]
