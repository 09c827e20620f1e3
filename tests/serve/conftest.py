"""A real server on loopback, in a thread: one for all tests of a module."""

import asyncio
import contextlib
import threading
import time

import httpx
import pytest

import weft
from weft.serve.config import ServerConfig
from weft.serve.models import ServedModel
from weft.serve.run import bind, make_server

TEXTS = ["good fine great", "bad poor awful", "fine great good good", "awful bad bad", "great fine", "poor awful bad"]


@contextlib.contextmanager
def running(pipelines, **settings):
    """Serve pipelines by name; give an httpx client, whose `services` are those of the application."""
    config = ServerConfig(port=0, **settings)
    server = make_server({name: ServedModel(name, pipeline) for name, pipeline in pipelines.items()}, config)
    listening = bind(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    host, port = listening.getsockname()[:2]
    try:
        with httpx.Client(base_url=f"http://{host}:{port}", timeout=30) as client:
            client.services = server.config.app.state.services
            client.port = port
            yield client
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive()


def together(client, path, bodies):
    """Post all bodies at once; return the responses in order."""

    async def ask():
        async with httpx.AsyncClient(base_url=client.base_url, timeout=30) as own:
            return await asyncio.gather(*(own.post(path, json=body) for body in bodies))

    return asyncio.run(ask())


def write_rows(path, rows):
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory):
    """Return a small BERT that tells good words from bad ones."""
    folder = tmp_path_factory.mktemp("classifier")
    rows = [(text, "good" if "good" in text or "great" in text else "bad") for text in TEXTS]
    recipe = {
        "task": {"name": "classify"},
        "data": {"train": write_rows(folder / "rows.tsv", rows), "columns": {"text": 0, "label": 1}},
        "tokenizer": {"name": "words"},
        "model": {"name": "bert", "width": 16, "layers": 2, "heads": 2, "ffn_width": 32, "max_positions": 64},
        "train": {"steps": 20, "batch_tokens": 100, "lr": 0.01},
    }
    return weft.train(recipe, ["data.max_length=40"], folder / "run")


@pytest.fixture(scope="session")
def gpt(tmp_path_factory):
    """Return a small GPT over characters."""
    return language_model(tmp_path_factory.mktemp("gpt"), {"name": "gpt", "layers": 2, "heads": 2, "max_positions": 96})


def language_model(folder, model):
    """Train a language model of characters for some steps."""
    recipe = {
        "task": {"name": "lm", "decode": {"max_length": 24}},
        "data": {"train": write_rows(folder / "texts.tsv", [[text] for text in 4 * TEXTS]), "max_length": 64},
        "tokenizer": {"name": "characters"},
        "model": {"width": 32, **model},
        "train": {"steps": 40, "batch_tokens": 256, "lr": 0.01},
    }
    return weft.train(recipe, (), folder / "run")


@pytest.fixture(scope="module")
def client(reverser, classifier, gpt):
    with running({"reverse": reverser, "classify": classifier, "gpt": gpt}) as client:
        yield client
