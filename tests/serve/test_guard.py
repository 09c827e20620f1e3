"""Who may call the server, what a body may be, and the headers of every response."""

import gzip
import logging
import socket
import time

import pytest
from tests.serve.conftest import running

from weft.errors import ConfigError
from weft.serve.config import ServerConfig
from weft.serve.guard import escaped

TOKEN = "0123456789abcdef-secret"
JSON = {"content-type": "application/json"}
PATH = "/v1/models/classify/predict"


@pytest.fixture(scope="module")
def guarded(classifier):
    """Return a client of a server with a token, an allowed name, an allowed origin and short time limits."""
    settings = {
        "token": TOKEN,
        "allowed_hosts": ("models.example",),
        "origins": ("https://app.example",),
        "body_time_limit": 0.3,
        "access_log": True,
    }
    with running({"classify": classifier}, **settings) as client:
        client.headers["authorization"] = f"Bearer {TOKEN}"
        yield client


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE", "HEAD"])
def test_a_foreign_host_or_origin_is_refused_whatever_the_method(guarded, method):
    for headers in ({"host": "evil.example"}, {"host": "127.0.0.1.evil.example:80"}, {"host": "[::1"}):
        assert guarded.request(method, "/v1/models", headers=headers).status_code == 403
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "https://app.example.evil"):
        assert guarded.request(method, "/v1/models", headers={"origin": origin}).status_code == 403


def test_own_hosts_and_origins_pass(guarded):
    assert guarded.get("/v1/models", headers={"host": "models.example"}).status_code == 200
    assert guarded.get("/v1/models", headers={"host": "LOCALHOST:1234"}).status_code == 200
    own = guarded.get("/v1/models", headers={"origin": f"http://127.0.0.1:{guarded.port}"})
    assert own.status_code == 200
    assert "access-control-allow-origin" not in own.headers
    named = guarded.get("/v1/models", headers={"origin": "https://app.example"})
    assert named.headers["access-control-allow-origin"] == "https://app.example"
    asked = guarded.options(PATH, headers={"origin": "https://app.example", "access-control-request-method": "POST"})
    assert asked.status_code == 204


def test_a_token_is_needed_and_never_logged(guarded, caplog):
    caplog.set_level(logging.DEBUG)
    for given in ("", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer", "Bearer é"):
        answer = guarded.get("/v1/models", headers={"authorization": given.encode()})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    assert guarded.get("/metrics", headers={"authorization": ""}).status_code == 401
    for path in ("/livez", "/readyz", "/"):
        assert guarded.get(path, headers={"authorization": ""}).status_code == 200
    assert guarded.get("/v1/models").status_code == 200
    assert TOKEN not in caplog.text


def test_the_log_has_one_escaped_line_a_request(guarded, caplog):
    caplog.set_level(logging.INFO, "weft.serve")
    guarded.get("/%0A%1B[31mforged line")
    while not caplog.text:  # the line is written after the answer
        time.sleep(0.01)
    assert r"GET /\n\x1b[31mforged line 404" in caplog.text
    assert escaped("a\nb\x1b" + "x" * 1000) == r"a\nb\x1b" + "x" * 196


def test_another_address_needs_a_token():
    for host in ("0.0.0.0", "::", "192.168.1.1", "models.example"):
        with pytest.raises(ConfigError, match="WEFT_TOKEN"):
            ServerConfig(host=host)
    assert ServerConfig(host="0.0.0.0", token=TOKEN).token == TOKEN
    assert ServerConfig(host="localhost").is_loopback
    with pytest.raises(ConfigError, match="16 printable"):
        ServerConfig(token="short")


def test_every_response_has_a_strict_policy(guarded):
    for path in ("/", "/v1/models", "/nothing", "/livez"):
        policy = guarded.get(path).headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert guarded.get(path).headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", JSON, 422),
        (b"", JSON, 422),
        (b'"\xff"', JSON, 400),
        (b"[" * 100_000, JSON, 400),
        (b"[" * 500 + b"]" * 500, JSON, 422),
        (b'{"examples": "good", "options": ' + b'{"a":' * 200 + b"1" + b"}" * 201, JSON, 422),
        (b'["good", NaN]', JSON, 422),
        (b"9" * 5000, JSON, 400),
        (b'"\\ud800"', JSON, 422),
        (b'{"\\ud800": 1}', JSON, 422),
        (b'{"examples": "good", "\\ud800": 1}', JSON, 422),
        (b'"good"', {"content-type": "text/plain"}, 415),
        (b'"good"', {}, 415),
        (gzip.compress(b'"' + b"a" * 1_000_000 + b'"'), {**JSON, "content-encoding": "gzip"}, 415),
    ],
)
def test_a_wrong_body_is_a_client_error(guarded, content, headers, status):
    answer = guarded.post(PATH, content=content, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def raw(client, *parts, pause=0.0):
    """Send bytes as they are, and return what comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", client.port), timeout=20) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        received = b""
        while data := connection.recv(65536):
            received += data
        return received


def head(client, *lines):
    own = [f"POST {PATH} HTTP/1.1", f"host: 127.0.0.1:{client.port}", f"authorization: Bearer {TOKEN}", *lines]
    return "\r\n".join([*own, "content-type: application/json", "", ""]).encode()


def test_slow_and_broken_connections_are_closed(guarded):
    assert raw(guarded) == b""  # nothing is ever sent
    assert raw(guarded, b"GET /livez HT") == b""  # headers that never end
    assert b" 408 " in raw(guarded, head(guarded, "content-length: 100"), b'"goo')  # a body that never ends
    assert b" 400 " in raw(guarded, b"nonsense\r\n\r\n")
    assert b" 400 " in raw(guarded, b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 40_000)
    whole = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: %b\r\nconnection: close\r\n\r\n"
    assert b" 200 " in raw(guarded, whole % (b"a" * 20_000))
    assert b" 400 " in raw(guarded, whole % (b"a" * 60_000))
    assert b" 413 " in raw(guarded, head(guarded, "content-length: 99999999999999"))
    assert b" 400 " in raw(guarded, head(guarded, "content-length: -5"))
    assert guarded.get("/livez").status_code == 200
