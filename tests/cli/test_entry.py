"""Ctrl-C while the command line is still importing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import weft

IMPORTING = """
import sys, time
print("importing", file=sys.stderr, flush=True)
try:
    time.sleep(60)
except BaseException:
    raise ImportError("some libraries report it so") from None
"""


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_ctrl_c_within_an_import_ends_with_130_and_no_traceback(tmp_path, module):
    (tmp_path / f"{module}.py").write_text(IMPORTING)
    path = os.pathsep.join([str(tmp_path), str(Path(weft.__file__).parents[1])])
    command = [sys.executable, "-m", "weft", "predict", "run", "text"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, text=True)
    assert process.stderr.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 130
