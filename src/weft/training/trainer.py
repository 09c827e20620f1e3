"""The training loop.

A step reads `accumulate` batches on each rank. Counts are summed over all of them before the first backward, and the
loss is Σ sum / count over its parts, so that K accumulation steps or N processes give the gradient of the one
large batch, up to rounding.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from signal import SIGTERM
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint import contents
from weft.checkpoint.averaging import read_about
from weft.checkpoint.contents import Progress
from weft.checkpoint.store import Store
from weft.config.schema import Run
from weft.data.batching.loader import LoadedBatch, Loader
from weft.errors import TrainingError
from weft.nn.kernels.self_test import try_kernels
from weft.nn.rnn.cells import lacking_half_kernels
from weft.tasks.base import Batch, Head, Task
from weft.training import asgd
from weft.training.deferred_loss import Outcome
from weft.training.distributed import World
from weft.training.finetuning import rates
from weft.training.flops import Work, peak_flops
from weft.training.model_selection import rank_of
from weft.training.optim import clip, lr_factor, make_optimizer, set_lr
from weft.training.reporting import Eval, Notice, Reporter, Saved, Step
from weft.training.rng_state import carried_parts, go_on_drawing, random_states, seed_all
from weft.training.signals import Interrupted, Signals

Evaluate = Callable[[Head], dict[str, float]]


@dataclass
class Trainer:
    """One run: `fit` trains until the budget is spent."""

    run: Run
    task: Task
    head: Head
    loader: Loader[Batch]
    world: World
    report: Reporter
    store: Store | None = None
    evaluate: Evaluate | None = None
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.train = self.run.train
        self.wrapped = self.world.wrap(self.head)
        # The head itself stays as it is, for evaluation.
        self._forward = torch.compile(self.wrapped, dynamic=False) if self.loader.frame else self.wrapped
        self.optimizer = make_optimizer(self.head, self.train, rates(self.head, self.train.layer_decay))
        asgd.check(self.optimizer, self.evaluate is not None)
        self.work = Work()  # since the last report
        self._ceiling = math.nan
        self._lr, self._norm = 0.0, math.nan  # of the last update
        self._made: Outcome | None = None  # the last update, if nobody has looked yet how it went
        self._late = self.world.device.type == "cuda" and self.train.optimizer != "adagrad"  # it looks one step late
        self._carry: Any = None  # what the next batch of the same streams goes on from
        self._averaged: list[float] | None = None  # how good `best` is, where it is an average of checkpoints

    def fit(self) -> Progress:
        """Train until the budget or the patience is spent; a signal saves and raises `Interrupted`."""
        self.head.train()
        with Signals() as signals:
            self._ceiling = self.world.sum({"all": peak_flops(self.world.device, self.train.precision)})["all"]
            batches = self._compiled(self.loader.stream(self.progress.position))
            while not self.progress.done and not self._told(signals):
                self.update(batches)
                self._after_step()
            if signals.got and not self.progress.done:
                self.save()
                raise Interrupted(signals.got)
        return self.progress

    def _compiled(self, batches: Iterator[LoadedBatch[Batch]]) -> Iterator[LoadedBatch[Batch]]:
        """Try the kernels for half precision; compile, if the run is compiled, on the first batch, and say how long.

        Nothing is learned from it.
        """
        began, device = time.perf_counter(), self.world.device
        if self.train.precision == "bf16":
            self._try_half(device)
        if self.loader.frame is None:
            return batches
        first = next(batches)
        with torch.random.fork_rng([device], device_type=device.type):
            self._loss(first.batch.to(device), first.batch.counts).backward()
            self._carry = None
        self.optimizer.zero_grad(set_to_none=True)
        torch.accelerator.synchronize(device)
        self.report(Notice(f"train.compile: the graph was ready after {time.perf_counter() - began:.1f} s"))
        return chain([first], batches)

    def _try_half(self, device: torch.device) -> None:
        """Try the kernels for half precision, and report what is computed without them."""
        if told := try_kernels(device):
            self.report(Notice(f"train.precision: weft's own kernels are left aside, since {told}"))
        if device.type == "cpu" and (lacking := lacking_half_kernels(self.head, torch.bfloat16)):
            without = f"PyTorch has no bf16 kernel of {', '.join(lacking)} for this CPU"
            self.report(Notice(f"train.precision: {without}: those layers are computed in fp32"))

    def update(self, batches: Iterator[LoadedBatch[Batch]]) -> None:
        """Read the next batches and make one update; its time counts."""
        began = time.perf_counter()
        drawn = list(islice(batches, self.train.accumulate))
        self._step(drawn)
        if self._due():
            self._settle()  # here, for what is waited for counts
        self.work.add(self.head, (one.batch for one in drawn))
        # The mean over the ranks, so that all see the same budget.
        seconds = self.world.sum({"s": time.perf_counter() - began})["s"] / self.world.size
        self.progress.elapsed += seconds
        self.work.seconds += seconds

    def _told(self, signals: Signals) -> bool:
        """Agree with the other ranks whether a signal came."""
        told = self.world.sum({"told": signals.got is not None})["told"]
        if told and signals.got is None:
            signals.got = SIGTERM  # it came to another rank
        return bool(told)

    def spent(self) -> float:
        """The share of the budget that is gone, by steps or by time, whichever is more."""
        by_steps = self.progress.step / self.train.steps if self.train.steps else 0.0
        by_time = self.progress.elapsed / self.train.time if self.train.time else 0.0
        return max(by_steps, by_time)

    def _planned(self) -> float:
        """What was gone when this step began: so the last step of a schedule that falls to nothing still counts."""
        if self.train.steps:
            return (self.progress.step - 1) / self.train.steps
        return self.spent()

    def _step(self, drawn: list[LoadedBatch[Batch]]) -> None:
        """Make one update, or none where the loss or its gradient is not finite."""
        batches = [one.batch.to(self.world.device) for one in drawn]
        numbers = self._backward(batches, [one.draw.position.batch < self.world.size for one in drawn])
        self.progress.step += 1
        self.progress.position = drawn[-1].draw.after
        lr = self.train.lr * lr_factor(self.train, self.progress.step, self._planned())
        set_lr(self.optimizer, lr)
        made = Outcome.of(self.progress.step, drawn, lr, numbers)
        if self._late:
            self.optimizer.found_inf = (~numbers.isfinite().all()).float()  # type: ignore[attr-defined]
            self.optimizer.step()
            self._settle()
            self._made = made
        else:
            self._made = made
            if self._settle():
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _settle(self) -> bool:
        """Look how the last update went, if nobody has yet; say whether it was made."""
        made, self._made = self._made, None
        if made is None:
            return True
        loss, norm = made.read()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._skipped(made, loss, norm)
            return False
        self._lr, self._norm = made.lr, norm
        self.progress.loss_sum += loss
        self.progress.loss_steps += 1
        return True

    def _backward(self, batches: list[Batch], anew: Sequence[bool] = ()) -> Tensor:
        """Accumulate the gradient of the mean loss over all batches of all ranks; return loss and norm, (2,).

        `anew` says with which of them an epoch begins, so that nothing is carried on to it.
        """
        counts: dict[str, float] = {}
        for batch in batches:
            for part, count in batch.counts.items():
                counts[part] = counts.get(part, 0) + count
        counts = self.world.sum(counts)
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for number, batch in enumerate(batches):
            if any(anew[number : number + 1]):
                self._carry = None
            with self.world.no_sync(self.wrapped, last=number == len(batches) - 1):
                loss = self._loss(batch, counts)
                (loss * self.world.size).backward()
            total += loss.detach()
        norm = clip(self.head.parameters(), self.train.clip)
        return torch.stack([self.world.total(total), norm.to(total)])

    def _loss(self, batch: Batch, counts: Mapping[str, float]) -> Tensor:
        bf16 = self.train.precision == "bf16"
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=bf16):
            sums, self._carry = self._forward(batch, self._carry)
        # Of a part with nothing in it, such as a batch where no word is masked, the sum is 0, and so is the mean.
        return torch.stack([value / max(counts[part], 1) for part, value in sums.items()]).sum()

    def _skipped(self, made: Outcome, loss: float, norm: float) -> None:
        self.progress.bad_steps += 1
        self._carry = None
        what = f"step {made.step}: the loss is {loss} and its gradient's norm {norm} in {made.place}"
        self.report(Notice(f"{what}: no update was made"))
        if self.progress.bad_steps >= self.train.bad_steps:
            raise TrainingError(
                f"{what}; {self.progress.bad_steps} updates were skipped, as many as train.bad_steps "
                "allows: lower train.lr, clip more (train.clip), or look at those rows"
            )

    def _due(self) -> bool:
        """Say whether a report, an evaluation or a checkpoint follows this step."""
        step, train = self.progress.step, self.train
        every = (train.report_every, train.eval_every, self.save_every)
        return self.spent() >= 1 or any(step % often == 0 for often in every if often)

    def _after_step(self) -> None:
        """Report, evaluate and save where they are due; at the end all three are."""
        step, train = self.progress.step, self.train
        ends = self.spent() >= 1
        evaluates = ends or (train.eval_every is not None and step % train.eval_every == 0)
        saves = step % (self.save_every or step + 1) == 0
        better = self._report(evaluates) if evaluates or step % train.report_every == 0 else False
        self.progress.done = ends or self._impatient()
        if better or saves or self.progress.done:
            leads = better and self.progress.best == self.best_rank()
            self.save(best=leads or (self.progress.done and self.evaluate is None))

    @property
    def save_every(self) -> int | None:
        """Steps from one checkpoint to the next; None: at the end alone."""
        return self.train.save_every or self.train.eval_every

    def best_rank(self) -> list[float] | None:
        """How good the best model so far is; that of a smaller budget may have been an average."""
        return min((rank for rank in (self.progress.best, self._averaged) if rank is not None), default=None)

    def _impatient(self) -> bool:
        return self.train.patience is not None and self.progress.stale >= self.train.patience

    def _report(self, evaluates: bool) -> bool:
        """Emit a `Step`, with the evaluation in it if one is due; say whether it is the best so far."""
        self._settle()
        progress = self.progress
        valid, better = self._evaluate() if evaluates else ({}, False)
        seconds = max(self.work.seconds, 1e-9)
        done = self.world.sum({"tokens": self.work.tokens, "operations": self.work.flops})
        loss = progress.loss_sum / progress.loss_steps if progress.loss_steps else math.nan
        self.report(
            Step(
                step=progress.step,
                loss=loss,
                lr=self._lr,
                grad_norm=self._norm,
                tokens_per_s=round(done["tokens"] / seconds, 1),
                mfu=round(done["operations"] / seconds / self._ceiling, 6),
                epoch=progress.position.epoch,
                elapsed=round(progress.elapsed, 3),
                spent=min(1.0, self.spent()),
                valid=valid,
            )
        )
        progress.loss_sum, progress.loss_steps, self.work = 0.0, 0, Work()
        return better

    def _evaluate(self) -> tuple[dict[str, float], bool]:
        """Score the model; the main rank does, and all agree on what it found."""
        if self.evaluate is None:
            return {}, False
        with asgd.averaged(self.optimizer):
            found = self.evaluate(self.head) if self.world.main else {}
        metric, loss = self.rank(found) if self.world.main else (0.0, 0.0)
        known = self.world.sum({"metric": metric, "loss": loss})
        rank = [known["metric"], known["loss"]]
        better = self.progress.best is None or rank < self.progress.best
        self.progress.stale = 0 if better else self.progress.stale + 1
        if better:
            self.progress.best, self.progress.best_step = rank, self.progress.step
        self.report(Eval(self.progress.step, found, better))
        if asgd.due(self.optimizer, self.progress.stale, self.train.asgd_after):
            self.optimizer.begin()  # type: ignore[attr-defined]
            self.report(Notice(f"train.optimizer: from step {self.progress.step} on the weights are averaged"))
        return found, better

    def rank(self, found: Mapping[str, float]) -> list[float]:
        """Order evaluations, the best first."""
        return rank_of(self.run, self.task, found)

    def save(self, best: bool = False) -> None:
        """Write a checkpoint."""
        self._settle()
        random, carried = random_states(self.world), carried_parts(self.head.carry_parts(self._carry), self.world)
        if self.store and self.world.main:
            path = self.store.save(self.progress.step, lambda folder: self._write(folder, random, carried), best)
            self.report(Saved(self.progress.step, path))
        self.world.barrier()

    def _write(self, folder: Path, random: Mapping[str, Tensor], carried: Mapping[str, Tensor]) -> None:
        with asgd.averaged(self.optimizer):
            contents.write_model(folder, self.run, self.task.tokenizer, self.head)
            contents.write_state(folder, replace(self.progress), self.optimizer, self.head, random)
        if carried:
            contents.write_carried(folder, carried)

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint, exactly."""
        contents.load_weights(folder, self.head)
        contents.load_optimizer(folder, self.optimizer, self.head)
        asgd.resumed(self.optimizer)
        digest = self.progress.data
        self.progress = contents.load_progress(folder)
        best = self.store.best() if self.store else None
        about = read_about(best) if best else None
        self._averaged = about.rank if about else None
        contents.check_data(folder, self.progress.data, digest)
        # A larger budget goes on.
        self.progress.done = self.progress.done and (self.spent() >= 1 or self._impatient())
        if go_on_drawing(contents.load_random(folder), self.world):
            self._carry = self.head.carry_of(contents.load_carried(folder, self.world.rank, self.world.device))
        else:
            self.report(Notice("the number of processes has changed: dropout is drawn anew from here"))
            seed_all(self.train.seed + self.progress.step, self.world)
