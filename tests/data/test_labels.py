"""Labels: class indices do not depend on their order; an unlisted label raises with its location, or is skipped."""

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from weft.config.schema import Named
from weft.config.sections import Data
from weft.data.labels import MAX_LABELS, Label, Labels, balanced_class_weights
from weft.data.readers.examples import Skipped
from weft.data.truncation import TruncationPolicy
from weft.errors import DataError
from weft.tasks.base import Example, Task
from weft.tasks.encoding import encode_all
from weft.tasks.prepare import read_split


@given(st.lists(st.text(), min_size=1))
def test_numbers_do_not_hang_on_the_order_seen(names):
    labels = Labels.collect(names)
    assert list(labels) == list(Labels.collect(reversed(names))) == sorted(set(names))
    assert [labels.index(name) for name in labels] == list(range(len(labels)))


@given(st.dictionaries(st.text(), st.integers(1, 99), min_size=1))
def test_balanced_weights_give_all_labels_the_same_say(counts):
    weights = balanced_class_weights(counts)
    say = [weights[label] * count for label, count in counts.items()]
    assert say == pytest.approx([sum(counts.values()) / len(counts)] * len(counts))


def test_a_whole_number_is_a_label_by_its_name():
    read = TypeAdapter(Label).validate_python
    assert [read(3), read("3"), read("a b")] == ["3", "3", "a b"]
    for other in (None, ["a"]):
        with pytest.raises(ValueError, match="must be text, the name of a label"):
            read(other, strict=True)


@pytest.mark.parametrize(("value", "quoted"), [(True, '"true"'), (False, '"false"'), (1.0, '"1.0"')])
def test_what_yaml_and_json_take_for_something_else_is_to_be_quoted(value, quoted):
    with pytest.raises(ValueError, match=f"must be text: put it in quotes, {quoted}"):
        TypeAdapter(Label).validate_python(value)


@pytest.mark.parametrize("blank", ["", " ", "\t"])
def test_a_blank_is_no_label(blank):
    with pytest.raises(ValueError, match="must have a name, and not be blank"):
        TypeAdapter(Label).validate_python(blank)


def test_a_label_listed_twice_is_refused():
    with pytest.raises(DataError, match="'a' is listed twice"):
        Labels(["a", "b", "a"])


class Sentiment(Example):
    text: str
    label: str


class Labelled(Task):
    """A minimal task with labels, to read a file through the real pipeline."""

    Config = Named
    Example = Sentiment
    labels: ClassVar = Labels(["negative", "positive"])

    def encode(self, example, tokenizer, limit):
        return [(np.array([self.labels.index(example.label)]),)]


@pytest.fixture
def read(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("good\tpositive\nbad\tnegatve\nfair\tpositive\n")
    task, data = Labelled(Named(name="labelled")), Data(train=str(path))

    def reading(skipped):
        rows = read_split(data, "train", task, Skipped())
        return list(encode_all(rows, task, None, TruncationPolicy(9, "error"), skipped))

    return reading


def test_a_label_that_is_not_listed_names_the_row_and_the_nearest(read):
    with pytest.raises(
        DataError, match=r"rows.tsv:2: the label 'negatve' is not in task.labels.*did you mean 'negative'"
    ):
        read(None)


def test_or_the_row_is_skipped_and_counted(read):
    skipped = Skipped()
    assert [len(items) for items in read(skipped)] == [1, 0, 1]
    assert skipped.count == 1
    assert "rows.tsv:2" in str(skipped)


def test_more_labels_than_can_be_told_apart_are_refused():
    assert len(Labels(map(str, range(MAX_LABELS)))) == MAX_LABELS
    with pytest.raises(DataError, match="there are 100,001 labels, such as '0', and at most 100,000 can be told apart"):
        Labels(map(str, range(MAX_LABELS + 1)))


def test_one_of_many_labels_that_is_listed_twice_is_named_at_once():
    with pytest.raises(DataError, match="'99000' is listed twice"):  # by counting each it would take minutes
        Labels([*map(str, range(99_999)), "99000"])
