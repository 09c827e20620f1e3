"""Changed recipes, data, checkpoints, Hugging Face folders and options end in an answer or in an error."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

import fuzz
from fuzz_doors import Input
from fuzz_mutations import mutate_file
from fuzz_runner import Limits, run_all

SCRIPT = Path(fuzz.__file__)
QUICK = Limits(cpu_seconds=1.5, wall_seconds=30.0, gigabytes=0.5)  # forks of a large process take a while, too


def test_fifty_inputs_fail_in_no_way():
    command = [sys.executable, str(SCRIPT), "--inputs", "50", "--few", "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["inputs"] == 50


# What a class that a recipe names does when it is imported, and how that fails.
PLANTED = {
    "1 / 0": "ZeroDivisionError",
    "while True: pass": "hang",
    "bytes(1 << 30)": "memory",
    "import os; os.kill(os.getpid(), 9)": "died",
    "raise SystemExit(3)": "exit 3",
    "import os; [os.fork() or os._exit(0) for _ in range(50)]": "TooManyForksError",
    "import sys; print('Traceback (most recent call last)', file=sys.stderr); 1 / 0": "ZeroDivisionError",
    "import sys; sys.stderr.write('error: ' + 'x' * 30_000); sys.exit(2)": "long error",
    "from weft.errors import DataError; raise DataError('x' * 30_000)": None,
    "from weft.errors import DataError; raise DataError('it is wrong')": None,
}


def planted(code):
    recipe = b'{"task": {"name": "planted:Task"}}'
    return Input({"planted.py": code.encode(), "recipe.yaml": recipe}, ["train", "recipe.yaml"])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return how each of the planted inputs fails; they follow each other in one process, as long as it lives."""
    codes = list(PLANTED)
    results = run_all(codes, planted, tmp_path_factory.mktemp("inputs"), QUICK)
    return {code: failure and failure.kind for code, failure in results}


@pytest.mark.parametrize("code", PLANTED)
def test_what_is_planted_is_caught(outcomes, code):
    assert outcomes[code] == PLANTED[code]


def test_an_input_follows_from_its_number():
    data = json.dumps({"a": [1, {"b": "c"}]}).encode()
    changed = [mutate_file("x.json", data, Random(f"0 {number}"), True) for number in range(50)]
    assert changed == [mutate_file("x.json", data, Random(f"0 {number}"), True) for number in range(50)]
    assert len(set(changed)) > 30
