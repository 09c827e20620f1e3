"""The threads that compute: requests that wait together share a batch, and a request that is alone does not wait.

A thread that is free takes waiting requests of one kind (a model, a method and its options), up to a budget of tokens.
The shortest ones come first, so that a long text does not hold up short ones; but every other batch begins with the
request that has waited longest, so that none waits for ever. On a GPU there is one thread. On a CPU there is one for
each core: a batch that is alone is computed by all cores, and several batches by one core each, as cores that share a
batch wait for each other. What goes on step by step, such as the generation of texts, is done by the first thread.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from weft.errors import WeftError
from weft.nn.kernels.dispatch import lasting_inference
from weft.nn.layers.packed_linear import frozen_weights
from weft.serve.errors import RequestError
from weft.serve.metrics import Metrics

LOG = logging.getLogger("weft.serve")
CHARACTERS_PER_TOKEN = 4  # of a text that is not tokenized yet
MIN_SHARE = 64  # tokens that are worth a thread of their own

Results = list[Any]  # a result or a WeftError for each input
OUT_OF_MEMORY = "out of memory; send fewer or shorter inputs, or try again"


@dataclass(frozen=True)
class BatchKind:
    """What inputs of several requests have in common if they can share a batch."""

    model: str
    method: str
    options: Hashable
    run: Callable[[list[Any]], Results] = field(compare=False)


@dataclass(eq=False)
class BatchJob:
    """Inputs of a request, or a part of them that fits a batch."""

    kind: BatchKind
    inputs: Sequence[Any]
    tokens: int  # an estimate
    future: asyncio.Future[Results]
    cancelled: bool = False


class Engine(Protocol):
    """Work that goes on step by step, such as the generation of texts."""

    def step(self) -> bool:
        """Do one step; return whether there was anything to do."""

    def fail(self, error: Exception) -> None:
        """Give up all work at hand: a step has raised this error."""


class Scheduler:
    """Runs batches and engines, on `threads` threads: one, or as many as PyTorch uses cores."""

    def __init__(self, budget: int, metrics: Metrics, threads: int = 1) -> None:
        self._budget, self._metrics = budget, metrics
        self._waiting: list[BatchJob] = []
        self._engines: list[Engine] = []
        self._condition = threading.Condition()
        self._oldest_first = True
        self._stopping = False
        self._busy = 0  # threads that compute
        # Weights are packed once for all threads, and not for each batch.
        self._context, self._scopes = copy_context(), ExitStack()
        for scope in (frozen_weights(), lasting_inference()):
            self._context.run(self._scopes.enter_context, scope)
        self._threads = [
            threading.Thread(target=self._context.copy().run, args=(self._run, number == 0), daemon=True)
            for number in range(threads)
        ]

    def add_engine(self, engine: Engine) -> None:
        """Add work that is stepped between batches."""
        self._engines.append(engine)

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads once they have done what they are doing."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()
        self._context.run(self._scopes.close)

    def wake(self) -> None:
        """Let the threads look for work: an engine has some."""
        with self._condition:
            self._condition.notify_all()

    def submit(self, jobs: Sequence[BatchJob]) -> None:
        """Queue jobs."""
        with self._condition:
            self._waiting += jobs
            self._condition.notify(len(jobs))

    def _run(self, steps_engines: bool) -> None:
        cores = torch.get_num_threads()
        while not self._stopping:
            with self._computing(cores):
                stepped = [self._step(engine) for engine in self._engines] if steps_engines else []
            if any(stepped) and len(self._threads) > 1:
                continue  # the other threads run the batches
            batch = self._take(wait=not any(stepped))
            if batch:
                with self._computing(cores, is_batch=True):
                    self._run_batch(batch)

    @contextmanager
    def _computing(self, cores: int, is_batch: bool = False) -> Iterator[None]:
        """Context in which this thread computes: with all cores if no other does, and else with one."""
        with self._condition:
            self._busy += not is_batch  # a batch was counted when it was taken
            alone = self._busy == 1 and not self._waiting
        if len(self._threads) > 1:
            torch.set_num_threads(cores if alone else 1)
        try:
            yield
        finally:
            with self._condition:
                self._busy -= 1

    def _step(self, engine: Engine) -> bool:
        try:
            return engine.step()
        except Exception as error:  # the other requests must go on
            engine.fail(served_error(error))
            return True

    def _take(self, wait: bool) -> list[BatchJob]:
        """Return the jobs of the next batch, and count this thread as busy; with `wait`, sleep until there are some."""
        with self._condition:
            self._waiting = [job for job in self._waiting if not job.cancelled]
            if not self._waiting and wait and not self._stopping:
                self._condition.wait(timeout=1.0)  # an engine may have work, too
            batch = self._choose() if self._waiting else []
            self._busy += bool(batch)
            return batch

    def _choose(self) -> list[BatchJob]:
        """Take jobs of one kind from the queue, up to the budget: the shortest, or the oldest and then the shortest."""
        first = self._waiting[0] if self._oldest_first else min(self._waiting, key=lambda job: job.tokens)
        self._oldest_first = not self._oldest_first
        batch, tokens = [first], first.tokens
        others = [job for job in self._waiting if job.kind == first.kind and job is not first]
        budget = self._share(first.tokens + sum(job.tokens for job in others))
        for job in sorted(others, key=lambda job: job.tokens):
            tokens += job.tokens
            if tokens > budget:
                break
            batch.append(job)
        taken = set(map(id, batch))
        self._waiting = [job for job in self._waiting if id(job) not in taken]
        return batch

    def _share(self, tokens: int) -> int:
        """Return the budget of a batch: of the tokens that wait, as many as leave some for the other free threads."""
        free = max(1, len(self._threads) - self._busy)
        return min(self._budget, max(-(-tokens // free), MIN_SHARE))

    def _run_batch(self, batch: list[BatchJob]) -> None:
        kind, inputs = batch[0].kind, [value for job in batch for value in job.inputs]
        self._metrics.batch.labels(kind.model, kind.method).observe(len(inputs))
        try:
            results: Results | Exception = kind.run(inputs)
        except Exception as error:  # the thread must go on
            results = served_error(error)
        _deliver(batch, results)


def served_error(error: Exception) -> Exception:
    """Return what a client is told of an error, and log one that is weft's own."""
    if isinstance(error, WeftError):
        return error
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower() or "can't allocate" in str(error):
        _free_memory()
        return RequestError(503, OUT_OF_MEMORY, {"retry-after": "1"})
    LOG.error("an error in weft itself", exc_info=error)
    return RequestError(500, "an error in weft itself, which its log describes; please report it")


def _free_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _deliver(batch: list[BatchJob], results: Results | Exception) -> None:
    """Hand the results to the event loop that waits for them."""
    loop = batch[0].future.get_loop()
    loop.call_soon_threadsafe(_set_results, batch, results)


def _set_results(batch: list[BatchJob], results: Results | Exception) -> None:
    start = 0
    for job in batch:
        end = start + len(job.inputs)
        if not job.future.done():
            if isinstance(results, Exception):
                job.future.set_exception(results)
            else:
                job.future.set_result(results[start:end])
        start = end


def split_jobs(
    kind: BatchKind, inputs: Sequence[Any], sizes: Sequence[int], budget: int, loop: asyncio.AbstractEventLoop
) -> list[BatchJob]:
    """Return the jobs of a request: parts of its inputs that fit a batch; `sizes` are those of the texts."""
    jobs: list[BatchJob] = []
    start = total = 0
    for number, size in enumerate(sizes):
        tokens = size // CHARACTERS_PER_TOKEN + 1
        if total and total + tokens > budget:
            jobs.append(BatchJob(kind, inputs[start:number], total, loop.create_future()))
            start, total = number, 0
        total += tokens
    if start < len(inputs):
        jobs.append(BatchJob(kind, inputs[start:], total, loop.create_future()))
    return jobs
