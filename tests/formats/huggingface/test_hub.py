"""Models by name: an existing folder, a name on the hub from its cache, and the errors where both are missing."""

import os
import subprocess
import sys
import time

import pytest
from huggingface_hub import constants
from tests.bert_folders import make

import weft
from weft.conversion.convert import convert
from weft.errors import CheckpointError
from weft.formats.huggingface.hub import HUB_ID, find_model

COMMIT = "0" * 40


def cached(home, name, files=("config.json", "model.safetensors")):
    """Write a cache as huggingface_hub does; return the snapshot's folder."""
    repo = home / "hub" / f"models--{name.replace('/', '--')}"
    folder = repo / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for file in files:
        (folder / file).write_text("{}")
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache of huggingface_hub, and a hub that cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path


def test_a_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert find_model("owner/name") == find_model(tmp_path / "owner" / "name").relative_to(tmp_path)
    assert find_model("owner/typo").name == "typo", "beside a folder that is there: no matter for the hub"
    for path in ("./nowhere", "../nowhere", "/nowhere/it", "a/b/c", "~/x", ".hidden", "x/", "no such"):
        assert str(find_model(path)) == path.rstrip("/").removeprefix("./")
    assert [name for name in ("gpt2", "owner/name-2.5_b") if HUB_ID.fullmatch(name)] == ["gpt2", "owner/name-2.5_b"]


@pytest.mark.parametrize("name", ["owner/tiny", "tiny"])
def test_the_cache_is_read_without_a_network(home, name):
    folder = cached(home, name)
    assert find_model(name) == folder


def test_a_model_by_its_name(home, tmp_path):
    folder = cached(home, "owner/tiny", ())
    make(folder, "bert", "ForSequenceClassification")
    assert weft.load("owner/tiny", device="cpu").run.task.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    convert("owner/tiny", tmp_path / "weft").demand()


@pytest.mark.parametrize("offline", [False, True])
def test_no_cache_and_no_network(home, monkeypatch, offline):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    began = time.monotonic()
    with pytest.raises(
        CheckpointError, match=r"owner/none: does not exist as a folder, is not in the hub's cache \(.*hub\)"
    ) as it:
        weft.load("owner/none")
    assert time.monotonic() - began < 20
    assert "`hf download owner/none`" in str(it.value)
    assert ("HF_HUB_OFFLINE is set" in str(it.value)) == offline


def test_a_cache_without_weights_is_none(home):
    """As left by a program that has downloaded only the tokenizer."""
    cached(home, "owner/part", ("config.json", "tokenizer.json"))
    with pytest.raises(CheckpointError, match="owner/part: no safetensors of it are in the hub's cache, nor on"):
        find_model("owner/part")


def test_by_the_environment(tmp_path):
    """huggingface_hub reads the variable when it is imported, so this needs another process."""
    cached(tmp_path, "owner/tiny")
    code = (
        "from weft.formats.huggingface.hub import find_model; print(find_model('owner/tiny')); find_model('owner/none')"
    )
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": "src", "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert COMMIT in done.stdout
    assert "HF_HUB_OFFLINE is set" in done.stderr
