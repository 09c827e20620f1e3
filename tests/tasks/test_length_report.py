"""Metrics by the length of the input: groups cover all examples once, and each has its own scores."""

from types import SimpleNamespace

import pytest

from weft.tasks.length_report import LengthReport
from weft.tasks.metrics import exact_match


class Copying:
    """A task with two inputs, a text and a list of texts."""

    input_fields = ("text", "choices")

    def score(self, answers, examples):
        return {"exact": exact_match(answers, [example.gold for example in examples])}


def example(words, gold="right", choices=None):
    return SimpleNamespace(text=" ".join(["w"] * words), choices=choices, gold=gold)


def test_each_group_has_the_scores_of_its_own_examples():
    examples = [example(words) for words in (9, 1, 5, 2, 8, 3, 7, 4)]
    answers = ["wrong" if len(row.text.split()) > 6 else "right" for row in examples]
    groups = LengthReport.of(Copying(), answers, examples).groups
    assert [(group.shortest, group.longest, group.examples) for group in groups] == [
        (1, 2, 2),
        (3, 4, 2),
        (5, 7, 2),
        (8, 9, 2),
    ]
    assert [group.metrics["exact"] for group in groups] == [1, 1, 0.5, 0]


@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_every_example_is_in_one_group(count):
    examples = [example(row % 7) for row in range(count)]
    groups = LengthReport.of(Copying(), ["right"] * count, examples).groups
    assert sum(group.examples for group in groups) == count


def test_the_words_of_all_inputs_count():
    groups = LengthReport.of(Copying(), ["right"], [example(2, choices=["a b c", "d"])]).groups
    assert (groups[0].shortest, groups[0].longest) == (6, 6)


def test_single_words_are_grouped_by_their_characters():
    words = [SimpleNamespace(text="w" * length, choices=None, gold="right") for length in (3, 9, 5, 4)]
    report = LengthReport.of(Copying(), ["right"] * 4, words)
    assert report.unit == "characters"
    assert [group.longest for group in report.groups] == [3, 4, 5, 9]
    assert LengthReport.of(Copying(), ["right"], [example(2)]).unit == "words"


def test_what_is_not_defined_for_a_group_is_a_dash_and_null():
    class Undefined(Copying):
        def score(self, answers, examples):
            return {"pearson": float("nan")}

    report = LengthReport.of(Undefined(), ["right"], [example(3)])
    assert report.table()[1] == [["3 to 3", "1", "–"]]
    assert report.to_dict()["groups"][0]["metrics"] == {"pearson": None}
