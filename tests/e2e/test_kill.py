"""A real training process is killed with SIGKILL four times, two of them inside a save, and loses not one bit."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench" / "reliability.py"


def test_four_kills_change_no_step_and_no_loss():
    command = [sys.executable, str(SCRIPT), "--kills", "4", "--inside-saves", "2", "--steps", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["identical"]
    assert (report["kills"], report["inside_saves"]) == (4, 2)
