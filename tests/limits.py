"""Subprocesses with limited memory and time, for inputs that would take all of both."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

MEMORY = 3 << 30  # bytes of address space: torch alone maps more than one
SECONDS = 100  # of a whole process, on a busy machine; what is refused takes milliseconds

_PREPARE = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
argument, results = sys.argv[1], {{}}
"""


def run_limited(script: str, argument: str | Path, memory: int = MEMORY, **environment: str):
    """Run a script that fills `results`, a dict of plain data, and return them; it may read `argument`."""
    source = _PREPARE.format(memory=memory) + textwrap.dedent(script) + "\nprint(json.dumps(results))\n"
    done = subprocess.run(
        [sys.executable, "-c", source, str(argument)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
