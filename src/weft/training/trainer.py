"""The training loop.

An update takes `accumulate` batches, which the ranks share. Target counts are summed over all of them before the first
backward pass, and the loss is Σ sum / count over its parts, so that K accumulation steps or N processes give the
gradient of one large batch, up to rounding. What is random in a batch depends on the seed and its position alone, so
that any number of ranks makes the same updates.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from signal import SIGTERM
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint import contents
from weft.checkpoint.averaging import read_average_info
from weft.checkpoint.contents import Progress
from weft.checkpoint.manifest import order
from weft.checkpoint.optimizer_state import load_optimizer
from weft.checkpoint.store import Store
from weft.config.run import Run
from weft.config.sections import Every
from weft.data.batching.loader import LoadedBatch, Loader, Position
from weft.errors import CheckpointError, TrainingError
from weft.nn.kernels.self_test import try_kernels
from weft.nn.rnn.cells import lacking_half_kernels
from weft.tasks.base import Task
from weft.tasks.batch import Batch
from weft.tasks.head import Head
from weft.tasks.sharding import gather
from weft.training import asgd
from weft.training.budget import EVALUATIONS, resolve_budget
from weft.training.deferred_loss import DeferredLoss
from weft.training.distillation import Distillation
from weft.training.distributed import World, beat
from weft.training.finetuning import GradualUnfreezing, layer_lr_factors
from weft.training.flops import TrainingCost, peak_flops
from weft.training.heartbeat import Heartbeat
from weft.training.metric_ranking import ranking_key
from weft.training.optim import clip_gradients, lr_factor, make_optimizer, set_lr
from weft.training.parallel import FullySharded, make_parallel
from weft.training.process_state import (
    gather_hidden_states,
    gather_rng_states,
    load_carry,
    restore_rng_state,
    seed_batch,
)
from weft.training.reporting import Eval, Notice, Reporter, Step
from weft.training.saving import Saver, Snapshot, copy_optimizer, copy_weights
from weft.training.signals import Interrupted, Signals

WORKER_ENDS = 5.0  # seconds at most until the system tells that a worker has ended

Evaluate = Callable[[Head], dict[str, float]]


@dataclass
class Trainer:
    """The training loop of one run: `fit` trains until the budget is spent."""

    run: Run
    task: Task
    head: Head
    loader: Loader[Batch]
    world: World
    report: Reporter
    store: Store | None = None
    evaluate: Evaluate | None = None
    progress: Progress = field(default_factory=Progress)
    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        self._resolve_budget()
        if self.store and self.train.average:
            self.store.is_regular = self.is_regular
        self._wrap()
        self.trained = self.parallel.trained
        self.unfreezing = None if self.train.unfreeze is None else GradualUnfreezing(self.head, self.train)
        rates = layer_lr_factors(self.trained, self.train.layer_decay)
        self.optimizer = make_optimizer(self.trained, self.train, rates)
        self.saver = Saver(self.store, self.report) if self.store and self.world.main else None
        asgd.check(self.optimizer, self.evaluate is not None)
        self.cost = TrainingCost()  # since the last report
        self._peak_flops = math.nan
        self._lr, self._norm = 0.0, math.nan  # of the last update
        self._pending: DeferredLoss | None = None  # of the last update, if its loss and norm have not been read yet
        # Read loss and norm one step late, to keep the GPU busy. The foreach Adagrad ignores `found_inf`.
        # So does an optimizer of sharded weights.
        foreach = self.train.optimizer == "adagrad" or isinstance(self.parallel, FullySharded)
        self._late = self.world.device.type == "cuda" and not foreach
        self._forget_carried()
        self._averaged: list[float] | None = None  # the rank of `best`, where it is an average of checkpoints
        self._spent_earlier = 0.0  # the share of the budget that was used before the last step

    def _resolve_budget(self) -> None:
        """Set `train`, the recipe's section with its epochs as steps, from the progress so far."""
        self.train = resolve_budget(
            self.run.train, self.loader, self.progress, self.world.size, evaluates=self.evaluate is not None
        )

    @property
    def _batches(self) -> int:
        """The batches of an update, over all ranks."""
        return self.train.accumulate or self.world.size

    def _forget_carried(self) -> None:
        """Let each of this rank's streams of batches start afresh (truncated BPTT carries a recurrent state on)."""
        self._carried: list[Any] = [None] * (self._batches // self.world.size)

    def _wrap(self) -> None:
        """Wrap the head for several processes and compile it, anew where other parameters are trained than before."""
        self.parallel = make_parallel(self.head, self.world, self.train, self.distillation)
        module = self.parallel.module
        # Evaluation uses the uncompiled head.
        self._forward = torch.compile(module, dynamic=False) if self.loader.static_shape else module

    def fit(self) -> Progress:
        """Train until the budget or the patience is spent; on a signal, save and raise `Interrupted`."""
        self.trained.train()
        with Signals() as signals, self._finish_saving(), Heartbeat(self.world, self.train.rank_timeout):
            self._peak_flops = self.world.sum({"all": peak_flops(self.world.device, self.train.precision)})["all"]
            with closing(self.loader.stream(self.progress.position)) as stream:
                self._fit(self._warm_up(stream), signals)
            if signals.received and not self.progress.done:
                self.save()
                raise Interrupted(signals.received)
        return self.progress

    def _fit(self, batches: Iterator[LoadedBatch[Batch]], signals: Signals) -> None:
        """Train until the budget or the patience is spent, or a signal is received."""
        while not self.progress.done and not self._signal_received(signals):
            self.update(batches)
            self._after_step()
            if self.saver:
                self.saver.poll()

    def train_until(self, step: int) -> dict[int, tuple[float, float]]:
        """Make updates up to a step, without reports; return the sum of losses and the gradient norm of each."""
        self.trained.train()
        numbers = {}
        with closing(self.loader.stream(self.progress.position)) as stream:
            batches = self._warm_up(stream)
            while self.progress.step < step:
                self.update(batches)
                self._read_pending()
                numbers[self.progress.step] = self.progress.loss_sum, self._norm
        return numbers

    def _warm_up(self, batches: Iterator[LoadedBatch[Batch]]) -> Iterator[LoadedBatch[Batch]]:
        """Self-test the bf16 kernels and, if the run is compiled, compile on the first batch; return all batches.

        The weights do not change. The time of compilation is reported.
        """
        began, device = time.perf_counter(), self.world.device
        if self.train.precision == "bf16":
            self._test_bf16_kernels(device)
        if self.loader.static_shape is None:
            return batches
        first = next(batches)
        with torch.random.fork_rng([device], device_type=device.type):
            self._loss(first.batch.to(device), first.batch.counts, 0).backward()
            self._forget_carried()
        self.optimizer.zero_grad(set_to_none=True)
        torch.accelerator.synchronize(device)
        self.report(Notice(f"train.compile: the graph was ready after {time.perf_counter() - began:.1f} s"))
        return chain([first], batches)

    def _test_bf16_kernels(self, device: torch.device) -> None:
        """Self-test the bf16 kernels; report which are disabled and which layers fall back to fp32."""
        if failure := try_kernels(device):
            self.report(Notice(f"train.precision: weft's own kernels are left aside, since {failure}"))
        if device.type == "cpu" and (lacking := lacking_half_kernels(self.trained, torch.bfloat16)):
            reason = f"PyTorch has no bf16 kernel of {', '.join(lacking)} for this CPU"
            self.report(Notice(f"train.precision: {reason}: those layers are computed in fp32"))

    def update(self, batches: Iterator[LoadedBatch[Batch]]) -> None:
        """Read the next batches and make one update; its time counts towards the budget."""
        began, self._spent_earlier = time.perf_counter(), self.spent()
        self._unfreeze()
        loaded = list(islice(batches, len(self._carried)))
        if self.distillation is not None:
            loaded = [self.distillation.attach(item) for item in loaded]
        self._step(loaded)
        if self._due():
            self._read_pending()  # here, so that waiting for the device is timed
        cost = TrainingCost(seconds=time.perf_counter() - began)
        cost.add(self.trained, (item.batch for item in loaded))
        if self.distillation is not None:
            cost.flops += sum(self.distillation.teacher_flops(item.batch) for item in loaded)
        # The mean time of the ranks and all their operations, so that all ranks have the same budget.
        totals = self.world.sum({"seconds": cost.seconds / self.world.size, "flops": cost.flops})
        self.progress.elapsed += totals["seconds"]
        self.progress.flops += totals["flops"]
        self.cost += replace(cost, seconds=totals["seconds"])

    def _unfreeze(self) -> None:
        """Train as many layer groups as are due by `train.unfreeze`, from the progress alone."""
        if self.unfreezing is None:
            return
        every, position = self.train.unfreeze, self.progress.position
        ended = position.batch >= self.loader.num_batches(position.epoch)
        count = position.epoch + ended if every == "epoch" else self.progress.step // (every or 1)
        if notice := self.unfreezing.unfreeze(count):
            self._wrap()
            self.report(Notice(f"{notice} from step {self.progress.step + 1} on"))

    def _signal_received(self, signals: Signals) -> bool:
        """Return whether any rank received a signal; all ranks return the same."""
        count = self.world.sum({"received": signals.received is not None})["received"]
        if count and signals.received is None:
            signals.received = SIGTERM  # another rank received it
        return bool(count)

    def spent(self) -> float:
        """Return the share of the budget that is used, by steps, time or operations, whichever is most."""
        by_steps = self.progress.step / self.train.steps if self.train.steps else 0.0
        by_time = self.progress.elapsed / self.train.time if self.train.time else 0.0
        by_flops = self.progress.flops / self.train.flops if self.train.flops else 0.0
        return max(by_steps, by_time, by_flops)

    def _spent_before(self) -> float:
        """Return the share used when this step began, so that the last step of a linear decay has a rate above zero."""
        if self.train.steps:
            return (self.progress.step - 1) / self.train.steps
        return self.spent()

    def _step(self, loaded: list[LoadedBatch[Batch]]) -> None:
        """Make one update; skip it if the loss or the gradient norm is not finite."""
        batches = [item.batch.to(self.world.device) for item in loaded]
        numbers = self._backward(batches, [item.batch_index.position for item in loaded])
        self.progress.step += 1
        self.progress.position = loaded[-1].batch_index.after
        lr = self.train.lr * lr_factor(self.train, self.progress.step, self._spent_before())
        set_lr(self.optimizer, lr)
        outcome = DeferredLoss.of(self.progress.step, loaded, lr, numbers)
        if self._late:
            self.optimizer.found_inf = (~numbers[:2].isfinite().all()).float()  # type: ignore[attr-defined]
            self.optimizer.step()
            self._read_pending()
            self._pending = outcome
        else:
            self._pending = outcome
            if self._read_pending():
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _read_pending(self) -> bool:
        """Read the pending outcome of the last update, if there is one; return whether the update was finite."""
        outcome, self._pending = self._pending, None
        if outcome is None:
            return True
        loss, norm = outcome.read()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._skip(outcome, loss, norm)
            return False
        self._lr, self._norm = outcome.lr, norm
        self.progress.loss_sum += loss
        self.progress.loss_steps += 1
        return True

    def _backward(self, batches: list[Batch], positions: Sequence[Position]) -> Tensor:
        """Accumulate the gradient of the mean loss over all batches of all ranks.

        Return the loss, the gradient's norm, and the parts of the loss of this rank's batches, (2 + batches,).
        """
        counts: dict[str, float] = {}
        for batch in batches:
            for part, count in batch.counts.items():
                counts[part] = counts.get(part, 0) + count
        counts = self.world.sum(counts)
        own = torch.zeros(len(batches), dtype=torch.float64, device=self.world.device)
        for index, (batch, position) in enumerate(zip(batches, positions, strict=True)):
            if position.batch < self._batches:
                self._carried[index] = None  # its stream starts again with the epoch
            seed_batch(self.train.seed, position, self.world.device)
            with self.parallel.accumulating(last=index == len(batches) - 1):
                loss = self._loss(batch, counts, index)
                beat()
                (loss * self.world.size).backward()
            own[index] = loss.detach()
        self.parallel.after_backward()
        norm = clip_gradients(self.trained.parameters(), self.train.clip)
        return torch.cat([torch.stack([self.world.total(own.sum()), norm.to(own)]), own])

    def _loss(self, batch: Batch, counts: Mapping[str, float], stream: int) -> Tensor:
        """Compute the mean loss, Σ sum / count over its parts; `counts` are those of all batches of the step."""
        bf16 = self.train.precision == "bf16"
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=bf16):
            sums, self._carried[stream] = self._forward(batch, self._carried[stream])
        # A part without targets, such as a batch in which no word is masked, has sum 0 and mean 0.
        return torch.stack([value / max(counts[part], 1) for part, value in sums.items()]).sum()

    def _skip(self, outcome: DeferredLoss, loss: float, norm: float) -> None:
        """Count and report a skipped update; raise once `train.bad_steps` of them were skipped."""
        self.progress.bad_steps += 1
        self._forget_carried()
        with self.world.sharing():
            bad, all_batches = ("; ".join(filter(None, places)) for places in zip(*gather(outcome.places), strict=True))
        what = f"step {outcome.step}: the loss is {loss} and its gradient's norm {norm} in {bad or all_batches}"
        self.report(Notice(f"{what}: no update was made"))
        if self.progress.bad_steps >= self.train.bad_steps:
            raise TrainingError(
                f"{what}; {self.progress.bad_steps} updates were skipped, as many as train.bad_steps "
                "allows: lower train.lr, clip more (train.clip), or look at those rows"
            )

    def _due(self) -> bool:
        """Return whether a report, an evaluation or a checkpoint follows this step."""
        intervals = (self.train.report_every, self.train.eval_every, self.train.save_every)
        return self.spent() >= 1 or any(map(self._is_multiple, intervals))

    def _is_multiple(self, every: Every | None) -> bool:
        """Return whether the last step ended an epoch, or is a multiple of so many steps."""
        if every == "epoch":
            return self.loader.ends_epoch(self.progress.position, self._batches)
        return every is not None and self.progress.step % every == 0

    def _evaluation_due(self) -> bool:
        """Return whether the validation data is due by `train.eval_every`, else by the share of the budget."""
        if self.train.eval_every is None and self.evaluate is not None:
            return int(EVALUATIONS * self.spent()) > int(EVALUATIONS * self._spent_earlier)
        return self._is_multiple(self.train.eval_every)

    def _after_step(self) -> None:
        """Report, evaluate and save if due; at the end of training all three are."""
        ends = self.spent() >= 1
        evaluates = ends or self._evaluation_due()
        saves = self._is_multiple(self.train.save_every) if self.train.save_every else evaluates
        better = self._report(evaluates) if evaluates or self._is_multiple(self.train.report_every) else False
        self.progress.done = ends or self._out_of_patience()
        if better or saves or self.progress.done:
            is_best = better and self.progress.best == self.best_rank()
            self.save(best=is_best or (self.progress.done and self.evaluate is None))

    def is_regular(self, folder: Path) -> bool:
        """Return whether a checkpoint is one of `train.save_every`, or else of `train.eval_every`."""
        every = self.train.save_every or self.train.eval_every
        if every != "epoch":
            return every is not None and order(folder)[0] % every == 0
        try:
            position = contents.load_progress(folder).position
        except CheckpointError:
            return False  # it is damaged
        return self.loader.ends_epoch(position, self._batches)

    def best_rank(self) -> list[float] | None:
        """Return the rank of the best model so far; that of an earlier, smaller budget may be a checkpoint average."""
        return min((rank for rank in (self.progress.best, self._averaged) if rank is not None), default=None)

    def _out_of_patience(self) -> bool:
        """Return whether `train.patience` evaluations in a row brought no improvement."""
        return self.train.patience is not None and self.progress.stale >= self.train.patience

    def _report(self, evaluates: bool) -> bool:
        """Emit a `Step`, with the evaluation if one is due; return whether that is the best so far."""
        self._read_pending()
        progress = self.progress
        valid, better = self._evaluate() if evaluates else ({}, False)
        seconds = max(self.cost.seconds, 1e-9)
        totals = self.world.sum({"tokens": self.cost.tokens, "flops": self.cost.flops})
        loss = progress.loss_sum / progress.loss_steps if progress.loss_steps else math.nan
        self.report(
            Step(
                step=progress.step,
                loss=loss,
                lr=self._lr,
                grad_norm=self._norm,
                tokens_per_s=round(totals["tokens"] / seconds, 1),
                mfu=round(totals["flops"] / seconds / self._peak_flops, 6),
                epoch=progress.position.epoch,
                elapsed=round(progress.elapsed, 3),
                flops=progress.flops,
                spent=min(1.0, self.spent()),
                valid=valid,
            )
        )
        progress.loss_sum, progress.loss_steps, self.cost = 0.0, 0, TrainingCost()
        return better

    def _evaluate(self) -> tuple[dict[str, float], bool]:
        """Evaluate the model, on all ranks together; return the metrics, and whether they are the best so far."""
        if self.evaluate is None:
            return {}, False
        with asgd.averaged(self.optimizer), self.parallel.whole() as head:
            metrics = self.evaluate(head)
        rank = self.shared_rank(metrics)
        better = self.progress.best is None or rank < self.progress.best
        self.progress.stale = 0 if better else self.progress.stale + 1
        if better:
            self.progress.best, self.progress.best_step = rank, self.progress.step
        self.report(Eval(self.progress.step, metrics, better))
        if asgd.due(self.optimizer, self.progress.stale, self.train.asgd_after):
            self.optimizer.begin()  # type: ignore[attr-defined]
            self.report(Notice(f"train.optimizer: from step {self.progress.step} on the weights are averaged"))
        return metrics, better

    def rank(self, metrics: Mapping[str, float]) -> list[float]:
        """Return the sort key of an evaluation; smaller is better."""
        return ranking_key(self.run, self.task, metrics)

    def shared_rank(self, metrics: Mapping[str, float]) -> list[float]:
        """Return the main rank's sort key of an evaluation, on all ranks: they must agree on what is the best."""
        metric, loss = self.rank(metrics) if self.world.main else (0.0, 0.0)
        shared = self.world.sum({"metric": metric, "loss": loss})
        return [shared["metric"], shared["loss"]]

    @contextmanager
    def _finish_saving(self) -> Iterator[None]:
        """Wait for the checkpoint that is being written when training ends, however it ends."""
        try:
            yield
        except BaseException as error:
            reason = self._lost_worker(error)
            if self.saver:
                with suppress(CheckpointError):  # the first error is told
                    self.saver.join()
            if reason:
                raise TrainingError(
                    f"data.workers: {reason}; killed for lack of memory, most often: set fewer of them, and go on from "
                    "the last checkpoint with --resume"
                ) from None
            raise
        if self.saver:
            self.saver.join()
        self.world.barrier()

    def _lost_worker(self, error: BaseException) -> str:
        """Return what an error says of a worker of the loader that has ended; "" of any other error."""
        if self.loader.workers and isinstance(error, ConnectionError | EOFError):  # while it handed a batch over
            try:
                time.sleep(WORKER_ENDS)
            except RuntimeError as lost:  # by PyTorch's signal handler, which would else raise it anywhere, later
                error = lost
            else:
                return f"DataLoader worker ended unexpectedly ({type(error).__name__})"
        is_lost = isinstance(error, RuntimeError) and "DataLoader worker" in str(error)
        return str(error).splitlines()[0] if is_lost else ""

    def save(self, best: bool = False) -> None:
        """Begin to write a checkpoint; `best` links it as the best."""
        self._read_pending()
        random = gather_rng_states(self.world)
        carried = gather_hidden_states([self.trained.carry_tensors(carry) for carry in self._carried], self.world)
        if self.store is None:
            return
        with asgd.averaged(self.optimizer):
            weights = copy_weights(self.trained, self.world)
            optimizer = copy_optimizer(self.optimizer, self.trained, self.world)
        if self.saver:
            progress, tokenizer = replace(self.progress), self.task.tokenizer
            self.saver.start(Snapshot(self.run, tokenizer, weights, optimizer, random, carried, progress), best)

    def resume(self, folder: Path) -> None:
        """Restore weights, optimizer, progress and random states: training continues as if it had not stopped."""
        self.parallel.load(folder)
        digest, self.progress = self.progress.data, contents.load_progress(folder)
        load_optimizer(folder, self.optimizer, self.trained, self.progress.step)
        asgd.resumed(self.optimizer)
        best = self.store.best() if self.store else None
        about = read_average_info(best) if best else None
        self._averaged = about.rank if about else None
        contents.check_corpus_digest(folder, self.progress.data, digest)
        self._resolve_budget()
        # With a larger budget training continues.
        self.progress.done = self.progress.done and (self.spent() >= 1 or self._out_of_patience())
        restore_rng_state(contents.load_random(folder), self.world, folder / contents.RANDOM_FILE)
        streams = range(self.world.rank, self._batches, self.world.size)
        bf16 = self.train.precision == "bf16"
        self._carried = [
            load_carry(folder, self.trained, self.task, self.loader.sampler, self.world, stream, bf16)
            for stream in streams
        ]
