"""Errors of a request: the HTTP status, the message, and how they are written as JSON."""

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from weft.config.json import write_json
from weft.errors import WeftError

TAGS = ("body", "call", "bare", "str", "int", "float", "bool")
# OpenAI's names for kinds of errors, which its clients map to exceptions by the status alone.
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {  # of every response
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class RequestError(Exception):
    """A request that is not answered: its status, the message for the client, and headers."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers


class JSONResponse(Response):
    """JSON without NaN; a lone surrogate, which a request may quote, is escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the bytes of a body."""
        return write_json(content).encode("utf-8", "backslashreplace")


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the response of an error."""
    return JSONResponse(error_body(status, message), status, headers)


def response_bytes(error: RequestError) -> bytes:
    """Return an error as a whole HTTP response, with the headers of every response."""
    body = write_json(error_body(error.status, error.message)).encode()
    headers = {**SECURITY_HEADERS, **(error.headers or {}), "content-type": "application/json"}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def validation_message(errors: Sequence[Any]) -> str:
    """Return what is wrong with a body, in a line: the place of each error and what it must be."""
    lines = []
    for error in errors[:3]:
        # pydantic names the branches of unions, too: "body", "call" and types, which are no places in the body.
        parts = [str(part) for part in error["loc"] if part not in TAGS and not re.search(r"[\[(]", str(part))]
        lines.append(f"{'.'.join(parts) or 'body'}: {error['msg']}")
    return "; ".join(dict.fromkeys(lines)) + ("" if len(errors) <= 3 else f"; and {len(errors) - 3} more")


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error with the same JSON: 422 for what weft refuses, its own status for the others."""

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return error_response(error.status, error.message, error.headers)

    @app.exception_handler(WeftError)
    async def wrong(request: Request, error: WeftError) -> Response:
        return error_response(422, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(422, validation_message(error.errors()))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return error_response(500, "an error in weft itself, which its log describes; please report it")
