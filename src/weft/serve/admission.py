"""Admission: a bounded number of requests at a time, a time limit for each, and an end when the client goes away."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request

from weft.serve.config import ServerConfig
from weft.serve.errors import RequestError, response_bytes
from weft.serve.metrics import Metrics
from weft.serve.scheduler import BatchJob, Results, Scheduler

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it is for the metrics


class Admission:
    """Counts the requests that wait or are answered, and refuses those beyond the limit."""

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self.config, self.metrics = config, metrics
        self.active = 0
        self._refusal = response_bytes(self._too_many())
        self.draining = False  # whether the server is about to end: what is accepted is finished, the rest refused

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Admit a request for as long as it is answered; raise 429 where there are too many, 503 before the end."""
        if self.draining:
            message = "the server is shutting down; try another, or again later"
            raise RequestError(503, message, {"retry-after": "5", "connection": "close"})
        if self.full:
            raise self._too_many()
        self.active += 1
        self.metrics.active.set(self.active)
        try:
            yield
        finally:
            self.active -= 1
            self.metrics.active.set(self.active)

    @property
    def full(self) -> bool:
        """Whether another request would be one too many."""
        return self.active >= self.config.queue and not self.draining

    def refusal(self) -> bytes:
        """Return the response to a request that is one too many, as it is sent, and count it."""
        self.metrics.requests.labels("refused", "429").inc()
        return self._refusal

    def _too_many(self) -> RequestError:
        return RequestError(429, f"{self.config.queue} requests are waiting already; try again", {"retry-after": "1"})

    async def results(self, request: Request, scheduler: Scheduler, jobs: Sequence[BatchJob]) -> Results:
        """Queue a request's jobs and return their results, in order."""
        scheduler.submit(jobs)
        try:
            parts = await self.finished(request, asyncio.gather(*(job.future for job in jobs)))
        finally:
            for job in jobs:
                job.cancelled = True
        return [result for part in parts for result in part]

    async def finished(self, request: Request, work: "asyncio.Future[Any]") -> Any:
        """Return the result of work; raise an error if it takes too long, or if the client goes away."""
        gone = asyncio.ensure_future(disconnected(request))
        try:
            limit = self.config.time_limit
            done, _ = await asyncio.wait({work, gone}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if work in done:
            return work.result()
        work.cancel()
        if done:
            raise RequestError(CLIENT_CLOSED_REQUEST, "the client has closed the connection")
        message = f"there was no answer within {limit:g} seconds; send fewer or shorter inputs, or try again"
        raise RequestError(503, message, {"retry-after": "5"})


async def disconnected(request: Request) -> None:
    """Return once the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
