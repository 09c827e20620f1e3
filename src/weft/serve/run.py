"""Serving the application with uvicorn: slow clients are cut off, and SIGTERM lets accepted requests finish."""

import asyncio
import gc
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.errors import ConfigError
from weft.serve.app import Services, create_app
from weft.serve.config import ServerConfig
from weft.serve.models import ServedModel, load_models

MAX_HEAD = 32 << 10  # bytes of a request's line and headers
BACKLOG = 2048  # connections that wait to be accepted
SWITCH_INTERVAL = 2e-4  # seconds after which a thread gives way: the one that computes asks for it at every kernel
LINGER = 1.0  # seconds after a signal in which open connections are still answered: a request may be on its way
IDLE = 20  # seconds that an idle connection is kept


class Connection(HttpToolsProtocol):
    """An HTTP connection that is closed if a request's head does not come in time, or is too large."""

    services: Services
    head_time_limit: float = 10.0  # uvicorn itself waits for ever, and reads headers of any size
    _head_timer: asyncio.TimerHandle | None = None
    _in_head = False  # whether a head has begun and is not complete
    _head_bytes = 0  # received of it
    _refuses = False  # whether the request that is being received is refused, since the queue is full

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Read what has come; once a request has begun, its head must be complete in time and within the limit."""
        if self._head_timer is None and self._is_idle():
            self._expect_head()
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
        if not self._is_idle():
            self._cancel_timer()
        elif self._head_bytes > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        """Begin to read a head."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begin the request, unless its head is too large."""
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD:
            raise ValueError("the parser answers 400 to any error")
        self._in_head = False
        self._refuses, self._keeps_alive = self._is_full(), self.parser.should_keep_alive()
        if not self._refuses:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Receive a part of the body; that of a request which is refused is not kept."""
        if not self._refuses:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Finish the request; one that is refused is answered here, at a twentieth of what the application costs."""
        if not self._refuses:
            super().on_message_complete()
            return
        self._refuses = False
        self._cancel_timer()
        self.transport.write(self.services.admission.refusal())
        if self._keeps_alive:
            self.timeout_keep_alive_task = self.loop.call_later(IDLE, self.timeout_keep_alive_handler)
        else:
            self.transport.close()

    def _is_full(self) -> bool:
        """Return whether the request is one too many, and an ordinary one, which can be refused with the same bytes."""
        if not self.services.admission.full or not self._is_idle() or self.parser.get_method() != b"POST":
            return False
        return not self.expect_100_continue and all(name != b"origin" for name, _ in self.headers)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._cancel_timer()
        super().connection_lost(exc)

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_time_limit, self._close_if_idle)

    def _cancel_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_if_idle(self) -> None:
        self._head_timer = None
        if self._is_idle():
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server, which on a signal finishes what was accepted and refuses the rest before it ends."""

    _draining_since = math.inf  # seconds of the monotonic clock

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; a second signal ends the server at once. The signal is not raised again: the exit is 0."""
        admission = self.config.app.state.services.admission  # type: ignore[union-attr]
        if admission.draining:
            os._exit(128 + sig)
        admission.draining = True
        self._draining_since = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end: once nothing that was accepted is left, and what was on its way has been refused."""
        admission = self.config.app.state.services.admission  # type: ignore[union-attr]
        lingered = time.monotonic() > self._draining_since + LINGER or not self.server_state.connections
        if admission.draining and not admission.active and lingered:
            self.should_exit = True
        return await super().on_tick(counter)


def make_server(models: Mapping[str, ServedModel], config: ServerConfig) -> Server:
    """Return the server of these models; `run` serves until a signal."""
    app = create_app(models, config)
    settings = {"head_time_limit": config.body_time_limit, "services": app.state.services}
    connection: Any = type("Connection", (Connection,), settings)
    server = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=connection,
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE,
    )
    return Server(server)


def app_from_environment() -> FastAPI:
    """Return the application for another server: the models of WEFT_MODELS, with WEFT_TOKEN and WEFT_ALLOWED_HOSTS.

    It is `uvicorn --factory weft.serve.run:app_from_environment --workers 2`. With a token, calls by any address pass.
    """
    models = os.environ.get("WEFT_MODELS", "").split()
    if not models:
        raise ConfigError("WEFT_MODELS: must name the models to serve, separated by spaces, but is empty")
    token = os.environ.get("WEFT_TOKEN") or None
    host = "127.0.0.1" if token is None else "0.0.0.0"
    names = tuple(os.environ.get("WEFT_ALLOWED_HOSTS", "").lower().split())
    return create_app(load_models(models, "auto", False, "fp32"), ServerConfig(host, 0, token, names))


def bind(config: ServerConfig) -> socket.socket:
    """Return a socket that listens at the server's address; raise an error if it is taken, or none of this machine."""
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        return socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        address, reason = f"{config.host}:{config.port}", getattr(error, "strerror", "") or error
        raise ConfigError(f"--host, --port: cannot listen on {address} ({reason}); choose others") from None


def serve(models: Mapping[str, ServedModel], config: ServerConfig, tell: Callable[[str], object]) -> None:
    """Serve until SIGTERM or Ctrl-C; tell where, once requests are accepted."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()  # what is there now stays: a collection that looked at all of it would hold up every request
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("weft.serve").setLevel(logging.INFO)
    listening = bind(config)
    host, port = listening.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    tell(f"serving {', '.join(models)} on http://{address}:{port}")
    make_server(models, config).run(sockets=[listening])
