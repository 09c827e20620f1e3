from collections import Counter
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.tokenization.word_counts import count_units, repeat_units

quick = settings(derandomize=True, deadline=None, max_examples=50, database=None)


@quick
@given(st.lists(st.text(alphabet="ab \n", max_size=300)).filter(lambda texts: any(map(str.strip, texts))))
def test_units_make_up_the_text(texts):
    units = count_units(texts)
    assert sum(len(unit) * count for unit, count in units.items()) == sum(map(len, texts))
    assert max(map(len, units)) <= 256
    for text in texts:
        assert text.strip() == "" or any(unit in text for unit in units)


def test_a_unit_is_a_word_with_the_spaces_before_it():
    assert count_units(["the cat  the\ncat ", "the cat"]) == {"the": 2, " cat": 2, "  the\ncat": 1, " ": 1}


@quick
@given(st.dictionaries(st.sampled_from(["a", " a", "  b", " ", " c\n"]), st.integers(1, 600)))
def test_units_are_given_back_as_often_as_counted(counts):
    again: Counter[str] = Counter()
    for text in repeat_units(Counter(counts)):
        again.update(count_units([text]) if text.strip() else [text])
    assert again == Counter(counts)


def many_words(words: int) -> Iterator[str]:
    for n in range(words):
        yield f"rare{n} the of"


def test_the_table_is_bounded_and_keeps_what_is_frequent():
    counts = count_units(many_words(5000), cap=100)
    assert len(counts) <= 100
    assert counts[" the"] == counts[" of"] == 5000
    assert max(count for unit, count in counts.items() if "rare" in unit) == 1
    assert len(count_units(many_words(5000))) == 5002  # without a bound it would grow


@quick
@given(st.lists(st.sampled_from("abcdefghij"), min_size=1))
def test_a_count_never_exceeds_the_truth(words):
    counts = count_units(words, cap=4)
    assert all(count <= words.count(unit) for unit, count in counts.items())


def test_a_very_long_line_is_cut_in_stretches():
    line = "word " * 500_000
    counts = count_units([line])
    assert counts[" word"] > 499_990
    assert sum(len(unit) * count for unit, count in counts.items()) == len(line)
