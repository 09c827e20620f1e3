"""The sample data sets: their content, that it is deterministic, and that no split leaks into another."""

import calendar
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from datetime import date, datetime
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.data.samples.cldr import FIELDS, DateFormatter
from weft.data.samples.datasets import LANGUAGES, SAMPLES, SPLITS, _assign_split, _bio_tag, _prose, read_sample
from weft.errors import DataError

Row = dict[str, Any]
Splits = dict[str, list[Row]]
NAMES = sorted(SAMPLES)


@cache
def splits_of(name: str) -> Splits:
    return {split: [row for _, row in read_sample(name, split)] for split in SPLITS}


def flat(splits: Splits) -> list[Row]:
    return [row for rows in splits.values() for row in rows]


def frozen(row: Row) -> tuple[Hashable, ...]:
    return tuple(tuple(value) if isinstance(value, list) else value for value in row.values())


# ---- what there is ----


def test_the_catalogue() -> None:
    assert {name: (sample.task, sample.fields) for name, sample in SAMPLES.items()} == {
        "dates": ("translate", ("text", "target")),
        "langid": ("classify", ("text", "label")),
        "dateparts": ("tag", ("words", "tags")),
        "pydoc": ("lm", ("text",)),
        "reviews": ("classify", ("text", "label")),
    }
    assert all(sample.name == name and "\n" not in sample.about for name, sample in SAMPLES.items())


@pytest.mark.parametrize(
    ("name", "train", "held_out"),
    [
        ("dates", 50_000, 1_000),
        ("langid", 10_000, 500),
        ("dateparts", 19_000, 900),
        ("pydoc", 500, 40),
        ("reviews", 320, 80),
    ],
)
def test_sizes(name: str, train: int, held_out: int) -> None:
    sizes = {split: len(rows) for split, rows in splits_of(name).items()}
    assert sizes["train"] >= train
    assert min(sizes["valid"], sizes["test"]) >= held_out
    if name == "dates":
        assert sizes == {"train": 50_000, "valid": 1_000, "test": 1_000}


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_whole_and_can_be_typed(name: str) -> None:
    for row in flat(splits_of(name)):
        assert tuple(row) == SAMPLES[name].fields
        for value in row.values():
            words = value if isinstance(value, list) else [value]
            assert words
            assert all(word and word == " ".join(word.split()) for word in words), row
            assert not re.search("[\u00a0\u2009\u202f\u200e\u200f]", " ".join(words)), row


@pytest.mark.parametrize("name", NAMES)
def test_the_splits_are_all_rows_and_no_row_comes_twice(name: str) -> None:
    rows = [frozen(row) for row in SAMPLES[name].rows()]
    assert len(set(rows)) == len(rows)
    assert sorted(rows) == sorted(frozen(row) for row in flat(splits_of(name)))


@pytest.mark.parametrize("name", ["dates", "langid", "dateparts", "reviews"])
def test_the_order_is_shuffled(name: str) -> None:
    rows = splits_of(name)["train"]
    firsts = [str(row[SAMPLES[name].fields[0]]) for row in rows[:200]]
    assert firsts != sorted(firsts)
    if name == "langid":
        assert len({row["label"] for row in rows[:200]}) > 12


# ---- alike everywhere ----

_DIGESTS = """
import hashlib, json
from weft.data.samples.datasets import SAMPLES, SPLITS, read_sample
for name in sorted(SAMPLES):
    splits = {split: [row for _, row in read_sample(name, split)] for split in SPLITS}
    print(hashlib.sha256(json.dumps(splits).encode()).hexdigest())
"""


def test_a_process_with_another_hash_seed_makes_the_same_rows() -> None:
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", _DIGESTS]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    here = [hashlib.sha256(json.dumps(splits_of(name)).encode()).hexdigest() for name in NAMES]
    assert there == here


def test_the_share_that_is_held_out() -> None:
    counts = dict.fromkeys(SPLITS, 0)
    for number in range(20_000):
        counts[_assign_split(f"row {number}", 0.05)] += 1
    assert counts["test"] == pytest.approx(1_000, rel=0.1)
    assert counts["valid"] == pytest.approx(1_000, rel=0.1)


# ---- no split leaks ----


def leaks(splits: Splits, keys: Callable[[Row], Iterable[Hashable]]) -> set[Hashable]:
    """Return the content that is in more than one split."""
    splits_by_key: dict[Hashable, set[str]] = defaultdict(set)
    for split, rows in splits.items():
        for row in rows:
            for key in keys(row):
                splits_by_key[key].add(split)
    return {key for key, where in splits_by_key.items() if len(where) > 1}


def by_index(splits: Splits) -> Splits:
    """Return a leaking split: every tenth row for test, the next for valid."""
    result: Splits = {split: [] for split in SPLITS}
    for index, row in enumerate(flat(splits)):
        result[{0: "test", 1: "valid"}.get(index % 10, "train")].append(row)
    return result


_MONTHS = {name[:length]: month for month, name in enumerate(calendar.month_name) if name for length in (3, len(name))}


def days(row: Row) -> list[date]:
    """Return the complete dates in an English text."""
    named = re.findall(r"([A-Z][a-z]+)\.? (\d+), (\d{4})", row["text"])
    numbers = re.findall(r"(\d+)/(\d+)/(\d{4})", row["text"])
    dates = [(int(year), _MONTHS[month], int(day)) for month, day, year in named]
    dates += [(int(year), int(month), int(day)) for month, day, year in numbers]
    return [date(*parts) for parts in dates]


def text(row: Row) -> list[str]:
    return [" ".join(row["words"]) if "words" in row else row["text"].casefold()]


def test_days_reads_every_form() -> None:
    texts = ["Thursday, January 12, 2023 at 5:07 PM - Friday, May 1, 2099 at 1:00 AM", "Jan 12, 2023", "1/12/2023"]
    assert [len(days({"text": text})) for text in texts] == [2, 1, 1]
    assert {day for text in texts for day in days({"text": text})} == {date(2023, 1, 12), date(2099, 5, 1)}
    assert sum(not days(row) for row in splits_of("dates")["train"]) < 5_000


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_in_two_splits(name: str) -> None:
    splits = splits_of(name)
    assert not leaks(splits, text)
    assert leaks({**splits, "test": [*splits["test"], splits["train"][17]]}, text)  # the check sees one leaked row


def test_no_day_of_the_test_was_seen_in_any_form() -> None:
    splits = splits_of("dates")
    assert not leaks(splits, days)
    assert len(leaks(by_index(splits), days)) > 1_000


def test_no_topic_of_the_manual_is_in_two_splits() -> None:
    from pydoc_data.topics import topics

    first: dict[str, str] = {}
    for topic in sorted(topics):
        for paragraph in _prose(topics[topic]):
            first.setdefault(paragraph, topic)
    splits = splits_of("pydoc")
    assert not leaks(splits, lambda row: [first[row["text"]]])
    assert leaks(by_index(splits), lambda row: [first[row["text"]]])


# ---- dates ----


def french(day: date) -> str:
    return "".join(text for _, text in DateFormatter("fr").format("full", None, datetime(day.year, day.month, day.day)))


def test_a_date_turns_round_in_french() -> None:
    assert french(date(2023, 1, 12)) == "jeudi 12 janvier 2023"


def test_each_form_is_what_babel_says() -> None:
    from babel.dates import format_date, format_skeleton, format_time

    when = datetime(2009, 8, 3, 17, 7, 33)
    for language in ("en", "fr"):
        formatter = DateFormatter(language)
        babel = {
            **{(form, None): format_date(when, form, locale=language) for form in ("full", "long", "medium")},
            **{(None, form): format_time(when, form, locale=language) for form in ("short", "medium")},
            **{(form, None): format_skeleton(form, when, locale=language) for form in ("yMd", "yMMMEd", "yQQQQ")},
        }
        for (day, clock), expected in babel.items():
            formatted = "".join(text for _, text in formatter.format(day, clock, when))
            assert formatted == re.sub("[\u00a0\u2009\u202f]", " ", expected)


def test_remembered_fields_never_go_stale() -> None:
    from babel.dates import format_date

    formatter = DateFormatter("en")
    for ordinal in range(date(2023, 1, 1).toordinal(), date(2024, 3, 1).toordinal()):
        when = datetime.fromordinal(ordinal)
        assert "".join(text for _, text in formatter.format("full", None, when)) == format_date(
            when, "full", locale="en"
        )


def test_the_english_is_a_real_day_and_the_french_is_the_same_day() -> None:
    full = [row for row in splits_of("dates")["test"] if re.fullmatch(r"\w+, \w+ \d+, \d{4}", row["text"])]
    full = [row for row in full if row["text"].split()[0][:-1] in calendar.day_name]
    assert len(full) > 100
    for row in full:
        (day,) = days(row)
        assert row["text"].startswith(calendar.day_name[day.weekday()])
        assert row["target"] == french(day)
        assert row["target"] != french(date.fromordinal(day.toordinal() + 1))


def test_a_text_has_one_target() -> None:
    rows = flat(splits_of("dates"))
    assert len({row["text"] for row in rows}) == len(rows)


def test_times_spans_and_long_targets_are_there() -> None:
    rows = splits_of("dates")["test"]
    assert sum(bool(re.search(r"[AP]M", row["text"])) for row in rows) > 300
    assert sum(" à " in row["target"] and " at " in row["text"] for row in rows) > 300
    assert sum(len(days(row)) == 2 for row in rows) > 50
    assert sum(len(row["target"]) > 40 for row in rows) > 50


# ---- langid ----


def test_every_language_is_in_every_split_and_none_is_rare() -> None:
    splits = splits_of("langid")
    for rows in splits.values():
        assert {row["label"] for row in rows} == set(LANGUAGES)
    labels = [row["label"] for row in splits["train"]]
    counts = [labels.count(language) for language in LANGUAGES]
    assert min(counts) > 300
    assert max(counts) < 5 * min(counts)


def test_a_name_has_letters_and_one_language() -> None:
    rows = flat(splits_of("langid"))
    assert all(any(letter.isalpha() for letter in row["text"]) for row in rows)
    assert len({row["text"].casefold() for row in rows}) == len(rows)


def test_names_that_every_reader_knows() -> None:
    label = {row["text"]: row["label"] for row in flat(splits_of("langid"))}
    assert (label["Deutschland"], label["janvier"], label["понедельник"]) == ("de", "fr", "ru")
    assert "Angola" not in label  # a name in many languages


# ---- dateparts ----


def well_formed(tags: list[str]) -> bool:
    """Return whether every I- tag continues a B- or I- tag of its type."""
    before = ["O", *tags]
    return all(
        re.fullmatch("O|[BI]-[A-Z]+", tag) and (tag[0] != "I" or before[index][1:] == tag[1:])
        for index, tag in enumerate(tags)
    )


def test_well_formed_sees_a_broken_tag() -> None:
    assert well_formed(["O", "B-TIME", "I-TIME", "B-TIME"])
    assert not well_formed(["O", "I-TIME"])
    assert not well_formed(["B-DAY", "I-TIME"])
    assert not well_formed(["B-"])


def test_tags_are_well_formed_and_known_from_training() -> None:
    splits = splits_of("dateparts")
    for row in flat(splits):
        assert len(row["words"]) == len(row["tags"])
        assert well_formed(row["tags"])
        assert any(tag != "O" for tag in row["tags"])
    tags = {split: {tag for row in rows for tag in row["tags"]} for split, rows in splits.items()}
    assert tags["valid"] | tags["test"] <= tags["train"]
    assert {"B-WEEKDAY", "B-MONTH", "B-DAY", "B-YEAR", "B-TIME", "I-TIME", "I-RELATIVE", "I-DURATION"} <= tags["train"]


def test_a_number_is_tagged_by_what_is_round_it() -> None:
    tags: dict[str, set[str]] = defaultdict(set)
    for row in splits_of("dateparts")["train"]:
        for word, tag in zip(row["words"], row["tags"], strict=True):
            tags[word].add(tag)
    assert {"O", "B-DAY", "B-TIME", "I-TIME", "B-DURATION", "B-RELATIVE", "I-RELATIVE"} <= tags["12"]
    assert {"O", "B-YEAR"} <= tags["1999"]


ENTITIES = st.sampled_from(["", *sorted({name for name, _ in FIELDS.values()})])


@given(st.lists(st.tuples(ENTITIES, st.text(" \u202f-:.aé7", max_size=12))))
def test_any_parts_give_well_formed_tags_and_lose_no_letter(parts: list[tuple[str, str]]) -> None:
    row = _bio_tag(parts)
    assert len(row["words"]) == len(row["tags"])
    assert well_formed(row["tags"])
    joined = "".join(row["words"])
    assert [letter for letter in joined if letter.isalnum()] == [
        letter for _, text in parts for letter in text if letter.isalnum()
    ]


# ---- pydoc ----


def test_the_manual_is_prose() -> None:
    texts = [row["text"] for row in flat(splits_of("pydoc"))]
    assert sum(map(len, texts)) > 150_000
    assert all(not re.search(r">>>|::=|\*\*\*|====|\n", text) for text in texts)
    assert all(len(text.split()) >= 6 and text.rstrip(')"”')[-1] in ".:!?" for text in texts)


def test_prose_leaves_code_headings_and_markup_behind() -> None:
    topic = """
The "if" statement
******************

The *if* statement is used for con-
ditional execution of **some** code: [1]

   if_stmt ::= "if" assignment_expression ":" suite

   >>> if x: print("this is code. It is not prose at all.")

* It selects exactly one of the suites by evaluating.

x = [y for y in range(10)]
"""
    assert list(_prose(topic)) == [
        "The if statement is used for con-ditional execution of some code:",
        "It selects exactly one of the suites by evaluating.",
    ]


# ---- reviews ----


def test_as_many_reviews_are_for_as_against_in_every_split() -> None:
    for rows in splits_of("reviews").values():
        labels = Counter(row["label"] for row in rows)
        assert labels["positive"] == labels["negative"] == len(rows) / 2


def test_reviews_are_not_made_from_templates() -> None:
    texts = [row["text"] for row in flat(splits_of("reviews"))]
    openings = Counter(" ".join(text.split()[:3]) for text in texts)
    assert max(openings.values()) <= 10, "a template would begin many of them"
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) <= 2
    assert max(lengths) >= 20


# ---- reading ----


def test_a_row_has_a_place() -> None:
    places = [place for place, _ in read_sample("pydoc", "valid")]
    assert places[:2] == ["pydoc:valid:1", "pydoc:valid:2"]
    assert len(set(places)) == len(places)


def test_a_reader_who_changes_a_row_changes_nobody_elses() -> None:
    _, row = next(read_sample("dateparts", "test"))
    row["words"].clear()
    _, again = next(read_sample("dateparts", "test"))
    assert again["words"]


def test_unknown_names_are_met_with_a_remedy_before_the_first_row() -> None:
    with pytest.raises(DataError, match="no data set 'date' ships with weft; did you mean 'dates'"):
        read_sample("date", "train")
    with pytest.raises(DataError, match="dates has no split 'tests'; did you mean 'test'"):
        read_sample("dates", "tests")
