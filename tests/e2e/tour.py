"""Does the steps of a tour, which stdin holds as JSON, in one process that knows weft and what weft declares alone,
and has no network.

`tests/e2e/test_wheel.py` runs it in an environment of its own. A step is [expected exit code, words of a command, at
the end of which may stand > FILE] or [null, Python code]; the first that goes wrong ends it.
"""

import json
import socket
import sys
from collections import Counter
from contextlib import nullcontext, redirect_stdout
from functools import cache

from weft.cli import main as cli
from weft.data.samples import datasets as samples

ROWS = {"train": 300, "valid": 20, "test": 20}  # of a sample; more would only take longer


def few(rows):
    """Return the first rows of each split."""
    seen = Counter()
    return [(split, row) for split, row in rows if not seen.update([split]) and seen[split] <= ROWS[split]]


def run_command(words):
    """Run a command of weft's; return its exit code."""
    *sys.argv, arrow, file = words if ">" in words else [*words, None, None]
    try:
        with open(file, "w", encoding="utf-8") if arrow else nullcontext(sys.stdout) as out, redirect_stdout(out):
            cli.main()
    except SystemExit as end:
        return end.code or 0


def refuse(*_):
    """Stand for every connection."""
    raise PermissionError("the tour needs no network")


def main():
    """Do all steps."""
    socket.socket.connect = socket.getaddrinfo = refuse
    whole, names = samples._cached_rows, {}
    samples._cached_rows = cache(lambda name: few(whole(name)))
    for expected, what in json.load(sys.stdin):
        print("$", *([what] if expected is None else what), flush=True)
        if expected is None:
            exec(what, names)
        elif (code := run_command(what)) != expected:
            sys.exit(f"{what}: exit {code}, not {expected}")


main()
