"""`weft serve` under load, beside its peers: the same weights and texts, load from another process on loopback.

    python3 -m venv .cache/serve && .cache/serve/bin/pip install torch==2.13.0 'infinity-emb[server,torch]==0.0.78'
    python bench/serve.py embed --peers .cache/serve/bin    # requests/s that are held, texts of some 40 characters
    python bench/serve.py mixed --peers .cache/serve/bin    # the same with lengths as real corpora have them
    python bench/serve.py overhead                          # full load beside direct calls of Pipeline.embed
    python bench/serve.py generate                          # tokens/s of 32 clients, beside transformers
    python bench/serve.py overload                          # ten times what can be answered
    python bench/serve.py cuda                              # a model of GPT-2's size on a GPU, 256 clients

The encoder is `sentences-en` (6 layers of 384, the shape of MiniLM-L6), the language model `writer-en` (8 layers of
320); `--model` names others. A peer reads what `weft convert` writes. Requests come at random times (Poisson), have one
text each, and ask for base64, as OpenAI's client does. A latency counts from the time at which a request should have
been sent. A rate is held if the 99th percentile is below `--limit` and every request is answered; it is found by
bisection.
"""

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import get_context
from pathlib import Path

import httpx

from serve_load import Load, closed_loop, http_request, open_loop, quantile_of

SHORT = 100  # characters of a short text, among mixed ones
WEFT = [sys.executable, "-m", "weft"]
DIRECT = """
import json, sys, time, weft
model, requests = weft.load(sys.argv[1], "cpu"), json.load(sys.stdin)
texts = sum(requests, [])
model.embed(texts[:500])
start = time.perf_counter()
model.embed(texts)
middle = time.perf_counter()
for request in requests:
    model.embed(request)
print(middle - start, time.perf_counter() - middle)
"""

Job = tuple[str, int]  # a prompt and how many tokens to generate


def sentences(file: str | None) -> list[str]:
    """Return the lines of a file; by default sentences of a sample that ships."""
    if file is not None:
        return [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = subprocess.check_output([*WEFT, "data", "show", "pydoc", "--rows", "0"], text=True).splitlines()
    parts = {part.strip() for row in rows for part in re.split(r"(?<=[.:]) ", json.loads(row)["text"])}
    return sorted(part for part in parts if len(part) > 8)


def short_texts(pool: Sequence[str], count: int) -> list[str]:
    """Return texts with a median of about 40 characters, none over 100."""
    rng = random.Random(1)
    return [cut(pool, rng, min(round(rng.lognormvariate(3.69, 0.35)), SHORT)) for _ in range(count)]


def mixed_texts(pool: Sequence[str], count: int) -> list[str]:
    """Return texts with a median of about 40 characters, a tenth over 400, up to 4,000."""
    rng = random.Random(1)
    lengths = [
        400 * 10 ** rng.random() if rng.random() < 0.10 else min(rng.lognormvariate(3.58, 0.6), 400)
        for _ in range(count)
    ]
    return [cut(pool, rng, max(round(length), 4)) for length in lengths]


def cut(pool: Sequence[str], rng: random.Random, length: int) -> str:
    """Return a text of about so many characters, of whole words."""
    text = rng.choice(pool)
    while len(text) < length:
        text += " " + rng.choice(pool)
    return text[:length].rsplit(" ", 1)[0]


@contextmanager
def running(command: Sequence[str], port: int | None = None) -> Iterator[int]:
    """Run a server; give its port once it answers. weft says its port on stderr."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    with tempfile.TemporaryFile("w+") as log:
        errors = subprocess.PIPE if port is None else log
        process = subprocess.Popen(command, stdout=log, stderr=errors, text=True, env=environment)
        try:
            if process.stderr is not None:
                line = process.stderr.readline()
                port = int(re.search(r"http://[^:]+:(\d+)", line).group(1))
            deadline = time.monotonic() + 120
            while not answers(port):
                assert process.poll() is None, (log.seek(0), log.read())
                assert time.monotonic() < deadline, command
                time.sleep(0.2)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
            if process.stderr is not None:
                print(process.stderr.read(), end="", file=sys.stderr)
                process.stderr.close()


def answers(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/docs", timeout=2)
    except httpx.HTTPError:
        return False
    return True


def weft_server(model: str, *options: str) -> AbstractContextManager[int]:
    return running([*WEFT, "serve", f"m={model}", "--port", "0", "--queue", "4096", *options])


def embedding_server(name: str, model: str, folder: Path, peers: Path | None) -> AbstractContextManager[int]:
    """Return the context of a server of embeddings: weft, infinity, or sentence-transformers behind FastAPI."""
    if name.startswith("weft"):
        return weft_server(model, "--precision", "int8" if name == "weft-int8" else "fp32")
    assert peers is not None, "--peers names the folder of an interpreter that has the peers"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    if name == "infinity":
        command = [peers / "infinity_emb", "v2", "--model-id", folder, "--served-model-name", "m", "--port", port]
        command += ["--device", "cpu", "--engine", "torch", "--no-bettertransformer", "--dtype", "float32"]
        command += ["--url-prefix", "/v1", "--host", "127.0.0.1", "--no-trust-remote-code", "--log-level", "error"]
    else:
        command = [peers / "python", Path(__file__).with_name("serve_peers.py"), "embed", folder, port]
    return running(list(map(str, command)), port)


class Generator:
    """The load generator, in a process of its own."""

    def __enter__(self) -> "Generator":
        self.pool = ProcessPoolExecutor(1, get_context("spawn"))
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()

    def open_loop(self, port: int, requests: Sequence[bytes], rate: float, seconds: float) -> Load:
        return self.pool.submit(open_loop, port, requests, rate, seconds).result()

    def closed_loop(self, port: int, requests: Sequence[bytes], clients: int, count: int, keep: bool = False) -> Load:
        return self.pool.submit(closed_loop, port, requests, clients, count, keep).result()


def embedding_requests(texts: Sequence[str], size: int = 1, truncate: bool = False) -> list[bytes]:
    """Return requests of OpenAI's route, with so many texts each; only weft has to be asked to truncate."""
    options = {"model": "m", "encoding_format": "base64", **({"truncate": True} if truncate else {})}
    parts = [texts[start : start + size] for start in range(0, len(texts), size)]
    return [http_request("/v1/embeddings", {**options, "input": part}) for part in parts]


def held_rate(
    generator: Generator, port: int, requests: Sequence[bytes], seconds: float, limit: float
) -> tuple[float, Load]:
    """Return the greatest rate that is held, and the load at it."""
    generator.closed_loop(port, requests, 32, 200)  # warm-up
    closed = generator.closed_loop(port, requests, 32, 400)
    low, high, best = 0.0, 1.2 * closed.rate, (0.0, closed)
    for _ in range(7):
        rate = (low + high) / 2
        load = generator.open_loop(port, requests, rate, seconds)
        held = load.latency(0.99) < limit and load.statuses["200"] == load.statuses.total()
        times = f"p50 {1e3 * load.latency(0.5):6.1f} ms  p99 {1e3 * load.latency(0.99):7.1f} ms"
        print(f"    {rate:7.0f}/s  {times}  {dict(+load.statuses)}", flush=True)
        low, high, best = (rate, high, (load.rate, load)) if held else (low, rate, best)
    return best


def bench_embeddings(args: argparse.Namespace) -> None:
    texts = (mixed_texts if args.what == "mixed" else short_texts)(sentences(args.texts), 2000)
    lengths, model = sorted(map(len, texts)), args.model or "sentences-en"
    print(f"median {lengths[1000]} characters, a tenth over {lengths[1800]}, the longest {lengths[-1]}")
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as work, Generator() as generator:
        folder = convert(model, work)
        for _ in range(args.rounds):
            for name in args.sides.split(","):
                print(f"  {name}")
                with embedding_server(name, model, folder, args.peers) as port:
                    requests = embedding_requests(texts, truncate=name.startswith("weft"))
                    rate, load = held_rate(generator, port, requests, args.seconds, args.limit)
                small = load.latency(0.99, lambda kind: len(texts[kind]) <= SHORT)
                print(
                    f"  {name}: {rate:.0f} requests/s held; p99 of texts up to {SHORT} characters {1e3 * small:.1f} ms"
                )
                rates.setdefault(name, []).append(rate)
    first, *others = rates
    for name in others:
        print(f"{first} / {name}: {quantile_of(rates[first], 0.5) / max(quantile_of(rates[name], 0.5), 1e-9):.2f}")


def convert(model: str, work: str) -> Path:
    folder = Path(work) / "model"
    subprocess.check_call([*WEFT, "convert", model, folder], stdout=subprocess.DEVNULL)
    return folder


def bench_overhead(args: argparse.Namespace) -> None:
    """Compare full load with one call for all texts, and with a call for each request, one after the other."""
    texts, model = short_texts(sentences(args.texts), 4096), args.model or "sentences-en"
    for size in (1, 16, 64):
        requests = embedding_requests(texts, size)
        parts = json.dumps([texts[start : start + size] for start in range(0, len(texts), size)])
        for _ in range(args.rounds):
            output = subprocess.check_output([sys.executable, "-c", DIRECT, model], input=parts, text=True)
            at_once, one_by_one = (len(texts) / float(seconds) for seconds in output.split())
            with weft_server(model) as port, Generator() as generator:
                generator.closed_loop(port, requests, 64, len(requests))
                load = generator.closed_loop(port, requests, 64, 2 * len(requests))
            served = 2 * len(texts) / load.seconds
            direct = f"{at_once:.0f} texts/s in one call, {one_by_one:.0f} with a call for each request"
            ratios = f"{1 - served / at_once:.1%} less than one call, {served / one_by_one:.2f} x the calls"
            print(f"{size} texts a request: {direct}; served {served:.0f}: {ratios}", flush=True)


def bench_generate(args: argparse.Namespace) -> None:
    rng, pool, model = random.Random(1), sentences(args.texts), args.model or "writer-en"
    jobs = [(cut(pool, rng, rng.randint(20, 160)), rng.randint(16, 128)) for _ in range(args.count)]
    with tempfile.TemporaryDirectory() as work, Generator() as generator:
        script = [sys.executable, Path(__file__).with_name("serve_peers.py"), "generate", convert(model, work)]
        peer = json.loads(subprocess.check_output(script, input=json.dumps(jobs), text=True))
        rate = peer["tokens"] / peer["seconds"]
        print(f"transformers, one at a time: {peer['tokens']} tokens, {rate:.0f}/s", flush=True)
        for precision in ("fp32", "int8"):
            with weft_server(model, "--precision", precision, "--running", "32") as port:
                for streams in (False, True):
                    line = served_generation(generator, port, jobs, 32, streams, rate)
                    print(f"weft {precision}, 32 clients, {line}", flush=True)


def served_generation(
    generator: Generator, port: int, jobs: Sequence[Job], clients: int, streams: bool, peer: float
) -> str:
    """Return the rate of tokens of so many clients, and the times to the first token and between tokens."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    body = {"model": "m", "temperature": 0, **options}
    requests = [http_request("/v1/completions", {**body, "prompt": text, "max_tokens": n}) for text, n in jobs]
    generator.closed_loop(port, requests, clients, clients)
    load = generator.closed_loop(port, requests, clients, len(requests), keep=True)
    counts = [int(n) for answer in load.bodies for n in re.findall(rb'"completion_tokens": ?(\d+)', answer)]
    rate = sum(counts) / load.seconds
    kind = "streams" if streams else "whole answers"
    line = f"{kind}: {sum(counts)} tokens, {rate:.0f}/s, {rate / peer:.2f} of the peer"
    if streams:
        parts = {"first token": load.first, "between tokens": load.gaps}
        times = [
            f"{name} p50 {1e3 * quantile_of(values, 0.5):.1f} ms, p99 {1e3 * quantile_of(values, 0.99):.1f} ms"
            for name, values in parts.items()
        ]
        line = "; ".join([line, *times])
    return f"{line} {dict(load.statuses)}"


def bench_overload(args: argparse.Namespace) -> None:
    requests = embedding_requests(short_texts(sentences(args.texts), 2000))
    with (
        running([*WEFT, "serve", f"m={args.model or 'sentences-en'}", "--port", "0", "--queue", "16"]) as port,
        Generator() as generator,
    ):
        full = generator.closed_loop(port, requests, 16, 4000).rate
        calm = generator.open_loop(port, requests, 0.5 * full, 20)
        load = generator.open_loop(port, requests, 10 * full, args.seconds)
    print(f"full load {full:.0f}/s; at half of it p99 {1e3 * calm.latency(0.99):.0f} ms")
    print(f"the load itself takes {load.cpu_seconds / load.seconds:.2f} of the cores")
    ratio = load.latency(0.99) / calm.latency(0.99)
    times = f"p50 {1e3 * load.latency(0.5):.0f} ms, p99 {1e3 * load.latency(0.99):.0f} ms ({ratio:.1f} x)"
    print(f"10 x for {args.seconds:g} s: {dict(load.statuses)}, {load.rate:.0f}/s answered, {times}")


def bench_cuda(args: argparse.Namespace) -> None:
    """Serve a GPT of GPT-2's size in bf16, beside one search for a whole batch of equal prompts and lengths."""
    from serve_gpt2 import full_batch_rate, write_gpt2

    rng, clients = random.Random(1), 256
    letters = "abcdefghijklmnopqrstuvwxyz      "
    prompts = ["".join(rng.choices(letters, k=rng.randint(8, 256))) for _ in range(args.count)]
    jobs = [(prompt, rng.randint(32, 512)) for prompt in prompts]
    with tempfile.TemporaryDirectory() as work:
        folder = write_gpt2(Path(work) / "gpt2")
        peer = full_batch_rate(folder, clients, 256)
        print(f"one search for {clients} prompts, 256 tokens each: {peer:.0f} tokens/s", flush=True)
        options = ["--precision", "bf16", "--device", "cuda", "--running", str(clients)]
        with weft_server(str(folder), *options) as port, Generator() as generator:
            for streams in (False, True):
                print(
                    f"weft, {clients} clients, {served_generation(generator, port, jobs, clients, streams, peer)}",
                    flush=True,
                )


BENCHES = {
    "embed": bench_embeddings,
    "mixed": bench_embeddings,
    "overhead": bench_overhead,
    "generate": bench_generate,
    "overload": bench_overload,
    "cuda": bench_cuda,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=BENCHES)
    parser.add_argument("--peers", type=Path, help="the folder of the programs of an interpreter that has infinity-emb")
    parser.add_argument("--sides", default="weft,infinity,sentence-transformers")
    parser.add_argument("--model", help="the model instead of the one that ships")
    parser.add_argument("--texts", help="a file of sentences; by default those of the sample pydoc")
    parser.add_argument("--seconds", type=float, default=8, help="of a trial, or of the overload")
    parser.add_argument("--limit", type=float, default=0.1, help="seconds that the 99th percentile may take")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--count", type=int, default=128, help="texts to generate")
    parsed = parser.parse_args()
    BENCHES[parsed.what](parsed)
