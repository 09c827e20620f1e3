"""The command line in this process, in a folder of its own."""

import sys

import pytest

from weft.cli import main as cli


@pytest.fixture
def run_weft(tmp_path, monkeypatch, capfd):
    """Return a function that runs a command; it returns its exit code, what it wrote to stdout, and to stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, words)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return (code, *capfd.readouterr())

    return run
