"""The bar is drawn on a terminal and nowhere else; notices are printed in both."""

import io
import sys
from pathlib import Path

import pytest

from weft.training.progress_bar import ProgressBar
from weft.training.reporting import CheckpointSaved, Eval, Notice, Step

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
STEP = Step(1200, 0.5, 0.01, 1.0, 34567.0, 0.4126, 0, 1.0, 0.25)


class Screen(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.fixture
def screen(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")

    def make(terminal):
        monkeypatch.setattr(sys, "stderr", Screen(terminal))
        return sys.stderr

    return make


def drawn(*records, close=True):
    bar = ProgressBar("dates")
    for record in records:
        bar(record)
    if close:
        bar.close()
    return sys.stderr.getvalue()


def test_a_terminal_shows_loss_speed_and_score(screen):
    screen(terminal=True)
    shown = drawn(Eval(1000, {"loss": 0.7, "exact_match": 0.875}, best=True), STEP)
    assert "dates" in shown
    for part in ("loss 0.500", "34,567 tokens/s", "41% MFU", "exact_match 0.875", "25%"):
        assert part in shown
    assert shown.count(HIDE_CURSOR) == shown.count(SHOW_CURSOR) == 1


def test_in_a_pipe_there_are_notices_alone(screen):
    screen(terminal=False)
    shown = drawn(
        STEP, Eval(1, {"loss": 0.7}), CheckpointSaved(1, Path("x")), Notice("data.train: skipped 1 row [b]: x")
    )
    assert shown == "data.train: skipped 1 row [b]: x\n"


def test_a_terminal_shows_notices_too(screen):
    screen(terminal=True)
    assert "so it is [1]" in drawn(STEP, Notice("so it is [1]"))


def test_before_the_first_record_the_terminal_is_not_touched(screen):
    screen(terminal=True)
    assert drawn(close=False) == ""
    assert drawn(close=True) == ""
