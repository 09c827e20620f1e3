"""Tables in a pipe: names as they are, numbers to the right."""

import re
import sys

import pytest

from weft.cli.console import (
    MAX_LABELS,
    fit_columns,
    print_confusion,
    print_metrics,
    print_report,
    print_table,
)
from weft.tasks.classification_report import ClassificationReport
from weft.tasks.metrics import ConfusionMatrix, Tally


def test_what_looks_like_markup_is_printed_as_it_is(capsys):
    print_table(["[/i]", "n"], [["[/u]", "1"], ["[red]", "20"]], title="[/b]")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == "[/b]"
    assert lines[1].split() == ["[/i]", "n"]
    assert [line.split() for line in lines[3:]] == [["[/u]", "1"], ["[red]", "20"]]


def test_numbers_go_to_the_right(capsys):
    print_table(["name", "number"], [["a", "1"], ["b", "1,000"]])
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.strip()[:1] in ("a", "b"))
    assert len(first.rstrip()) == len(second.rstrip())


def test_of_many_labels_the_most_frequent_errors_are_printed(capsys):
    labels = [f"label{number:02}" for number in range(MAX_LABELS + 1)]
    predicted = [labels[1], *labels[1:]]
    print_confusion(ConfusionMatrix.of(labels, zip(labels, predicted, strict=True)))
    out = capsys.readouterr().out
    assert "most confused pairs, 1 of 1; --json has the confusion matrix of all labels" in out
    assert "label00" in out
    assert "label30" not in out


@pytest.mark.parametrize(("columns", "whole"), [(60, False), (200, True)])
def test_a_matrix_that_does_not_fit_the_terminal_is_its_most_confused_pairs(monkeypatch, capsys, columns, whole):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    labels = [f"label{number:02}" for number in range(12)]
    print_confusion(ConfusionMatrix.of(labels, [("label03", "label07")] * 5 + [("label00", "label00")]))
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= columns
    assert (out.startswith("confusion matrix"), out.startswith("most confused pairs")) == (whole, not whole)
    assert "label07" in out
    assert ("label11" in out) == whole


@pytest.mark.parametrize("columns", [48, 80])
def test_a_report_fits_the_terminal_however_long_a_label_is(monkeypatch, capsys, columns):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    print_report(ClassificationReport.of({"long " * 30: Tally(1, 2, 3000), "[red]": Tally(1, 1, 1)}))
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)  # without the codes of bold and italic print
    assert max(map(len, out.splitlines())) <= columns
    assert "[red]" in out
    for number in ("0.5000", "0.0003", "0.0007", "3,000"):
        assert number in out, "numbers are whole"


def test_a_blank_line_parts_the_averages_from_the_classes(capsys):
    print_report(ClassificationReport.of({"a": Tally(1, 2, 2)}))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    place = next(number for number, line in enumerate(lines) if line.startswith("micro avg"))
    assert lines[place - 2].split()[0] == "a"
    assert lines[place - 1] == ""
    assert lines[place + 1].startswith("macro avg")


def test_only_a_binary_f1_has_a_label_beside_it(capsys):
    print_metrics({"f1": 0.5, "macro_f1": 0.5}, "yes")
    out = capsys.readouterr().out
    assert "f1 (yes)" in out
    assert "macro_f1 " in out
    print_metrics({"f1": 0.5})
    assert "(" not in capsys.readouterr().out


ROWS = [["model.attention", "additive", "the score function; none: one fixed vector"], ["model.tie", "false", "yes"]]


@pytest.fixture
def terminal(monkeypatch, capsys):
    def lines(width):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        print_table(["key", "default", "meaning"], ROWS)
        plain = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)  # without bold and the like
        return [line.rstrip() for line in plain.splitlines() if line.strip()]

    return lines


@pytest.mark.parametrize("width", [45, 60, 79, 200])
def test_a_table_fits_the_terminal_and_breaks_no_word(terminal, width):
    lines = terminal(width)
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    assert {word for row in ROWS for cell in row for word in cell.split()} <= words
    assert (len(lines) > 4) == (width < 75)


def test_in_a_terminal_too_narrow_for_columns_rows_are_lists(terminal):
    lines = terminal(30)
    assert lines[:2] == ["key: model.attention", "default: additive"]
    assert max(map(len, lines)) <= 30


def test_columns_share_the_room_that_words_leave():
    assert fit_columns([["a", "bb"], ["c", "dddd ee"]], 100) == [1, 7]
    assert fit_columns([["a", "bb"], ["c", "dddd ee"]], 12) == [1, 5]
    assert fit_columns([["a", "bb"], ["c", "dddd ee"]], 11) == [1, 4]
    assert fit_columns([["a", "bb"], ["c", "dddd ee"]], 10) is None
