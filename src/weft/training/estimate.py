"""Estimate of a run's time, memory and disk space (`--plan`), counted where possible, else measured on a few updates.

The updates are made by the same trainer as in a training, on the run's own batches, and then discarded: nothing is
written. The first update is on the longest items, which take the most memory. It and the second are not timed, since
one-time work (compilation, allocation) slows them.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.checkpoint import contents
from weft.checkpoint.optimizer_state import optimizer_tensors
from weft.config.run import Run
from weft.config.sections import Every, Train
from weft.data.batching.loader import Loader, Position
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError
from weft.tasks.base import Task
from weft.tasks.batch import Batch
from weft.tasks.encoding import EvaluationData
from weft.tasks.evaluation import evaluate
from weft.tasks.factory import make_task, resolve_run
from weft.tasks.head import Head
from weft.tasks.multitask import MultiHead, MultiTask
from weft.tasks.prepare import has_split, read_evaluation_data
from weft.tasks.pretrained_embeddings import check_vectors
from weft.training.budget import EVALUATIONS
from weft.training.distributed import join_world, leave_world
from weft.training.finetuning import check_tuning
from weft.training.flops import TrainingCost, peak_flops
from weft.training.reporting import Notices
from weft.training.run import make_tokenizer, make_trainer
from weft.training.self_fitting import FitLoop
from weft.training.trainer import Trainer

MOST_STEPS, MOST_SECONDS = 20, 5.0  # limits of the timed updates; at least two are timed
EXAMPLES = 64  # of the validation data on which an evaluation is timed


@dataclass(frozen=True)
class RunEstimate:
    """The estimated cost of a run; `step` is the mean cost of an update, over all processes."""

    train: Train  # with its epochs as steps
    place: str  # the device, and how many processes
    parameters: int
    vocabulary: tuple[int, ...]  # sizes: the source's and, if it has its own, the target's
    items: int
    epoch: float  # steps per epoch
    measured: int  # number of timed steps
    step: TrainingCost
    peak_flops: float
    start: float  # seconds to read and encode the data, to build the model, and of the first step
    memory: int  # bytes at the peak
    resident: bool  # whether `memory` is the resident set of the process, not GPU memory
    held: int  # bytes of it for weights, gradients and optimiser state
    evaluation: float | None  # seconds each, at most; None where there is nothing to evaluate on
    checkpoint: int  # bytes each

    @property
    def steps(self) -> int:
        """The number of updates within the budget."""
        by_time = math.inf if self.train.time is None else self.train.time / self.step.seconds
        by_flops = math.inf if self.train.flops is None else self.train.flops / max(self.step.flops, 1)
        return max(1, math.ceil(min(self.train.steps or math.inf, by_time, by_flops)))

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the share of the measured peak."""
        return self.step.flops / self.step.seconds / self.peak_flops

    @property
    def training(self) -> float:
        """The seconds of all updates."""
        return self.steps * self.step.seconds

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headers and rows: quantity, value, and how it was obtained."""
        step, train = self.step, self.train
        rows = [
            ["parameters", f"{self.parameters:,}", ""],
            ["vocabulary", " and ".join(f"{size:,}" for size in self.vocabulary), ""],
            ["data", f"{self.items:,} items", f"{self.epoch:,.1f} steps an epoch"],
            ["steps", f"{self.steps:,}", f"{self.steps / self.epoch:,.1f} epochs; {self._budget()}"],
            ["tokens a step", f"{step.tokens:,}", f"mean of {self.measured} steps"],
            ["operations a step", _format_si(step.flops, "FLOP"), "useful ones, forward and backward"],
            ["operations in all", _format_si(step.flops * self.steps, "FLOP"), ""],
            ["speed", f"{step.tokens / step.seconds:,.0f} tokens/s", f"{self.measured} steps measured"],
            [
                "MFU",
                f"{100 * self.mfu:.3g}%",
                f"of {_format_si(self.peak_flops, 'FLOP/s')}, measured in {train.precision}",
            ],
            ["memory", _format_si(self.memory, "B"), self._memory()],
            *self._times(),
            ["checkpoints", *self._checkpoints()],
        ]
        return ["", "this run", "how that is known"], rows

    def _budget(self) -> str:
        if self.train.steps is not None and self.steps == self.train.steps:
            by_epochs = self.train.epochs is not None and self.steps / self.epoch > self.train.epochs - 0.05
            fewer = ", or fewer by train.patience" if self.train.patience else ""
            return f"train.{'epochs' if by_epochs else 'steps'}{fewer}"
        if self.train.time is not None and self.training >= self.train.time:
            return f"train.time, {_format_duration(self.train.time)}, at this speed"
        return f"train.flops, {_format_si(self.train.flops or 0, 'FLOP')}"

    def _memory(self) -> str:
        kind = "resident peak of this process" if self.resident else "peak of what the GPU held"
        return f"{kind}; weights, gradients and optimiser {_format_si(self.held, 'B')}"

    @property
    def _evaluations(self) -> int:
        if self.evaluation is None:
            return 0
        every = self.train.eval_every
        return EVALUATIONS if every is None else math.ceil(self.steps / self._interval(every))

    def _interval(self, every: Every) -> float:
        return self.epoch if every == "epoch" else every

    def _times(self) -> list[list[str]]:
        rows = [
            ["start", _format_duration(self.start), "reading, tokenizer, model, first step"],
            ["training", _format_duration(self.training), f"{_format_duration(self.step.seconds)} a step"],
        ]
        total = self.start + self.training
        if self.evaluation is not None:
            each = (
                f"{self._evaluations:,}, at most {_format_duration(self.evaluation)} each, by up to {EXAMPLES} examples"
            )
            rows.append(["evaluations", _format_duration(self._evaluations * self.evaluation), each])
            total += self._evaluations * self.evaluation
        seeds = self.train.seeds
        each = f"{seeds} trainings, one after the other; " if seeds > 1 else ""
        return [*rows, ["in all", _format_duration(seeds * total), f"{each}saving is not measured"]]

    def _checkpoints(self) -> tuple[str, str]:
        train = self.train
        saved = int(self.steps / self._interval(train.save_every)) if train.save_every else 0
        written = 1 + max(1, self._evaluations) + saved
        at_once = min(max(train.keep, train.average or 0) + 2, written)  # with the best, and the one being written
        total = _format_si(at_once * self.checkpoint, "B")
        return total, f"at most {at_once} at a time, {_format_si(self.checkpoint, 'B')} each"


def estimate_run(run: Run, tell: Callable[[str], object]) -> RunEstimate:
    """Make a few updates of a run and return the estimate for all of it; `tell` is called with notices on the data."""
    began = time.perf_counter()
    check_tuning(run)
    task = make_task(run)
    run = resolve_run(run, task)
    world = join_world(run.train.device, run.train.rank_timeout)
    with ExitStack() as stack:
        stack.callback(leave_world, world)
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        check_vectors(run)
        tokenizer = make_tokenizer(run, task)
        trainer = make_trainer(run, task, tokenizer, world, None, stack, None, Notices(tell))
        if isinstance(trainer, FitLoop):
            raise ConfigError(f"--plan: measures updates, but {run.model.name!r} is fitted: train it at once")
        return _measure(trainer, time.perf_counter() - began)


def _measure(trainer: Trainer, start: float) -> RunEstimate:
    """Time updates and an evaluation; return the estimate. `start` is the seconds of preparation so far."""
    run, world, head, loader = trainer.run, trainer.world, trainer.trained, trainer.loader
    peak = world.sum({"all": peak_flops(world.device, run.train.precision)})["all"]
    batches = loader.epoch(0)
    first_seconds, steps = _time_steps(trainer, _longest_batch(loader, batches))
    totals = world.sum({"tokens": trainer.cost.tokens, "flops": trainer.cost.flops})
    weights, state = _bytes(contents.weights(head)), _bytes(optimizer_tensors(trainer.optimizer, head))
    frozen = _bytes({name: value for name, value in head.named_parameters() if not value.requires_grad})  # no gradient
    tokenizer, memory = trainer.task.tokenizer, _peak_memory(world.device)
    return RunEstimate(
        train=trainer.train,
        place=f"{world.device}, {world.size} processes" if world.size > 1 else str(world.device),
        parameters=sum(parameter.numel() for parameter in head.parameters()),
        vocabulary=tuple(map(len, dict.fromkeys([tokenizer, tokenizer.target]))),
        items=len(loader.data),
        epoch=len(batches) / (trainer.train.accumulate or 1),
        measured=steps,
        step=TrainingCost(
            round(totals["tokens"] / steps), round(totals["flops"] / steps), trainer.cost.seconds / steps
        ),
        peak_flops=peak,
        start=start + first_seconds,
        memory=memory,
        resident=world.device.type != "cuda",
        held=2 * weights - frozen + state,
        evaluation=_time_evaluation(trainer),
        checkpoint=weights + state,
    )


def _longest_batch(loader: Loader[Batch], batches: list[np.ndarray]) -> Position:
    """Return the position of the batch with the longest item or, of a stream, the longest span."""

    def longest(index: int) -> int:
        batch = batches[index]
        return int((loader.data.sizes[batch] if loader.sampler is None else batch[:, 1] - batch[:, 0]).max())

    return Position(0, max(range(len(batches)), key=longest))


def _time_steps(trainer: Trainer, longest: Position) -> tuple[float, int]:
    """Make updates; return the seconds of the first, and the number of timed ones, whose sum is in `trainer.cost`."""
    if trainer.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trainer.world.device)
    trainer.trained.train()
    with closing(trainer.loader.stream(longest)) as batches:
        trainer.update(batches)
    first_seconds, steps = trainer.cost.seconds, 0
    with closing(trainer.loader.stream()) as batches:
        trainer.update(batches)
        trainer.cost = TrainingCost()
        while steps < 2 or (steps < MOST_STEPS and trainer.cost.seconds < MOST_SECONDS):
            trainer.update(batches)
            steps += 1
    return first_seconds, steps


def _time_evaluation(trainer: Trainer) -> float | None:
    """Return the seconds of an evaluation, timed on a sample; an upper bound, for an untrained model generates long."""
    run, task = trainer.run, trainer.task
    if trainer.evaluate is None:
        return None
    with trainer.parallel.whole() as head, trainer.world.sharing():
        if not isinstance(task, MultiTask):
            return _time_task(run, task, head)
        assert isinstance(head, MultiHead)
        parts = [name for name in task.parts if has_split(run.for_task(name).data, "valid")]
        return math.fsum(_time_task(run.for_task(name), task.parts[name], head.head_of(name)) for name in parts)


def _time_task(run: Run, task: Task, head: Head) -> float:
    """Return the seconds of an evaluation of one task."""
    examples = read_evaluation_data(run.data, "valid", task)[0].examples
    sample = [(row, example) for row, example in enumerate(examples[:: math.ceil(len(examples) / EXAMPLES)])]
    data = EvaluationData.of(task, sample, TruncationPolicy(run.data.max_length, run.data.truncation))
    began = time.perf_counter()
    evaluate(task, head, data)
    return (time.perf_counter() - began) * len(examples) / len(sample)


def _peak_memory(device: torch.device) -> int:
    """Return the peak of GPU memory, or on the CPU of the resident set, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS reports bytes, others kilobytes


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _format_si(value: float, unit: str) -> str:
    """Return a value with an SI prefix: 1234567890 FLOP as 1.23 GFLOP."""
    power = min(6, int(math.log10(max(value, 1)) / 3))
    return f"{value / 1000**power:.3g} {' kMGTPE'[power].strip()}{unit}"


def _format_duration(seconds: float) -> str:
    """Return a duration in words: 4000 seconds as 1 h 6 min."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
    if seconds < 3600:
        return f"{int(seconds / 60)} min {int(seconds % 60)} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
