"""Server-sent events: a response that is written while it is generated, and that ends when the client goes away."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from weft.config.json import write_json
from weft.errors import WeftError
from weft.serve.admission import Admission, disconnected
from weft.serve.errors import RequestError, error_body

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]


def event(data: Any, name: str = "") -> bytes:
    """Return one event; JSON has no line breaks, so its data is one line."""
    line = f"data: {data if isinstance(data, str) else write_json(data)}\n\n"
    return (f"event: {name}\n{line}" if name else line).encode("utf-8", "backslashreplace")


class EventStream(Response):
    """The events of one request. An error before the first of them is an ordinary response with its status."""

    def __init__(
        self, admission: Admission, start: Callable[[], AsyncIterator[bytes]], cancel: Callable[[], None]
    ) -> None:
        super().__init__()
        self._admission, self._start, self._cancel = admission, start, cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the events; stop the work when they end, whatever the reason."""
        request = Request(scope, receive)
        async with self._admission.admitted():
            writer = asyncio.ensure_future(self._write(send))
            gone = asyncio.ensure_future(disconnected(request))
            try:
                await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
                if writer.done():
                    writer.result()
            finally:
                self._cancel()
                gone.cancel()
                writer.cancel()

    async def _write(self, send: Send) -> None:
        started = False
        try:
            async with asyncio.timeout(self._admission.config.time_limit):
                async for part in self._start():
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                        started = True
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except (WeftError, RequestError, TimeoutError) as error:
            failure = _as_request_error(error, self._admission.config.time_limit)
            if not started:
                raise failure from None
            body = error_body(failure.status, failure.message)
            await send({"type": "http.response.body", "body": event(body, "error"), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _as_request_error(error: Exception, time_limit: float) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, TimeoutError):
        return RequestError(503, f"the answer was not complete within {time_limit:g} seconds; ask for a shorter one")
    return RequestError(422, str(error))
