"""What stands before every route: who may call it, how large a body may be, and the headers of every response.

A page of another site can make a browser send requests to a server on this machine, and with a name that it controls
(DNS rebinding) even read the answers. So a request with a foreign Host or Origin is refused, whatever its method.
"""

import asyncio
import hmac
import logging
import time
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.serve.config import ServerConfig
from weft.serve.errors import SECURITY_HEADERS, RequestError, error_response
from weft.serve.metrics import Metrics

LOG = logging.getLogger("weft.serve")
LOCAL_NAMES = {"localhost", "127.0.0.1", "::1"}
PROTECTED = ("/v1/", "/metrics", "/openapi.json")  # paths that need the token; the page itself does not


class Guard:
    """ASGI middleware: checks a request, reads its body within limits, and counts it."""

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: Metrics) -> None:
        self.app, self.config, self.metrics = app, config, metrics
        self._token = config.token.encode() if config.token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500
        headers = Headers(scope=scope)
        origin = headers.get("origin")

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._add_headers(MutableHeaders(scope=message), origin)
            await send(message)

        try:
            self._check(scope, headers)
            if scope["method"] == "OPTIONS" and origin in self.config.origins:
                await _preflight(scope, receive, send_with_headers)
                return
            body = await self._read_body(scope, headers, receive)
            await self.app(scope, _replay(body, receive), send_with_headers)
        except RequestError as error:
            await error_response(error.status, error.message, error.headers)(scope, receive, send_with_headers)
        finally:
            self._count(scope, status, time.perf_counter() - started)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise an error for a foreign Host or Origin, and for a missing or wrong token."""
        host = headers.get("host", "")
        if not self._is_own_host(host):
            raise RequestError(403, "the Host header names another server; call it by its address, or allow the name")
        origin = headers.get("origin")
        if origin is not None and origin not in self.config.origins and urlsplit(origin).netloc != host:
            raise RequestError(403, "the Origin header names another site; allow it with --origin")
        if self._token is None or not scope["path"].startswith(PROTECTED) or scope["method"] == "OPTIONS":
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        matches = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._token)
        if scheme.lower() != "bearer" or not matches:
            message = "the token is missing or wrong; send the header Authorization: Bearer TOKEN"
            raise RequestError(401, message, {"www-authenticate": "Bearer"})

    def _is_own_host(self, host: str) -> bool:
        """Return whether a Host header is the server's own: a name that no other site can have pointed here."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in LOCAL_NAMES or name == self.config.host.lower() or name in self.config.allowed_hosts:
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return not self.config.is_loopback  # an address is no name that could be rebound

    async def _read_body(self, scope: Scope, headers: Headers, receive: Receive) -> bytes:
        """Return the whole body; raise an error if it is not JSON, too large, compressed or too slow.

        A body of the wrong kind is received, too: a client that still sends would not read the answer.
        """
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return b""
        body = await self._receive_body(headers, receive)
        if headers.get("content-encoding", "identity") != "identity":
            raise RequestError(415, "a compressed body is not read; send it as it is")
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RequestError(415, "the body must be JSON; send the header Content-Type: application/json")
        return body

    async def _receive_body(self, headers: Headers, receive: Receive) -> bytes:
        """Return the body as it is sent, within the limits of size and time."""
        close, limit = {"connection": "close"}, self.config.max_body
        too_large = RequestError(413, f"the body has more than {limit:,} bytes; send fewer or shorter inputs", close)
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > limit:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.config.body_time_limit):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RequestError(400, "the connection was closed before the whole body came", close)
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            seconds = f"{self.config.body_time_limit:g} seconds"
            raise RequestError(408, f"the body did not come within {seconds}; send it at once", close) from None

    def _add_headers(self, headers: MutableHeaders, origin: str | None) -> None:
        for name, value in SECURITY_HEADERS.items():
            headers.setdefault(name, value)
        if origin in self.config.origins and origin is not None:
            headers["access-control-allow-origin"] = origin
            headers["cross-origin-resource-policy"] = "cross-origin"
            headers.add_vary_header("Origin")

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")  # never the path itself, which a client chooses
        self.metrics.requests.labels(route, str(status)).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        if self.config.access_log:
            LOG.info("%s %s %d %.1f ms", scope["method"], escaped(scope["path"]), status, 1000 * seconds)


def escaped(text: str, most: int = 200) -> str:
    """Return a client's text for a line of the log: line breaks and control characters escaped, and no longer."""
    return text[:most].encode("unicode_escape").decode("ascii")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body, which has been read, and then what comes after it: the disconnect."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _preflight(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a browser that asks whether a page of an allowed origin may call a route."""
    headers = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", b"authorization, content-type"),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
