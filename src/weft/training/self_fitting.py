"""Training loop of models with a `fit` of their own (`weft.models.base.SelfFitted`): n-gram counts, word2vec.

`train.steps` and `train.epochs` are both the number of passes over the data. After each complete pass there is a
checkpoint, and a resumed run makes the remaining passes.
"""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from weft.checkpoint import contents
from weft.checkpoint.contents import Progress
from weft.checkpoint.store import Store
from weft.config.run import Run
from weft.config.sections import Train
from weft.config.yaml import write_yaml
from weft.data.batching.packed_items import PackedItems
from weft.errors import ConfigError
from weft.models.base import FitBudget, FitProgress
from weft.tasks.capabilities import SelfFitting
from weft.tasks.head import Head
from weft.training.distributed import World
from weft.training.metric_ranking import ranking_key
from weft.training.reporting import CheckpointSaved, Eval, Notice, Reporter, Step
from weft.training.signals import Interrupted, Signals
from weft.training.trainer import Evaluate

ENDLESS = 1 << 31  # passes, where time alone is the budget


@dataclass
class FitLoop:
    """The training loop of one run: `fit` trains until the budget is spent."""

    run: Run
    task: SelfFitting
    head: Head
    data: PackedItems
    world: World
    report: Reporter
    store: Store | None = None
    evaluate: Evaluate | None = None
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        if self.world.size > 1:
            raise ConfigError(
                f"model.name: {self.run.model.name!r} is fitted by one process; leave --nproc or torchrun out"
            )
        epochs = self.run.train.epochs
        if epochs is not None and epochs != int(epochs):
            raise ConfigError(
                f"train.epochs: {self.run.model.name!r} is fitted in whole passes over the data, but is {epochs:g} "
                f"instead; try {math.ceil(epochs)}"
            )
        if self.run.train.flops is not None:
            raise ConfigError(
                f"train.flops: {self.run.model.name!r} is fitted, not trained, so its operations are not counted; "
                "give train.epochs or train.time"
            )
        for key in ("average", "patience", "freeze", "unfreeze", "layer_decay", "reinit", "distill"):
            if getattr(self.run.train, key) != Train.model_fields[key].default:
                raise ConfigError(f"train.{key}: {self.run.model.name!r} is fitted, not trained; leave it out")

    def begin(self, folder: Path | None, digest: str) -> None:
        """Start, or restore weights and progress from the checkpoint in `folder`."""
        self.progress.data = digest
        if self.store:
            self.store.write_text("run.yaml", write_yaml(self.run.dump()))
        if folder is None:
            return
        contents.load_weights(folder, self.head)
        self.progress = contents.load_progress(folder)
        contents.check_corpus_digest(folder, self.progress.data, digest)
        self.progress.done = self.progress.done and self._spent  # with a larger budget training continues

    @property
    def _spent(self) -> bool:
        """Return whether the budget of passes or of time is used up."""
        train, progress = self.run.train, self.progress
        by_time = train.time is not None and progress.elapsed >= train.time
        return by_time or progress.step >= self._passes

    @property
    def _passes(self) -> int:
        """The budget in passes over the data."""
        given = [value for value in (self.run.train.steps, self.run.train.epochs) if value is not None]
        return int(min(given, default=ENDLESS))

    def fit(self) -> Progress:
        """Train until the budget is spent; after a signal, the last complete pass is what remains."""
        began, budget = time.perf_counter(), self._budget()
        with Signals() as signals:
            if not self.progress.done:
                self.report(Notice(f"model: {self.run.model.name!r} is fitted: a step is a pass over the data"))
            for state in self.head.body.fit(self.data, budget) if not self._spent else ():
                seconds, began = time.perf_counter() - began, time.perf_counter()
                self.progress.elapsed += seconds
                self._after_pass(state, seconds, budget.passes)
                if signals.received:
                    raise Interrupted(signals.received)
            self.progress.elapsed += time.perf_counter() - began  # since the last report
            if not self.progress.done:
                self._finish()
        return self.progress

    def _budget(self) -> FitBudget:
        train, progress = self.run.train, self.progress
        return FitBudget(
            passes=self._passes,
            seconds=train.time,
            lr=train.lr,
            seed=train.seed,
            done=progress.step,
            threads=1 if train.deterministic else threads(),
            folder=None if self.store is None else self.store.root,
            eos=self.task.eos,
            elapsed=progress.elapsed,
        )

    def _after_pass(self, state: FitProgress, seconds: float, passes: int) -> None:
        """Report; after a complete pass also save."""
        step = Step(
            step=int(state.done),
            loss=state.loss,
            lr=self.run.train.lr,
            grad_norm=float("nan"),
            tokens_per_s=round(state.tokens / max(seconds, 1e-9), 1),
            mfu=float("nan"),
            epoch=int(state.done),
            elapsed=round(self.progress.elapsed, 3),
            spent=min(1.0, state.done / passes),
        )
        self.report(step)
        if state.whole:
            self.progress.step = int(state.done)
            self._save(best=False)

    def _finish(self) -> None:
        """Evaluate and save the model; there is only one, so it is the best."""
        self.progress.done = True
        if self.evaluate is not None:
            metrics = self.evaluate(self.head)
            self.progress.best, self.progress.best_step = ranking_key(self.run, self.task, metrics), self.progress.step
            self.report(Eval(self.progress.step, metrics, best=True))
        self._save(best=True)

    def _save(self, best: bool) -> None:
        if self.store is None:
            return
        path = self.store.save(self.progress.step, self._write, best)
        self.report(CheckpointSaved(self.progress.step, path))

    def _write(self, folder: Path) -> None:
        contents.write_model(folder, self.run, self.task.tokenizer, self.head)
        contents.write_progress(folder, self.progress)


def threads() -> int:
    """Return the number of threads for a fit."""
    return torch.get_num_threads()
