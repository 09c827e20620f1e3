"""The server as a process: it says where it is, answers, and on SIGTERM finishes what it has accepted."""

import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from tests.serve.conftest import running

from weft.errors import ConfigError
from weft.serve.config import ServerConfig
from weft.serve.run import app_from_environment, bind


def test_the_command_serves_and_ends_with_0_on_sigterm(trained_run):
    command = [
        sys.executable,
        "-m",
        "weft",
        "serve",
        f"reverse={trained_run}",
        "dates",
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "WEFT_TOKEN"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        address = re.search(r"serving reverse, dates on (http://127.0.0.1:\d+)", server.stderr.readline()).group(1)
        body = {"text": "abcde"}
        assert httpx.post(f"{address}/v1/models/reverse/predict", json=body, timeout=60).json()["text"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
        assert server.stderr.read() == ""
    finally:
        server.kill()
        server.stderr.close()


def test_a_server_that_ends_refuses_new_requests(classifier):
    with running({"classify": classifier}) as client:
        client.services.admission.active += 1  # something accepted is not finished
        client.services.admission.draining = True
        assert client.get("/readyz").status_code == 503
        assert client.get("/livez").status_code == 200
        refused = client.post("/v1/models/classify/predict", json="good")
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        client.services.admission.active -= 1


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="cannot listen"):
        bind(ServerConfig(port=other.getsockname()[1]))
    with pytest.raises(ConfigError, match="cannot listen"):
        bind(ServerConfig(host="256.1.1.1", token="0" * 16))


def test_the_application_can_be_made_for_another_server(trained_run, monkeypatch):
    monkeypatch.delenv("WEFT_MODELS", raising=False)
    with pytest.raises(ConfigError, match="WEFT_MODELS"):
        app_from_environment()
    monkeypatch.setenv("WEFT_MODELS", f"reverse={trained_run} {trained_run}/best")
    monkeypatch.setenv("WEFT_TOKEN", "0123456789abcdef")
    services = app_from_environment().state.services
    assert list(services.models) == ["reverse", "run"]
    assert services.config.token == "0123456789abcdef"
