"""Progress: a line now and then where stderr is no terminal, a live one where it is, and nothing if quiet."""

import pytest

from weft.cli import progress as module
from weft.cli.progress import RowProgress


@pytest.fixture
def clock(monkeypatch):
    """Return what sets the time."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def test_a_pipe_has_a_line_every_ten_seconds(clock, capsys):
    with RowProgress("predict", quiet=False) as progress:
        for second in range(25):
            clock(float(second))
            progress.advance(100)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "predict: 1,100 rows, 110 rows/s\npredict: 2,100 rows, 105 rows/s\n"


def test_quiet_is_quiet(clock, capsys):
    with RowProgress("predict", quiet=True) as progress:
        clock(100.0)
        assert list(progress.track("abc")) == ["a", "b", "c"]
    assert progress.rows == 3
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_live_line_on_stderr_alone(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with RowProgress("embed", quiet=False) as progress:
        progress.advance(7)
    out, err = capsys.readouterr()
    assert out == ""
    assert "embed: 7 rows" in err
