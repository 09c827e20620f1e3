"""Which requests share a batch, and in what order batches are run."""

import asyncio
import threading

import pytest
import torch

from weft.serve.errors import RequestError
from weft.serve.metrics import Metrics
from weft.serve.scheduler import BatchJob, BatchKind, Scheduler, split_jobs


def make_jobs(sizes, kind, loop):
    return [BatchJob(kind, [size], size, loop.create_future()) for size in sizes]


def order_of_batches(sizes, budget, kinds=None, threads=1, while_run=lambda: None):
    """Return the inputs of each batch, where all jobs wait before the first batch."""
    batches = []

    def run(inputs):
        batches.append(inputs)
        while_run()
        return inputs

    async def submit():
        loop, scheduler = asyncio.get_running_loop(), Scheduler(budget, Metrics(), threads)
        kinds_of_jobs = kinds or [0] * len(sizes)
        jobs = [
            job
            for size, options in zip(sizes, kinds_of_jobs, strict=True)
            for job in make_jobs([size], BatchKind("m", "predict", options, run), loop)
        ]
        scheduler.submit(jobs)
        scheduler.start()
        results = await asyncio.gather(*(job.future for job in jobs))
        assert results == [[size] for size in sizes]
        await asyncio.to_thread(scheduler.stop)

    asyncio.run(submit())
    return batches


def test_requests_share_a_batch_up_to_the_budget():
    assert order_of_batches([5, 5, 5, 5], 10) == [[5, 5], [5, 5]]
    assert order_of_batches([5, 5, 5, 5], 100) == [[5, 5, 5, 5]]
    assert order_of_batches([50], 10) == [[50]]  # more than a budget: alone


def test_short_requests_do_not_wait_for_long_ones_and_long_ones_not_for_ever():
    assert order_of_batches([90, 80, 1, 2, 3, 70], 10) == [[90], [1, 2, 3], [80], [70]]


def test_other_options_are_another_batch():
    assert order_of_batches([1, 2, 3, 4], 100, ["a", "b", "a", "b"]) == [[1, 3], [2, 4]]


def test_a_large_request_is_split():
    async def split(sizes):
        kind = BatchKind("m", "predict", 0, list)
        jobs = split_jobs(kind, sizes, sizes, 10, asyncio.get_running_loop())
        return [job.inputs for job in jobs]

    assert asyncio.run(split([4, 4, 40, 4, 4])) == [[4, 4], [40], [4, 4]]
    assert asyncio.run(split([])) == []


def test_threads_compute_side_by_side_with_one_core_each():
    meeting, cores = threading.Barrier(2, timeout=5), []

    def meet():
        meeting.wait()
        cores.append(torch.get_num_threads())

    assert sorted(order_of_batches([500] * 4, 4096, threads=2, while_run=meet)) == [[500, 500], [500, 500]]
    assert 1 in cores
    with pytest.raises(RequestError):  # of one thread, nobody meets another
        order_of_batches([500] * 4, 4096, while_run=threading.Barrier(2, timeout=0.2).wait)


def test_few_tokens_are_not_shared():
    assert order_of_batches([5] * 4, 4096, threads=2) == [[5] * 4]
