"""Batches outside training: computed without gradients, in evaluation mode, and on a CPU one a thread."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar

import numpy as np
import torch

from weft.data.batching.loader import plan_batches
from weft.data.batching.packed_items import PackedItems
from weft.tasks.base import Task
from weft.tasks.batch import Batch
from weft.tasks.head import Head

BUDGET, BUDGET_ON_CPU = 16384, 4096  # tokens in a batch

_A = TypeVar("_A")
_B = TypeVar("_B")


def plan_inference_batches(head: Head, data: PackedItems, budget: int | None) -> list[np.ndarray]:
    """Return the indices of each batch's items, of `budget` tokens at most; None: by the device."""
    default = BUDGET_ON_CPU if head.device.type == "cpu" else BUDGET
    return plan_batches(data, budget or default, seed=None)


def run_batches(
    task: Task,
    head: Head,
    data: PackedItems,
    batches: Sequence[np.ndarray],
    compute: Callable[[np.ndarray, Batch], _B],
) -> Iterator[_B]:
    """Yield the result of `compute(indices, batch)` for each batch of items, in order."""
    device = head.device

    def run(indices: np.ndarray) -> _B:
        batch = task.collate([data[index] for index in indices.tolist()], np.random.default_rng(0))
        with torch.inference_mode():
            return compute(indices, batch.to(device))

    with eval_mode(head):
        yield from map_in_threads(run, batches) if device.type == "cpu" else map(run, batches)


def map_in_threads(answer: Callable[[_A], _B], batches: Sequence[_A]) -> Iterator[_B]:
    """Yield the results in order, with one batch a thread: small matrix products do not parallelize well."""
    threads = torch.get_num_threads()
    if threads == 1 or len(batches) == 1:
        yield from map(answer, batches)
        return
    futures: deque[Future[_B]] = deque()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for batch in batches:
                futures.append(pool.submit(copy_context().run, answer, batch))
                if len(futures) > threads:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
    finally:
        torch.set_num_threads(threads)


@contextmanager
def eval_mode(head: Head) -> Iterator[None]:
    """Set evaluation mode inside, and the mode before it afterwards."""
    was_training = head.training
    head.eval()
    try:
        yield
    finally:
        head.train(was_training)
