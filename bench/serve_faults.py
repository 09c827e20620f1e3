"""Faults against a real `weft serve`: schemathesis, disconnects in mid-stream, SIGTERM under load, a soak.

    python bench/serve_faults.py [--cases 20000] [--disconnects 200] [--sigterms 50] [--soak 600]

It trains two small models, serves them in a process of their own, and prints one line for each check. schemathesis is
no dependency of weft: where it is not on the PATH, its check is skipped (pip install schemathesis).
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import httpx

import weft

TEXTS = ["good fine great", "bad poor awful", "fine great good good", "awful bad bad", "great fine", "poor awful bad"]
LONG = {"prompt": "good", "options": {"max_length": 150, "min_length": 150}}


def train_models(folder: Path) -> list[str]:
    """Train a small GPT and a small classifier; return them as NAME=PATH."""
    texts, rows = folder / "texts.txt", folder / "rows.tsv"
    texts.write_text("\n".join(20 * TEXTS) + "\n")
    rows.write_text("".join(f"{text}\t{'good' if 'g' in text else 'bad'}\n" for text in TEXTS))
    small = {"width": 32, "layers": 2, "heads": 2}
    train = {"steps": 50, "batch_tokens": 512, "lr": 0.01}
    language = {
        "task": {"name": "lm"},
        "data": {"train": str(texts), "max_length": 64},
        "tokenizer": {"name": "characters"},
        "model": {"name": "gpt", "max_positions": 256, **small},
        "train": train,
    }
    labels = {
        "task": {"name": "classify"},
        "data": {"train": str(rows), "columns": {"text": 0, "label": 1}},
        "tokenizer": {"name": "words"},
        "model": {"name": "bert", **small},
        "train": train,
    }
    weft.train(language, out=folder / "gpt")
    weft.train(labels, out=folder / "classify")
    return [f"{name}={folder / name}" for name in ("gpt", "classify")]


@contextmanager
def serving(models: list[str], *options: str):
    """Run `weft serve`; give the process and its address. Afterwards it must end with 0 on SIGTERM."""
    command = [sys.executable, "-m", "weft", "serve", *models, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        address = re.search(r"http://\S+", process.stderr.readline()).group()
        yield process, address
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, process.returncode
    finally:
        process.kill()


def check_schema(models: list[str], cases: int) -> str:
    """Run schemathesis, positive and negative, on every route."""
    program = shutil.which("schemathesis")
    if program is None:
        return "skipped: schemathesis is not installed"
    with serving(models) as (_, address):
        routes = len(httpx.get(f"{address}/openapi.json").json()["paths"])
        command = [program, "run", f"{address}/openapi.json", "--url", address, "--checks", "not_a_server_error"]
        command += ["--max-examples", str(-(-cases // routes)), "--request-timeout", "30", "--no-color"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        phases = ["--phases", "examples,coverage,fuzzing"]
        done = subprocess.run([*command, *phases], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout
        return re.search(r"\d+ generated, .*", done.stdout).group()


def metric(address: str, name: str) -> float:
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and not line.startswith("#"))


def check_disconnects(models: list[str], count: int) -> str:
    """Go away in mid-stream; nothing may go on computing."""
    body = json.dumps(LONG).encode()
    head = "POST /v1/models/gpt/stream HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with serving(models) as (_, address):
        port = int(address.rpartition(":")[2])
        for _ in range(count):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
                assert b" 200 " in connection.recv(4096)
        time.sleep(0.5)
        active, running = metric(address, "weft_active_requests"), metric(address, "weft_running_sequences")
        before = metric(address, "weft_generated_tokens_total")
        time.sleep(0.5)
        after = metric(address, "weft_generated_tokens_total")
        assert (active, running, after - before) == (0, 0, 0), (active, running, after - before)
        return f"{count} streams left, {before:.0f} tokens generated of {150 * count}"


async def load(address: str, seconds: float, clients: int, process: subprocess.Popen | None = None) -> dict[str, int]:
    """Send requests from many clients; return how often each status came.

    With `process`, that one gets SIGTERM halfway; a request that was sent before it and gets no answer is "lost".
    """
    statuses: dict[str, int] = {}
    start = time.monotonic()
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)

    async def client(own: httpx.AsyncClient, number: int) -> None:
        path = "/v1/models/gpt/predict" if number % 2 else "/v1/models/classify/predict"
        while (sent := time.monotonic()) < start + seconds:
            try:
                status = str((await own.post(path, json=TEXTS[number % 6])).status_code)
            except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
                status = "lost" if process is None or sent < start + seconds / 2 else "refused"
            statuses[status] = statuses.get(status, 0) + 1
            if status not in ("200", "429"):
                return

    async with httpx.AsyncClient(base_url=address, timeout=60, limits=limits) as own:
        if process is not None:
            asyncio.get_running_loop().call_later(seconds / 2, process.send_signal, signal.SIGTERM)
        await asyncio.gather(*(client(own, number) for number in range(clients)))
    return statuses


def check_sigterms(models: list[str], count: int) -> str:
    """End servers under load: what was accepted is answered, the rest refused with 503 or no connection."""
    total: dict[str, int] = {}
    for _ in range(count):
        with serving(models) as (process, address):
            for status, times in asyncio.run(load(address, 3, 16, process)).items():
                total[status] = total.get(status, 0) + times
            assert process.wait(timeout=60) == 0
    assert set(total) <= {"200", "503", "refused"}, total
    return f"{count} ends with exit code 0: {total}"


def resident(process: subprocess.Popen) -> float:
    """Return the resident memory of a process in MB."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


def check_soak(models: list[str], seconds: float) -> str:
    """Keep a server under load; its memory must stay flat."""
    with serving(models) as (process, address):
        asyncio.run(load(address, seconds / 10, 16))
        before = resident(process)
        statuses = asyncio.run(load(address, seconds, 16))
        after = resident(process)
    assert after < before * 1.1, (before, after)
    return f"{seconds:g} s, {statuses}, memory {before:.0f} to {after:.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--disconnects", type=int, default=200)
    parser.add_argument("--sigterms", type=int, default=50)
    parser.add_argument("--soak", type=float, default=600)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = train_models(Path(folder))
        print("disconnects:", check_disconnects(models, options.disconnects), flush=True)
        print("sigterms:", check_sigterms(models, options.sigterms), flush=True)
        print("soak:", check_soak(models, options.soak), flush=True)
        print("schemathesis:", check_schema(models, options.cases), flush=True)


if __name__ == "__main__":
    main()
