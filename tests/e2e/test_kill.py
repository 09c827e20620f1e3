"""A real training process is killed with SIGKILL four times, two of them inside a save, and loses not one bit."""

import json
import math
import subprocess
import sys
from pathlib import Path

from bench import reliability

SCRIPT = Path(reliability.__file__)


def test_four_kills_change_no_step_and_no_loss():
    command = [sys.executable, str(SCRIPT), "--kills", "4", "--inside-saves", "2", "--steps", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["identical"]
    assert (report["kills"], report["inside_saves"]) == (4, 2)


def test_a_loss_that_differs_in_its_last_bit_is_caught(tmp_path):
    rows = {"same": 0.1, "equal": 0.1, "off": math.nextafter(0.1, 1)}
    for name, loss in rows.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": loss}) + "\n")
    same, equal, off = (reliability.pairs(tmp_path / name) for name in rows)
    assert same == equal != off
