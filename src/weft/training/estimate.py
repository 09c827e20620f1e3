"""What a run will take, said before it is trained: counted where that can be, measured on a few updates where not.

The updates are made as in a training, by the same trainer, on the run's own batches, and then thrown away: nothing is
written. The first is made on the longest items, since they take the most memory; it and the second, which are
slowed by what is done once, are not timed.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.checkpoint import contents
from weft.config.schema import Run, Train
from weft.data.batching.loader import Loader, Position
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError
from weft.tasks.base import Batch
from weft.tasks.factory import make_task
from weft.tasks.inference import evaluate
from weft.tasks.prepare import read_whole
from weft.tasks.pretrained_embeddings import check_vectors
from weft.training.distributed import join_world, leave_world
from weft.training.finetuning import check_tuning
from weft.training.fit_loop import Fitting
from weft.training.flops import Work, peak_flops
from weft.training.reporting import Notice, Record
from weft.training.run import make_tokenizer, make_trainer, settle
from weft.training.trainer import Trainer

MOST_STEPS, MOST_SECONDS = 20, 5.0  # that are timed; of slow ones, two at the least
EXAMPLES = 64  # of the validation data, for the time of an evaluation


@dataclass(frozen=True)
class Plan:
    """What a run will take; `step` is the mean of an update, over all processes."""

    train: Train
    place: str  # the device, and how many processes
    parameters: int
    vocabulary: tuple[int, ...]  # of the source side and, where it has its own, of the target's
    items: int
    epoch: float  # steps to read all items once
    measured: int  # steps
    step: Work
    peak_flops: float
    start: float  # seconds to read and encode the data, to build the model, and of the first step
    memory: int  # bytes at the peak
    resident: bool  # whether that is of the whole process, not of a GPU
    held: int  # bytes of it that weights, gradients and optimiser hold all the time
    evaluation: float | None  # seconds each, at most; None where there is nothing to evaluate on
    checkpoint: int  # bytes each

    @property
    def steps(self) -> int:
        """The updates that the budget allows."""
        by_time = math.inf if self.train.time is None else self.train.time / self.step.seconds
        return max(1, math.ceil(min(self.train.steps or math.inf, by_time)))

    @property
    def mfu(self) -> float:
        """The share of the ceiling that is made use of."""
        return self.step.flops / self.step.seconds / self.peak_flops

    @property
    def training(self) -> float:
        """The seconds of all updates."""
        return self.steps * self.step.seconds

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headers and rows: what, how much, and how that is known."""
        step, train = self.step, self.train
        rows = [
            ["parameters", f"{self.parameters:,}", ""],
            ["vocabulary", " and ".join(f"{size:,}" for size in self.vocabulary), ""],
            ["data", f"{self.items:,} items", f"{self.epoch:,.1f} steps an epoch"],
            ["steps", f"{self.steps:,}", f"{self.steps / self.epoch:,.1f} epochs; {self._budget()}"],
            ["tokens a step", f"{step.tokens:,}", f"mean of {self.measured} steps"],
            ["operations a step", _scaled(step.flops, "FLOP"), "useful ones, forward and backward"],
            ["operations in all", _scaled(step.flops * self.steps, "FLOP"), ""],
            ["speed", f"{step.tokens / step.seconds:,.0f} tokens/s", f"{self.measured} steps measured"],
            [
                "MFU",
                f"{100 * self.mfu:.3g}%",
                f"of {_scaled(self.peak_flops, 'FLOP/s')}, measured in {train.precision}",
            ],
            ["memory", _scaled(self.memory, "B"), self._memory()],
            *self._times(),
            ["checkpoints", *self._checkpoints()],
        ]
        return ["", "this run", "how that is known"], rows

    def _budget(self) -> str:
        if self.train.steps is not None and self.steps == self.train.steps:
            return f"train.steps{', or fewer by train.patience' if self.train.patience else ''}"
        return f"train.time, {_lasting(self.train.time or 0)}, at this speed"

    def _memory(self) -> str:
        where = "resident peak of this process" if self.resident else "peak of what the GPU held"
        return f"{where}; weights, gradients and optimiser {_scaled(self.held, 'B')}"

    @property
    def _evaluations(self) -> int:
        return 0 if self.evaluation is None else math.ceil(self.steps / (self.train.eval_every or self.steps))

    def _times(self) -> list[list[str]]:
        rows = [
            ["start", _lasting(self.start), "reading, tokenizer, model, first step"],
            ["training", _lasting(self.training), f"{_lasting(self.step.seconds)} a step"],
        ]
        total = self.start + self.training
        if self.evaluation is not None:
            each = f"{self._evaluations:,}, at most {_lasting(self.evaluation)} each, by up to {EXAMPLES} examples"
            rows.append(["evaluations", _lasting(self._evaluations * self.evaluation), each])
            total += self._evaluations * self.evaluation
        seeds = self.train.seeds
        each = f"{seeds} trainings, one after the other; " if seeds > 1 else ""
        return [*rows, ["in all", _lasting(seeds * total), f"{each}saving is not measured"]]

    def _checkpoints(self) -> tuple[str, str]:
        train = self.train
        saved = 1 + max(1, self._evaluations) + (self.steps // train.save_every if train.save_every else 0)
        most = min(max(train.keep, train.average or 0) + 2, saved)  # the newest, the best, and the one being written
        return _scaled(most * self.checkpoint, "B"), f"at most {most} at a time, {_scaled(self.checkpoint, 'B')} each"


@dataclass(frozen=True)
class _Notices:
    """A reporter that passes on what the user should know."""

    tell: Callable[[str], object]

    def __call__(self, record: Record) -> None:
        if isinstance(record, Notice):
            self.tell(record.text)

    def close(self) -> None:
        pass


def plan_run(run: Run, tell: Callable[[str], object]) -> Plan:
    """Make a few updates of a run, and say what all of it will take; `tell` gets notices on the data."""
    began = time.perf_counter()
    check_tuning(run)
    run = settle(run, make_task(run))
    world = join_world(run.train.device)
    with ExitStack() as stack:
        stack.callback(leave_world, world)
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        check_vectors(run)
        tokenizer = make_tokenizer(run, make_task(run))
        trainer = make_trainer(run, tokenizer, world, None, stack, None, _Notices(tell))
        if isinstance(trainer, Fitting):
            raise ConfigError(f"--plan: measures updates, but {run.model.name!r} is fitted: train it at once")
        return _measured(trainer, time.perf_counter() - began)


def _measured(trainer: Trainer, start: float) -> Plan:
    run, world, head, loader = trainer.run, trainer.world, trainer.head, trainer.loader
    fastest = world.sum({"all": peak_flops(world.device, run.train.precision)})["all"]
    batches = loader.epoch(0)
    first, steps = _some_steps(trainer, _longest(loader, batches))
    done = world.sum({"tokens": trainer.work.tokens, "operations": trainer.work.flops})
    weights, state = _bytes(contents.weights(head)), _bytes(contents.optimizer_tensors(trainer.optimizer, head))
    still = _bytes({name: one for name, one in head.named_parameters() if not one.requires_grad})  # has no gradient
    tokenizer, peak = trainer.task.tokenizer, _peak(world.device)
    return Plan(
        train=run.train,
        place=f"{world.device}, {world.size} processes" if world.size > 1 else str(world.device),
        parameters=sum(parameter.numel() for parameter in head.parameters()),
        vocabulary=tuple(len(one) for one in dict.fromkeys([tokenizer, tokenizer.target])),
        items=len(loader.data),
        epoch=len(batches) / (run.train.accumulate * world.size),
        measured=steps,
        step=Work(round(done["tokens"] / steps), round(done["operations"] / steps), trainer.work.seconds / steps),
        peak_flops=fastest,
        start=start + first,
        memory=peak,
        resident=world.device.type != "cuda",
        held=2 * weights - still + state,
        evaluation=_evaluation(trainer),
        checkpoint=weights + state,
    )


def _longest(loader: Loader[Batch], batches: list[np.ndarray]) -> Position:
    """Say where the batch with the longest item stands."""
    return Position(0, max(range(len(batches)), key=lambda number: int(loader.data.sizes[batches[number]].max())))


def _some_steps(trainer: Trainer, longest: Position) -> tuple[float, int]:
    """Make updates; return the seconds of the first, and how many count, of which `trainer.work` has the sum."""
    if trainer.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trainer.world.device)
    trainer.head.train()
    trainer.update(trainer.loader.stream(longest))
    batches, first, steps = trainer.loader.stream(), trainer.work.seconds, 0
    trainer.update(batches)
    trainer.work = Work()
    while steps < 2 or (steps < MOST_STEPS and trainer.work.seconds < MOST_SECONDS):
        trainer.update(batches)
        steps += 1
    return first, steps


def _evaluation(trainer: Trainer) -> float | None:
    """Measure an evaluation on some of the examples; a model that knows no end yet writes long, so it is a bound."""
    run, task = trainer.run, trainer.task
    if trainer.evaluate is None or not trainer.world.main:
        return None
    examples, _ = read_whole(run.data, "valid", task, task.tokenizer)
    some = examples[:: math.ceil(len(examples) / EXAMPLES)]
    began = time.perf_counter()
    evaluate(task, trainer.head, some, TruncationPolicy(run.data.longest, run.data.too_long))
    return (time.perf_counter() - began) * len(examples) / len(some)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # bytes there, kilobytes elsewhere


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _scaled(value: float, unit: str) -> str:
    """Write 1234567890 operations as 1.23 GFLOP."""
    power = min(6, int(math.log10(max(value, 1)) / 3))
    return f"{value / 1000**power:.3g} {' kMGTPE'[power].strip()}{unit}"


def _lasting(seconds: float) -> str:
    """Write 4000 seconds as 1 h 6 min."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
    if seconds < 3600:
        return f"{int(seconds / 60)} min {int(seconds % 60)} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
