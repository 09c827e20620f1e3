"""Work on a Ray cluster of two workers on this machine: the same as without it; deaths, errors and stops included."""

import json
import os
import signal
import sys
from functools import partial
from importlib.util import find_spec
from itertools import islice

import numpy as np
import pytest

import weft
from weft.cli import main as cli
from weft.cli import ray_rows
from weft.comparison.run import compare
from weft.config.run import Run
from weft.data.corpus.format import read_manifest
from weft.data.readers.lines import BadRow
from weft.data.readers.records import Record
from weft.data.samples.datasets import read_sample
from weft.errors import ConfigError, DataError
from weft.ray_engine import ATTEMPTS, call_in_tasks, cluster, is_ray, work_in_parts
from weft.tasks.corpus.build import prepare

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'weft[ray]'")
PART_ROWS = 16


@pytest.fixture(scope="module", autouse=True)
def two_workers():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        with cluster() as ray:
            assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}  # listens on loopback alone
            yield ray


@pytest.fixture
def run_weft(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, words)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return code, capfd.readouterr().err

    return run


@pytest.fixture
def questions(tmp_path):
    rows = [
        {"n": number, "text": row["text"]} for number, (_, row) in enumerate(islice(read_sample("dates", "train"), 40))
    ]
    rows[20] = {"n": 20, "text": None}
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parts_of(numbers, error=None):
    def read():
        yield from ((number, number) for number in numbers)
        if error:
            raise error

    return read


def worker_that(act):
    """Return what makes a worker that doubles a number, after `act`."""

    def make():
        def work(part):
            act(part)
            return {"twice": str(2 * part).encode()}

        return work

    return make


def made(read, make):
    return {number: int(contents["twice"]) for number, contents in work_in_parts(read, make, use_gpus=False)}


def test_a_part_whose_worker_is_killed_is_worked_on_again(tmp_path):
    mark = tmp_path / "killed"

    def kill_once(part):
        if part == 3 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    assert made(parts_of(range(8)), worker_that(kill_once)) == {number: 2 * number for number in range(8)}
    assert mark.exists()


def test_a_part_that_kills_every_worker_is_an_error():
    with pytest.raises(DataError, match=f"killed {ATTEMPTS} times at the same part"):
        made(parts_of([1]), worker_that(lambda part: os.kill(os.getpid(), signal.SIGKILL)))


def test_errors_of_the_reader_and_of_a_worker_are_raised_here():
    with pytest.raises(BadRow, match="file:3: no text"):
        made(parts_of([1], BadRow("file:3: no text")), worker_that(lambda part: None))

    def refuse(part):
        raise ConfigError("beam: must be 1")

    with pytest.raises(ConfigError, match="beam: must be 1"):
        made(parts_of([1]), worker_that(refuse))


def test_an_engine_that_is_none_is_refused():
    assert (is_ray("local"), is_ray("ray")) == (False, True)
    with pytest.raises(ConfigError, match="did you mean 'ray'"):
        is_ray("rays")


def test_predict_goes_on_after_a_stop_and_writes_the_same_file(run_weft, questions, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_rows, "MAX_CHUNK", PART_ROWS)
    made_parts = []

    def watched(*words):
        for number, contents in work_in_parts(*words):
            made_parts.append(number)
            yield number, contents

    monkeypatch.setattr(ray_rows, "work_in_parts", watched)
    out, parts = tmp_path / "ray.jsonl", tmp_path / "ray.jsonl.parts"
    on_ray = ("predict", "dates", "--file", questions.as_uri(), "--out", out, "--engine", "ray", "--quiet")
    code, err = run_weft(*on_ray, "--strict")
    assert (code, sorted(made_parts)) == (2, [0, 1, 2])
    assert "questions.jsonl:21" in err
    (parts / "00001.npz").unlink()
    code, err = run_weft(*on_ray, "--set", "beam=2")
    assert (code, made_parts[3:]) == (2, [])
    assert "was begun with another options: {}, not {'beam': 2}" in err
    code, err = run_weft(*on_ray)
    assert (code, made_parts[3:], parts.exists()) == (0, [1], False)
    run_weft("predict", "dates", "--file", questions.as_uri(), "--out", tmp_path / "local.jsonl")
    assert out.read_bytes() == (tmp_path / "local.jsonl").read_bytes()
    assert len(out.read_text().splitlines()) == 40


def test_embed_writes_the_same_vectors(run_weft, questions, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_rows, "CHUNK_SIZE", PART_ROWS)
    arrays = []
    for engine in ("local", "ray"):
        out = tmp_path / f"{engine}.npz"
        words = ("--file", questions.name, "--out", out, "--engine", engine, "--pool", "tokens")
        code, err = run_weft("embed", "sentences-en", *words)
        assert code == 0
        assert "1 row of 40 could not be embedded; the first: questions.jsonl:21: must be a text" in err
        arrays.append(np.load(out))
    assert np.array_equal(arrays[0]["starts"], arrays[1]["starts"])
    np.testing.assert_allclose(
        arrays[1]["vectors"], arrays[0]["vectors"], atol=1e-5
    )  # parts are batched in another way


def test_a_part_holds_a_vector_for_each_row(tmp_path):
    def load():
        model = weft.load("sentences-en", "cpu")
        return model, model.embedder(on_error="nan")

    texts = ["a text", DataError("bad"), "more of it"]
    rows = [Record(f"file:{number}", {}, text) for number, text in enumerate(texts)]
    results, arrays = ray_rows.EmbedWorker(load, as_lines=False)()((0, rows))
    assert results == {"messages": [None, "file:1: bad", None], "cut": 0}
    np.testing.assert_allclose(arrays["vectors"][[0, 2]], load()[0].embed(["a text", "more of it"]), atol=1e-5)
    assert np.isnan(arrays["vectors"][1]).all()
    lines, _ = ray_rows.EmbedWorker(load, as_lines=True)()((0, rows))
    assert [list(json.loads(line)) for line in lines["lines"]] == [["text", "vector"], ["error"], ["text", "vector"]]


def test_what_is_neither_a_file_in_nor_a_file_out_is_refused(run_weft, questions):
    for words in (("predict", "dates", "a text", "--out", "a.jsonl"), ("embed", "encoder-en", "--file", questions)):
        code, err = run_weft(*words, "--engine", "ray")
        assert (code, "give --file and --out" in err) == (2, True)


def test_a_corpus_is_prepared_to_the_same_bytes(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"a thread {number} runs through it\n" for number in range(900)))
    recipe = {
        "task": {"name": "lm"},
        "data": {"train": text.as_uri()},
        "tokenizer": {"name": "words"},
        "model": {"name": "rnn", "width": 8},
        "train": {"steps": 1},
    }
    stages = []
    prepare(Run.parse(recipe), tmp_path / "ray", size=8000, engine="ray", report=stages.append)
    prepare(Run.parse(recipe), tmp_path / "local", size=8000, workers=1)
    assert len(stages) > 3
    assert read_manifest(tmp_path / "ray") == read_manifest(tmp_path / "local")
    for file in (tmp_path / "local" / "train").iterdir():
        assert (tmp_path / "ray" / "train" / file.name).read_bytes() == file.read_bytes()


def test_a_comparison_on_ray_has_the_results_of_one_without(recipe_file, tmp_path):
    words = {"recipes": recipe_file, "budget": "3steps", "baselines": False}
    results = [compare(**words, out=tmp_path / engine, engine=engine).results for engine in ("local", "ray")]
    metrics = [[training.metrics for entry in result.entries for training in entry.runs] for result in results]
    assert metrics[0] == metrics[1] != []


def test_calls_are_yielded_with_their_arguments():
    assert dict(call_in_tasks(partial(pow, 2), range(4), use_gpus=True)) == {0: 1, 1: 2, 2: 4, 3: 8}
