"""The command line in this process, or in one of its own."""

import subprocess
import sys

import pytest

from weft.cli import main as cli


class Done:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err
        self.lines = out.splitlines()


def good(done):
    assert done.code == 0, done.err
    return done


def refused(done, *message):
    """See that a mistake gives one line on stderr, nothing on stdout, and the exit code 2."""
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    for part in message:
        assert part in done.err
    return done


def process(*arguments, **settings):
    command = [sys.executable, "-m", "weft", *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **{**pipes, **settings})


def finished(running, data=None):
    out, err = running.communicate(data, timeout=120)
    return Done(running.returncode, out.decode(), err.decode())


@pytest.fixture
def run(monkeypatch, capsys):
    """Return what runs one command in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        return Done(end.value.code or 0, *capsys.readouterr())

    return command


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
