"""Several recipes at one budget: one table, one page; stopped and gone on with; one that fails."""

import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import recipe_for, write_pairs

import weft
from weft.comparison import devices, run, worker
from weft.comparison.run import compare, read_comparison
from weft.config.json import write_json
from weft.training.reporting import Step, read_metrics


def write(folder, name, recipe, **sections):
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({**recipe, **sections}))
    return path


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Compare two models once, for all that only look at the result."""
    folder = tmp_path_factory.mktemp("compared")
    recipe = recipe_for(write_pairs(folder / "pairs.tsv"))
    plain = write(folder, "fixed", recipe, model={"name": "seq2seq", "width": 16, "attention": "none"})
    heard = {}

    class Hear:
        def __init__(self, name):
            self.records = heard.setdefault(name, [])

        def __call__(self, record):
            self.records.append(record)

        def close(self):
            pass

    columns = "data.columns={text: 0, target: 1}"  # what is no key of a set must do too
    comparison = compare([plain, write(folder, "attends", recipe)], "8", folder / "out", [columns], Hear)
    return comparison, folder / "out", heard


def test_the_results_have_quality_size_time_speed_and_memory(compared):
    comparison, out, _ = compared
    results = comparison.results
    assert (results.task, results.metric, results.higher_is_better) == ("translate", "exact_match", True)
    assert (results.budget, results.seeds, results.split) == ("8", [1], "valid")
    assert results.metric_names == ["exact_match", "bleu"]
    assert [entry.name for entry in results.entries] == ["fixed", "attends"]
    for entry in results.entries:
        pipeline, (one,) = weft.load(out / entry.name), entry.runs
        assert entry.kind == "trained"
        assert entry.parameters == pipeline.parameters
        metrics = pipeline.evaluate()
        assert one.metrics == pytest.approx({name: metrics[name] for name in ("exact_match", "bleu")})
        rows = read_metrics(out / entry.name / "metrics.jsonl")
        assert [point.step for point in one.curve] == [row["step"] for row in rows] == [2, 4, 6, 8]
        assert (one.steps, one.flops, one.seconds) == (8, rows[-1]["flops"], rows[-1]["elapsed"])
        assert 0 < entry.latency_p50 <= entry.latency_p99
        assert entry.throughput > 0
        assert one.peak_memory > 1e7
        best = (out / entry.name / "best").resolve()
        files = [path for path in best.rglob("*") if path.is_file() and "state" not in path.parts]
        assert entry.disk_bytes == sum(path.stat().st_size for path in files)
    assert results.entries[0].settings["model.attention"] == "none"
    assert results.num_examples == sum(group.examples for group in results.entries[0].lengths) > 40
    assert comparison.trained_for == "8 steps"


def test_each_is_a_run_of_its_own_and_is_reported(compared):
    comparison, out, heard = compared
    for entry in comparison.results.entries:
        assert [record.step for record in heard[entry.name] if isinstance(record, Step)] == [2, 4, 6, 8]
        assert weft.load(out / entry.name).run.train.steps == 8


def test_answers_to_the_same_test_examples_stand_side_by_side(compared):
    comparison, out, _ = compared
    pipelines = {name: weft.load(out / name) for name in ("fixed", "attends")}
    shown = comparison.results.examples
    assert len(shown) > 10
    for example in shown[:5]:
        assert example.expected == example.text[::-1]
        for name, pipeline in pipelines.items():
            (answer,) = pipeline(example.text)
            assert example.answers[name].text == answer["text"]
            assert example.answers[name].correct == (answer["text"] == example.expected)
    (attention,) = comparison.results.attention
    assert attention.entry == "attends", "a fixed vector has no alignment"
    assert all("attends: cross" in figure for figure in attention.figures), "the page says whose it is"


def test_it_is_a_table_for_pandas_and_for_a_notebook(compared, monkeypatch):
    comparison, _, _ = compared
    headers, rows = comparison.table()
    assert headers[:2] == ["entry", "model"]
    assert {row[0] for row in rows} == {"fixed", "attends"}
    frame = comparison.to_dataframe()
    assert set(frame.index) == {"fixed", "attends"}
    assert frame.loc["fixed", "parameters"] == comparison.results.entries[0].parameters
    assert frame["exact_match"].is_monotonic_decreasing
    assert "<td>attends</td>" in comparison._repr_html_()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(weft.ConfigError, match="needs pandas, which is not installed: pip install pandas"):
        comparison.to_dataframe()


def test_the_report_is_written_again_without_a_model(compared):
    comparison, out, _ = compared
    page = (out / "report.html").read_text(encoding="utf-8")
    (out / "report.html").unlink()
    again = read_comparison(out)
    assert again.results == comparison.results
    assert (out / "report.html").read_text(encoding="utf-8") == page
    with pytest.raises(weft.CheckpointError, match="no comparison was finished; go on with --resume"):
        read_comparison(out / "fixed")
    broken = out.parent / "broken"
    broken.mkdir()
    (broken / "comparison.json").write_text("{}")
    with pytest.raises(weft.CheckpointError, match="cannot be read"):
        read_comparison(broken)


TIMES = {"seconds", "tokens_per_s", "mfu", "peak_memory", "latency_p50", "latency_p99", "throughput", "curve"}


def without_times(results):
    """Give results as plain data without times, and what differs with them: figures of attention have random ids."""

    def clean(value):
        if isinstance(value, dict):
            return {key: clean(part) for key, part in value.items() if key not in TIMES}
        return [clean(part) for part in value] if isinstance(value, list) else value

    plain = clean(json.loads(results.model_dump_json()))
    return {key: value for key, value in plain.items() if key != "attention"}


# Compares in a child, and kills it a moment after a file has come into being, again and again; imports once.
KILLED = """
import os, signal, sys, time
from pathlib import Path
from weft.comparison.run import compare

recipes, out, moments = sys.argv[1].split(","), Path(sys.argv[2]), sys.argv[3:]
for moment in moments:
    name, delay = moment.split(",")
    if not (child := os.fork()):
        compare(recipes, "8", out, ["data.columns={text: 0, target: 1}"], resume=(out / "plan.json").exists())
        os._exit(0)
    while not (out / name).exists() and not os.waitpid(child, os.WNOHANG)[0]:
        time.sleep(0.002)
    time.sleep(float(delay))
    os.kill(child, signal.SIGKILL)
    print(os.waitpid(child, 0)[1])
"""


def test_a_comparison_that_is_killed_goes_on_and_finds_the_same(compared, tmp_path):
    comparison, _, _ = compared
    folder, out, rng = comparison.folder.parent, tmp_path / "out", random.Random()
    steps = ["plan.json", "fixed/last", "fixed/metrics.jsonl", "fixed/best", "fixed/evaluation.json", "attends/best"]
    chosen = sorted(rng.sample(steps, 3), key=steps.index)
    moments = [f"{name},{rng.random() * 0.1:.4f}" for name in chosen]
    recipes = f"{folder / 'fixed.yaml'},{folder / 'attends.yaml'}"
    words = [sys.executable, "-c", KILLED, recipes, str(out), *moments]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.split() == [str(int(signal.SIGKILL))] * len(moments), (moments, done.stderr)
    resumed = compare(out=out, resume=True)
    assert without_times(resumed.results) == without_times(comparison.results), moments
    assert compare(out=out, resume=True).results == resumed.results, "nothing is trained or measured again"


def test_what_is_gone_on_with_must_be_the_same(compared, tmp_path):
    _, out, _ = compared
    folder = out.parent
    with pytest.raises(weft.CheckpointError, match="holds a comparison already; go on by --resume"):
        compare([folder / "fixed.yaml"], "8", out)
    with pytest.raises(weft.CheckpointError, match="has no such 'fixed', or with other settings"):
        compare([folder / "fixed.yaml"], "8", out, ["model.width=20"], resume=True)
    with pytest.raises(weft.ConfigError, match="--seeds: must be from 1 to 100, but is 0"):
        compare([folder / "fixed.yaml"], "8", out.parent / "none", seeds=0)
    with pytest.raises(weft.CheckpointError, match="--budget: the comparison in .* has 8, but got 9"):
        compare(budget="9", out=out, resume=True)
    with pytest.raises(weft.ConfigError, match="--set: changes recipes, and with --resume they are those of"):
        compare(out=out, overrides=["model.width=20"], resume=True)
    with pytest.raises(
        weft.CheckpointError, match=r"holds no comparison: plan.json is not there; begin one without --resume and --add"
    ):
        compare(out=tmp_path, resume=True)
    (tmp_path / "plan.json").write_text('{"budget": "8"}')
    with pytest.raises(weft.CheckpointError, match=r"plan.json: cannot be read"):
        compare(out=tmp_path, resume=True)


def test_a_recipe_can_be_added_and_one_that_fails_has_a_row_that_says_so(recipe, tmp_path):
    out = tmp_path / "out"
    first = compare([write(tmp_path, "first", recipe)], "2", out, seeds=2)
    assert [one.seed for one in first.results.entries[0].runs] == [1, 2]
    assert weft.load(out / "first" / "seed-2").run.train.seed == 2
    hot = write(tmp_path, "hot", recipe, train={**recipe["train"], "lr": 1e30, "clip": None, "bad_steps": 1})
    other = write(tmp_path, "other", recipe, model={"name": "seq2seq", "width": 8})
    both = compare(out=out, add=[hot, other]).results
    assert [entry.name for entry in both.entries] == ["first", "hot", "other"]
    assert both.entries[0].runs == first.results.entries[0].runs, "it was not trained again"
    assert "NaN" in both.entries[1].failure
    assert both.entries[1].runs == []
    assert both.entries[2].failure is None
    assert len(both.entries[2].runs) == 2
    assert sum(entry.versus_best is not None for entry in both.entries) == 1
    with pytest.raises(weft.ConfigError, match="different names, but got first, hot, other, other"):
        compare(out=out, add=other)
    with pytest.raises(weft.TrainingError, match="no entry has a result; hot failed: "):
        compare(hot, "2", tmp_path / "alone")


def test_what_is_out_of_memory_is_a_failure_and_what_is_a_mistake_of_weft_is_not(recipe, tmp_path, monkeypatch):
    def out_of_memory(*_):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    train = run.train
    monkeypatch.setattr(run, "train", lambda r, *rest: out_of_memory() if r.model.width == 8 else train(r, *rest))
    large = write(tmp_path, "large", recipe, model={"name": "seq2seq", "width": 8})
    result = compare([large, write(tmp_path, "small", recipe)], "2", tmp_path / "out").results
    assert [entry.failure for entry in result.entries] == [
        "out of memory: CUDA out of memory. Tried to allocate 2 GiB",
        None,
    ]

    def mistake(*_):
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(run, "train", mistake)
    with pytest.raises(RuntimeError, match="shapes"):
        compare(large, "2", tmp_path / "other")


def test_several_devices_share_the_trainings(recipe, tmp_path, monkeypatch):
    seen = []

    def in_this_process(words, env, stderr, text):
        assert words[1:3] == ["-m", "weft.comparison.worker"]
        seen.append(env["CUDA_VISIBLE_DEVICES"])
        reason = worker.main(Path(words[3]), words[4], int(words[5]))
        return subprocess.CompletedProcess(words, 1 if reason else 0, stderr=reason or "")

    monkeypatch.setattr(run, "visible_devices", lambda: ["3", "5"])
    monkeypatch.setattr(devices.subprocess, "run", in_this_process)
    hot = write(tmp_path, "hot", recipe, train={**recipe["train"], "lr": 1e30, "clip": None, "bad_steps": 1})
    result = compare([write(tmp_path, "a", recipe), hot], "2", tmp_path / "out").results
    assert result.entries[0].runs[0].steps == 2
    assert "NaN" in result.entries[1].failure, "it is what the process said last"
    assert set(seen) <= {"3", "5"}
    assert len(seen) == 2


def test_a_process_that_is_killed_is_a_failure(recipe, tmp_path, monkeypatch):
    killed = subprocess.CompletedProcess([], -signal.SIGKILL, stderr="")
    monkeypatch.setattr(run, "visible_devices", lambda: ["0", "1"])
    monkeypatch.setattr(devices.subprocess, "run", lambda *words, **options: killed)
    with pytest.raises(weft.TrainingError, match="its process ended by signal 9: out of memory?"):
        compare([write(tmp_path, "a", recipe), write(tmp_path, "b", recipe)], "2", tmp_path / "out")


def test_the_devices_are_those_that_may_be_seen(monkeypatch):
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.visible_devices() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert devices.visible_devices() == ["3", "5"]
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: False)
    assert devices.visible_devices() == []


def test_labels_are_compared_beside_baselines(tmp_path):
    rows = [("a b", "no_1")] * 8 + [("c d", "yes_1")] * 8 + [("a b", "yes_1")]
    (tmp_path / "rows.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    recipe = {
        "task": {"name": "classify"},
        "data": {"train": str(tmp_path / "rows.tsv"), "valid": str(tmp_path / "rows.tsv")},
        "tokenizer": {"name": "words"},
        "model": {"name": "cnn", "width": 12},
        "train": {"steps": 4, "batch_tokens": 64, "lr": 0.05},
    }
    results = compare(write(tmp_path, "cnn", recipe), "40", tmp_path / "out").results
    assert [entry.kind for entry in results.entries] == ["baseline", "baseline", "trained"]
    for entry in results.entries:
        assert entry.classes["no_1"] == (pytest.approx(16 / 17), 8)
        assert entry.classes["yes_1"][1] == 9
    assert results.positive_label == "yes_1"
    assert [entry.versus_best.difference for entry in results.entries if entry.versus_best] == [0, 0]
    assert all(entry.versus_best.p_value == 1 for entry in results.entries if entry.versus_best)
    assert results.metric_names == ["accuracy", "macro_f1", "matthews", "f1"]


def test_language_models_with_different_tokenizers_are_compared_in_bits(tmp_path):
    texts = [
        f"the {noun} is {adjective}." for noun in ("cat", "dog", "sun", "sea") for adjective in ("red", "old", "wet")
    ]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    recipe = {
        "task": {"name": "lm"},
        "data": {"train": str(tmp_path / "texts.txt"), "valid": str(tmp_path / "texts.txt"), "truncation": "window"},
        "tokenizer": {"name": "bytes"},
        "model": {"name": "rnn", "width": 8},
        "train": {"steps": 4, "batch_tokens": 64},
        "compare": {
            "ngram": {
                "tokenizer": {"name": "characters"},
                "model": {"name": "ngram", "order": 3},
                "train": {"steps": 1},
            },
            "rnn": {},
            "gpt": {"model": {"name": "gpt", "width": 8, "heads": 2, "layers": 1}},
        },
    }
    results = compare(write(tmp_path, "several", recipe), "3", tmp_path / "out").results
    assert results.metric == "bits_per_byte"
    assert [entry.kind for entry in results.entries] == ["fitted", "trained", "trained"]
    for entry in results.entries:
        metrics = weft.load(tmp_path / "out" / entry.name).evaluate()
        assert entry.runs[0].metrics == pytest.approx({name: metrics[name] for name in ("perplexity", "bits_per_byte")})
    best = min(results.entries, key=lambda entry: entry.runs[0].metrics["bits_per_byte"])
    assert best.versus_best is None
    assert sum(entry.versus_best is not None for entry in results.entries) == 2
    for text in results.surprising:
        for name, pieces in text.pieces.items():
            assert "".join(piece for piece, _ in pieces) == text.text, name
    (attention,) = results.attention
    assert attention.entry == "gpt"
    assert all("gpt: " in figure for figure in attention.figures)


def test_examples_that_one_tokenizer_drops_are_left_out_for_all(recipe, tmp_path, pairs_file):
    with pairs_file.open("a") as file:
        file.write("aaaaabbbbb\tb\n")
    changes = ["data.max_length=6", "data.truncation=drop", "data.valid=" + str(pairs_file)]
    bpe = {"name": "bpe", "size": 300}
    paths = [write(tmp_path, "a", recipe), write(tmp_path, "b", recipe, tokenizer=bpe)]
    results = compare(paths, "2", tmp_path / "out", changes).results
    assert results.num_examples == len(pairs_file.read_text().splitlines()) - 1
    assert all(example.text != "aaaaabbbbb" for example in results.examples)
    kept = json.loads((tmp_path / "out" / "b" / "evaluation.json").read_text())["rows"]
    assert len(kept) == results.num_examples + 1, "b could read it"


def test_a_page_needs_a_place(recipe, tmp_path):
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    with pytest.raises(weft.CheckpointError, match=r"report.html: must be a file, but is a folder"):
        compare(write(tmp_path, "a", recipe), "2", tmp_path / "out")
    weft.train(recipe, ["train.steps=1"], tmp_path / "taken" / "a")
    with pytest.raises(weft.CheckpointError, match="a: holds a run already; choose another --out"):
        compare(tmp_path / "a.yaml", "2", tmp_path / "taken")


def test_results_are_json(compared):
    comparison, out, _ = compared
    assert re.search(r'"metric": ?"exact_match"', (out / "comparison.json").read_text())
    assert write_json(comparison.results.model_dump(mode="json"))
    assert (out / "comparison.csv").stat().st_size
