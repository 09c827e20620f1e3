"""A load generator for `serve.py`: HTTP/1.1 over raw asyncio connections, in a process of its own.

Open loop: requests are sent at times drawn beforehand (Poisson), whether or not earlier ones were answered, and a
latency counts from that time, so that a slow server cannot slow down its own load. Closed loop: each client sends its
next request when the last one is answered. Bodies are built beforehand, and answers are counted and not parsed, so that
the generator takes little of the machine.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import uvloop

OnData = Callable[[bytes], None]
OnAnswer = Callable[[str, bytes], None]  # the status, or what went wrong, and the body


@dataclass
class Load:
    """What was sent and what came back."""

    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)  # of answers with status 200, in the order of their kinds
    kinds: list[int] = field(default_factory=list)  # the body's number of each of these
    first: list[float] = field(default_factory=list)  # seconds to the first event of a stream
    gaps: list[float] = field(default_factory=list)  # seconds between events of a stream
    bodies: list[bytes] = field(default_factory=list)  # answers that were asked to be kept
    cpu_seconds: float = 0.0  # of this process

    @property
    def rate(self) -> float:
        """Answers with status 200 a second."""
        return self.statuses["200"] / self.seconds if self.seconds else 0.0

    def latency(self, quantile: float, kinds: Callable[[int], bool] = lambda kind: True) -> float:
        """Return a quantile of the latencies, in seconds."""
        return quantile_of([t for t, kind in zip(self.latencies, self.kinds, strict=True) if kinds(kind)], quantile)


def quantile_of(values: Sequence[float], quantile: float) -> float:
    """Return a quantile by the nearest rank; infinity where there are no values."""
    ordered = sorted(values)
    return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)] if ordered else float("inf")


class Connection(asyncio.Protocol):
    """A connection that is kept alive: one request at a time."""

    def __init__(self) -> None:
        self.on_answer: OnAnswer | None = None  # None: no request is being answered
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def request(self, data: bytes, on_answer: OnAnswer, on_data: OnData | None = None) -> None:
        self.buffer, self.expected, self.on_answer, self.on_data = b"", None, on_answer, on_data
        self.transport.write(data)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if self.on_answer is None:
            return
        self.buffer = self.buffer + data if self.buffer else data
        if self.on_data is not None:
            self.on_data(data)
        if self.expected is None:  # bytes of the whole answer; None: not known, or chunked
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            lowered = self.buffer[:end].lower()
            place = lowered.find(b"content-length:")
            if place >= 0:
                self.expected = end + 4 + int(lowered[place + 15 :].partition(b"\r\n")[0])
        whole = self.buffer.endswith(b"0\r\n\r\n") if self.expected is None else len(self.buffer) >= self.expected
        if whole:
            self._answer(self.buffer[9:12].decode(), self.buffer.partition(b"\r\n\r\n")[2])

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self.on_answer is not None:
            self._answer("closed", b"")

    def _answer(self, status: str, body: bytes) -> None:
        on_answer, self.on_answer = self.on_answer, None
        on_answer(status, body)  # type: ignore[misc]


class Client:
    """Connections to one server, opened as they are needed."""

    def __init__(self, port: int) -> None:
        self.port, self.idle, self.opening = port, list[Connection](), set[asyncio.Task[None]]()

    def send(self, data: bytes, on_answer: OnAnswer, on_data: OnData | None = None) -> None:
        """Send a request; `on_answer` is called with the status and the body of the answer."""
        while self.idle and self.idle[-1].closed:
            self.idle.pop()
        if self.idle:
            self._request(self.idle.pop(), data, on_answer, on_data)
        else:
            task = asyncio.ensure_future(self._open(data, on_answer, on_data))
            self.opening.add(task)
            task.add_done_callback(self.opening.discard)

    async def _open(self, data: bytes, on_answer: OnAnswer, on_data: OnData | None) -> None:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self.port)
        except OSError:
            on_answer("refused", b"")
        else:
            self._request(connection, data, on_answer, on_data)

    def _request(self, connection: Connection, data: bytes, on_answer: OnAnswer, on_data: OnData | None) -> None:
        def answered(status: str, body: bytes) -> None:
            if not connection.closed:
                self.idle.append(connection)
            on_answer(status, body)

        connection.request(data, answered, on_data)

    async def ask(self, data: bytes, on_data: OnData | None = None) -> tuple[str, bytes]:
        """Send a request; return the status and the body of the answer."""
        done: asyncio.Future[tuple[str, bytes]] = asyncio.get_running_loop().create_future()
        self.send(data, lambda status, body: done.set_result((status, body)), on_data)
        return await done


def http_request(path: str, body: object) -> bytes:
    """Return a POST request with a JSON body."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


def arrivals(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Yield the times of a Poisson process."""
    rng, now = random.Random(seed), 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        yield now


async def _open_loop(port: int, requests: Sequence[bytes], rate: float, seconds: float, seed: int) -> Load:
    client, load, sent = Client(port), Load(), 0
    times = list(arrivals(rate, seconds, seed))
    start, cpu = time.perf_counter(), time.process_time()

    def send(number: int) -> None:
        kind, due = number % len(requests), times[number]

        def answered(status: str, _: bytes) -> None:
            load.statuses[status] += 1
            if status == "200":
                load.latencies.append(time.perf_counter() - start - due)
                load.kinds.append(kind)

        client.send(requests[kind], answered)

    while sent < len(times):
        now = time.perf_counter() - start
        while sent < len(times) and times[sent] <= now:
            send(sent)
            sent += 1
        if sent < len(times):
            await asyncio.sleep(max(times[sent] - time.perf_counter() + start, 0))
    deadline = time.perf_counter() + 10
    while load.statuses.total() < sent and time.perf_counter() < deadline:
        await asyncio.sleep(0.002)
    load.statuses["unanswered"] += sent - load.statuses.total()
    load.seconds, load.cpu_seconds = max(time.perf_counter() - start, seconds), time.process_time() - cpu
    return load


async def _closed_loop(port: int, requests: Sequence[bytes], clients: int, count: int, keep: bool) -> Load:
    """Answer `count` requests by so many clients; the answers are kept if asked for."""
    client, load, numbers = Client(port), Load(), iter(range(count))
    start, cpu = time.perf_counter(), time.process_time()

    async def one() -> None:
        for number in numbers:
            kind, events = number % len(requests), list[float]()
            sent = time.perf_counter()
            status, body = await client.ask(requests[kind], lambda _, events=events: events.append(time.perf_counter()))
            load.statuses[status] += 1
            load.latencies.append(time.perf_counter() - sent)
            load.kinds.append(kind)
            load.first.append(events[1] - sent if len(events) > 1 else events[0] - sent if events else float("inf"))
            load.gaps += [after - before for before, after in pairwise(events[1:])]
            if keep:
                load.bodies.append(body)

    await asyncio.gather(*(one() for _ in range(clients)))
    load.seconds, load.cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return load


def open_loop(port: int, requests: Sequence[bytes], rate: float, seconds: float, seed: int = 0) -> Load:
    """Send requests at a rate, whatever the answers do; return what came back."""
    return uvloop.run(_open_loop(port, requests, rate, seconds, seed))


def closed_loop(port: int, requests: Sequence[bytes], clients: int, count: int, keep: bool = False) -> Load:
    """Send `count` requests by so many clients, each one after the other; return what came back."""
    return uvloop.run(_closed_loop(port, requests, clients, count, keep))


__all__ = ["Load", "asdict", "closed_loop", "http_request", "open_loop", "quantile_of"]
