import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.truncation import TruncationPolicy
from weft.errors import DataError


def test_a_sequence_that_fits_is_untouched_under_every_policy():
    ids = [1, 2, 3]
    for policy in ("error", "cut", "drop", "window"):
        limit = TruncationPolicy(3, policy)
        (same,) = limit.apply(ids)
        assert same is ids
        assert str(limit) == ""


def test_error_names_both_lengths_and_the_remedy():
    with pytest.raises(DataError) as caught:
        TruncationPolicy(1024, "error").apply(range(1203))
    assert str(caught.value) == (
        "got 1,203 tokens, data.max_length is 1,024; set data.truncation: cut, drop or window, or raise data.max_length"
    )


@pytest.mark.parametrize(
    ("windows", "remedy"),
    [(False, "cut (weft predict --truncation)"), (True, "cut or window (weft predict --truncation)")],
)
def test_who_asks_a_model_is_told_what_a_question_may_have(windows, remedy):
    with pytest.raises(DataError) as caught:
        TruncationPolicy(3, "error", at_inference=True).apply(range(4), windows=windows)
    assert str(caught.value) == f"got 4 tokens, data.max_length is 3; shorten it, or set data.truncation: {remedy}"


def test_windows_are_not_offered_where_a_task_takes_none():
    with pytest.raises(DataError, match="set data.truncation: cut or drop, or raise data.max_length"):
        TruncationPolicy(3, "error").apply(range(4), windows=False)


def test_cut_keeps_the_start():
    limit = TruncationPolicy(2, "cut")
    assert limit.apply([1, 2, 3]) == [[1, 2]]
    assert (limit.cut, limit.dropped, limit.windowed) == (1, 0, 0)


def test_drop_keeps_nothing():
    limit = TruncationPolicy(2, "drop")
    assert limit.apply([1, 2, 3]) == []
    assert (limit.cut, limit.dropped, limit.windowed) == (0, 1, 0)


def test_windows_of_an_array_are_views_of_it():
    ids = np.arange(7, dtype=np.uint16)
    windows = TruncationPolicy(3, "window").apply(ids)
    assert [window.tolist() for window in windows] == [[0, 1, 2], [3, 4, 5], [6]]
    assert all(window.base is ids for window in windows)


def covers(ids, windows, longest):
    """Return whether windows are consecutive, lose and repeat no token, and none is too long or empty."""
    return [token for window in windows for token in window] == ids and all(
        0 < len(window) <= longest for window in windows
    )


@settings(derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=1), st.integers(1, 8))
def test_windows_cover_the_sequence_once(ids, longest):
    assert covers(ids, TruncationPolicy(longest, "window").apply(ids), longest)


def test_windows_that_overlap_or_lose_the_end_would_be_caught():
    ids = list(range(5))
    assert not covers(ids, [ids[0:2], ids[1:3], ids[2:4], ids[3:5]], 2)
    assert not covers(ids, [ids[0:2], ids[2:4]], 2)
    assert not covers(ids, [ids], 2)


def test_the_report_counts_sequences_not_windows():
    limit = TruncationPolicy(1, "window")
    limit.apply([1, 2, 3])
    assert str(limit) == "windowed 1 sequence longer than data.max_length=1"
    assert (
        str(TruncationPolicy(1024, "cut", cut=3, dropped=2))
        == "cut 3, dropped 2 sequences longer than data.max_length=1024"
    )
    assert str(TruncationPolicy(9, "drop", dropped=1200)) == "dropped 1,200 sequences longer than data.max_length=9"


def test_what_else_a_task_did_is_counted_and_told():
    limit, part = TruncationPolicy(2, "cut"), TruncationPolicy(2, "cut")
    limit.apply([1, 2, 3])
    limit.note("cut", "question", "to 64 tokens")
    for _ in range(2):
        part.note("cut", "question", "to 64 tokens")
        part.note("taught", "answer", "as a whole")
    assert str(TruncationPolicy(2, "cut")) == ""
    assert str(part) == "cut 2 questions to 64 tokens; taught 2 answers as a whole"
    limit.add(part)
    assert str(limit) == (
        "cut 1 sequence longer than data.max_length=2; cut 3 questions to 64 tokens; taught 2 answers as a whole"
    )


@pytest.mark.parametrize("policy", ["error", "cut", "drop", "window"])
def test_no_policy_but_windows_needs_all_of_a_long_text(policy):
    limit, tokens = TruncationPolicy(10, policy), list(range(300_000))
    assert (limit.needed is None) == (policy == "window")
    if policy in ("cut", "drop"):
        assert limit.apply(tokens[: limit.needed]) == limit.apply(tokens)


def test_tokens_that_were_not_all_counted_are_said_to_be_more():
    limit = TruncationPolicy(10, "error")
    for count, said in (
        (11, "got 11 tokens"),
        (limit.needed - 1, "got 100,009 tokens"),
        (limit.needed, "100,010 or more"),
    ):
        with pytest.raises(DataError, match=said):
            limit.apply(range(count))
