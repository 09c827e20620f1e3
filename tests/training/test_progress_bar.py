"""A bar on a terminal, a line for each report elsewhere, neither if quiet; notices are printed in all."""

import io
import sys
from dataclasses import replace
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


def drawn(*records, close=True, quiet=False):
    bar = ProgressBar("dates", quiet)
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


NOTICE = Notice("data.train: skipped 1 row [b]: x")


def test_in_a_pipe_each_report_is_a_line(screen):
    screen(terminal=False)
    evaluated = replace(STEP, step=1220, valid={"loss": 0.7, "exact_match": 0.875})
    shown = drawn(NOTICE, STEP, Eval(1220, {"loss": 0.7}), evaluated, CheckpointSaved(1220, Path("x")))
    assert shown.splitlines() == [
        NOTICE.text,
        "dates: step 1,200 (25%), loss 0.5, lr 0.01, 34,567 tokens/s",
        "dates: step 1,220 (25%), loss 0.5, lr 0.01, 34,567 tokens/s, valid loss 0.7, valid exact_match 0.875",
    ]


def test_a_notice_in_a_pipe_is_one_line(screen, monkeypatch):
    screen(terminal=False)
    monkeypatch.setenv("COLUMNS", "20")
    assert drawn(NOTICE) == f"{NOTICE.text}\n"


def test_a_line_is_there_at_once(screen):
    output = screen(terminal=False)
    flushed = []
    output.flush = lambda: flushed.append(output.getvalue())
    drawn(STEP)
    assert any("step 1,200" in text for text in flushed)


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_leaves_notices_alone(screen, terminal):
    screen(terminal)
    assert drawn(STEP, Eval(1, {"loss": 0.7}), NOTICE, quiet=True) == f"{NOTICE.text}\n"


def test_a_terminal_shows_notices_too(screen):
    screen(terminal=True)
    assert "so it is [1]" in drawn(STEP, Notice("so it is [1]"))


def test_before_the_first_record_the_terminal_is_not_touched(screen):
    screen(terminal=True)
    assert drawn(close=False) == ""
    assert drawn(close=True) == ""
