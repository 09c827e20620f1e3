"""What several tests stand on: a small recipe that trains in a second, and one thread a process.

What imports PyTorch is imported in the fixtures: pytest-xdist's own process reads this file, too, and runs no test.
"""

import gc
import json
import os
import random

os.environ["OMP_NUM_THREADS"] = "1"  # two test processes, and those that they start, share two cores
os.environ["HF_HUB_OFFLINE"] = "1"  # a name that is no folder is not looked for on the hub

import pytest
from hypothesis import settings

import weft
from tests.browser import CHROMIUM, Browser, Tab

settings.register_profile("suite", deadline=None)  # no test asserts a time
settings.load_profile("suite")


# What takes long comes first, so that at the end no process waits for the other.
LONG = ("tests/e2e/", "tests/test_docs.py", "tests/training/test_distributed.py", "tests/cli/")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection_finish():
    """Keep the modules and the tests, which stay to the end, out of every later collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def quick_disk():
    """Ask for flushes but do not wait for them: even the kill of a process loses nothing that the kernel has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_tensorboard():
    """Write no event files; the tests of them take what is returned."""
    from weft.training.reporting import TensorBoard

    with pytest.MonkeyPatch.context() as patch:
        installed = TensorBoard.installed
        patch.setattr(TensorBoard, "installed", staticmethod(lambda: False))
        yield installed


def reversed_pairs(count=60, length=5, seed=0):
    rng = random.Random(seed)
    words = {"".join(rng.choices("abcdef", k=length)) for _ in range(count)}
    return [(word, word[::-1]) for word in sorted(words)]


def write_pairs(path):
    path.write_text("".join(f"{text}\t{target}\n" for text, target in reversed_pairs()), encoding="utf-8")
    return path


def recipe_for(pairs_file):
    """Return a whole recipe as plain data: reversing words of five letters."""
    return {
        "task": {"name": "translate"},
        "data": {"train": str(pairs_file), "valid": str(pairs_file)},
        "tokenizer": {"name": "characters"},
        "model": {"name": "seq2seq", "width": 16, "dropout": 0.1},
        "train": {"steps": 12, "batch_tokens": 200, "report_every": 2, "lr": 0.01},
    }


@pytest.fixture
def wide_bound(monkeypatch):
    """Let check_model allow a thousand times what it does: a mistake is still beyond that."""
    from weft.testing import properties

    monkeypatch.setattr(properties, "TOLERANCE", 1e3 * properties.TOLERANCE)


@pytest.fixture
def narrow_bound(monkeypatch):
    """Let check_model allow a thousandth of what it does: rounding is still within that."""
    from weft.testing import properties

    monkeypatch.setattr(properties, "TOLERANCE", 1e-3 * properties.TOLERANCE)


@pytest.fixture
def pairs_file(tmp_path):
    return write_pairs(tmp_path / "pairs.tsv")


@pytest.fixture
def recipe(pairs_file):
    return recipe_for(pairs_file)


@pytest.fixture
def recipe_file(tmp_path, recipe):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    return path


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """Return the directory of a run that has learnt to reverse the words of `reversed_pairs`; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    changes = ["train.steps=300", "train.report_every=100", "model.width=32", "model.dropout=0"]
    weft.train(recipe_for(write_pairs(folder / "pairs.tsv")), changes, folder / "run")
    return folder / "run"


@pytest.fixture(scope="session")
def reverser(trained_run):
    """Return the model of `trained_run`."""
    return weft.load(trained_run, device="cpu")


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    running = Browser(tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


@pytest.fixture
def tab(browser):
    """Return a fresh tab."""
    made = Tab(browser)
    yield made
    made.close()
