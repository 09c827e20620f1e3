"""Tables in a pipe: names as they are, numbers to the right."""

from weft.cli.console import MAX_LABELS, print_confusion, print_table
from weft.tasks.metrics import ConfusionMatrix


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
    assert "most frequent errors" in out
    assert "label00" in out
    assert "label30" not in out
