"""`weft compare`: tables, a page, and a comparison that is stopped."""

import json
import os
import signal
import threading
import time

from tests.cli.conftest import good, refused

import weft
from weft.training.reporting import read_metrics


def test_compare_prints_tables_and_writes_a_page(run, recipe, recipe_file, tmp_path):
    other = tmp_path / "fixed.yaml"
    other.write_text(json.dumps({**recipe, "model": {"name": "seq2seq", "width": 16, "attention": "none"}}))
    done = good(
        run("compare", other, recipe_file, "--budget", 3, "--out", tmp_path / "out", "--set", "train.lr=0.02", "-q")
    )
    assert done.lines[0].strip() == "3 steps of training each"
    assert "exact match" in done.out
    assert done.lines[-1] == f"what was compared, and how: {tmp_path / 'out' / 'report.html'}"
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    assert weft.load(tmp_path / "out" / "fixed").run.train.lr == 0.02
    assert done.err == ""
    again = good(run("compare", "--report-only", "--out", tmp_path / "out"))
    assert again.out == done.out
    assert good(run("compare", "--resume", "--out", tmp_path / "out", "-q")).out == done.out
    refused(run("compare"), "RECIPE: give recipes to compare, or --resume, --add or --report-only")
    refused(run("compare", "--report-only", "--out", tmp_path / "none"), "no comparison was finished")


def test_compare_can_be_stopped(run, recipe_file, tmp_path):
    rows = tmp_path / "out" / "recipe" / "metrics.jsonl"

    def stop():
        while not (rows.exists() and read_metrics(rows)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    done = run("compare", recipe_file, "--budget", 10**7, "--out", tmp_path / "out", "--quiet")
    thread.join()
    out = tmp_path / "out"
    told = f"stopped by SIGINT; saved in {out}: continue with weft compare --resume --out {out}\n"
    assert (done.code, done.out, done.err) == (130, "", told)
