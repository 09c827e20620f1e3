"""Files that are read whole: a device, a pipe or too large a file is an error at once, not a wait or all memory."""

import os
from pathlib import Path

import pytest

import weft
from weft.checkpoint.manifest import verify_checkpoint
from weft.config import small_files
from weft.config.small_files import read_small_file, read_small_text
from weft.formats.huggingface.tokenizer import read_json


def test_a_plain_file_is_read(tmp_path):
    path = tmp_path / "file"
    path.write_text("été")
    (tmp_path / "link").symlink_to(path)
    assert read_small_text(path) == read_small_text(tmp_path / "link") == "été"


def test_text_that_is_not_utf8_is_a_value_error(tmp_path):
    (tmp_path / "file").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        read_small_text(tmp_path / "file")


def device(path):
    path.symlink_to("/dev/zero")


REPLACEMENTS = {
    "device": (device, "not a plain file"),
    "pipe": (os.mkfifo, "not a plain file"),
    "directory": (Path.mkdir, "Is a directory"),
}


@pytest.mark.parametrize(("replace", "reason"), REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_what_is_no_plain_file_is_refused(tmp_path, replace, reason):
    replace(tmp_path / "config.json")
    with pytest.raises(OSError, match=reason):
        read_small_file(tmp_path / "config.json")
    with pytest.raises(weft.CheckpointError, match=f"config.json: cannot be read.*{reason}"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(("replace", "reason"), REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_a_manifest_that_is_no_plain_file_is_refused(tmp_path, replace, reason):
    replace(tmp_path / "manifest.json")
    with pytest.raises(weft.CheckpointError, match=f"manifest.json: cannot be read: {reason}"):
        verify_checkpoint(tmp_path)


def test_a_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(small_files, "MAX_BYTES", 1 << 20)
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 20)
    assert len(read_small_file(tmp_path / "file")) == 1 << 20
    with (tmp_path / "file").open("ab") as file:
        file.write(b"x")
    with pytest.raises(OSError, match="has more than 1 MB"):
        read_small_file(tmp_path / "file")


def test_no_descriptor_is_left_open(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("text")
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        read_small_file(tmp_path / "file")
        with pytest.raises(OSError, match="not a plain file"):
            read_small_file(tmp_path / "pipe")
    assert len([*Path("/proc/self/fd").iterdir()]) == before


@pytest.mark.parametrize("load", [weft.load, weft.vectors.load])
def test_a_name_that_is_too_long_is_an_error(load):
    with pytest.raises(weft.WeftError):
        load("x" * 300)
