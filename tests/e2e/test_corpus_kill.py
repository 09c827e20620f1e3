"""A real `weft data prepare` is killed with SIGKILL, twice, and run again: what was done is kept, nothing is lost."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from weft.config.run import Run
from weft.data.corpus.format import open_split
from weft.tasks.corpus.build import prepare

RECIPE = {
    "task": {"name": "lm"},
    "data": {"train": "text.txt"},
    "tokenizer": {"name": "bytes"},  # byte b is b + 2, and what begins a text is 0: known without weft
    "model": {"name": "rnn", "width": 8},
    "train": {"steps": 1},
}


def until(true, seconds=60.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)


def started(folder):
    command = [sys.executable, "-m", "weft", "data", "prepare", "recipe.yaml", "--out", "corpus", "--workers", "2"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def whole_parts(folder):
    found = (folder / "corpus" / "parts" / "train").glob("[0-9]*.json")
    return {path.name: path.stat().st_ino for path in found}


def workers_of(process):
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"  # none waits for an orphan
    except FileNotFoundError:
        return True


def test_two_kills_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    words = ["weft", "warp", "été", "loom", "東京", "the", "of"]
    lines = [" ".join(rng.choices(words, k=400)) for _ in range(2600)]
    Path("text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    Path("recipe.yaml").write_text(json.dumps(RECIPE))
    kept = {}
    for parts in (1, 3):
        process = started(tmp_path)
        until(lambda process=process, parts=parts: len(whole_parts(tmp_path)) >= parts or process.poll() is not None)
        assert process.poll() is None, process.communicate()[0]
        workers = workers_of(process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        until(lambda workers=workers: all(map(gone, workers)), 5)  # they do not go on alone
        assert len(workers) == 2
        now = whole_parts(tmp_path)
        assert now.items() >= kept.items()
        kept = now
    assert not Path("corpus/train").exists()
    made = []
    prepare(Run.parse(RECIPE), Path("corpus"), workers=2, report=made.append)
    assert len(made) - 1 < made[0].total // (1 << 20)  # parts that were left to make
    assert made[0].done > 2 << 20  # three were there
    found = open_split(Path("corpus"), "train")
    want = b"".join(b"\xfe" + line.encode() for line in lines)  # 0 - 2: no byte of UTF-8
    assert np.array_equal(found.ids, np.frombuffer(want, np.uint8).astype(np.uint16) + 2 & 0xFF)
    assert found.bytes.tolist() == [len(line.encode()) for line in lines]
    assert not Path("corpus/parts").exists()
