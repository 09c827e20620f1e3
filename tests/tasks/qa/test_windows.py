"""Passage windows: they cover the whole passage, and every possible answer span belongs to exactly one of them."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from weft.tasks.qa.windows import PassageWindow, cut_windows

SIZES = st.integers(0, 90), st.integers(1, 40), st.integers(1, 60), st.integers(1, 20)


def spans_of(windows, longest):
    """List the spans of at most so many tokens that windows offer: those that start at their own tokens."""
    return [
        (start, stop)
        for window in windows
        for start in range(window.low, window.high)
        for stop in range(start + 1, min(start + longest, window.stop) + 1)
    ]


@given(*SIZES)
def test_windows_cover_a_passage_and_each_token_is_the_own_of_one(size, room, stride, answer):
    windows = cut_windows(size, room, stride, answer)
    assert windows[0].start == 0
    assert windows[-1].stop == size
    assert [token for window in windows for token in range(window.low, window.high)] == list(range(size))
    for window in windows:
        assert window.start <= window.low <= window.high <= window.stop <= window.start + room
    for window, following in pairwise(windows):
        assert window.start < following.start <= min(window.stop, window.start + stride)
        assert window.stop < following.stop  # none is inside another


@given(*SIZES)
def test_every_span_is_offered_once_where_windows_are_twice_as_long_as_answers(size, room, stride, answer):
    answer = min(answer, max(room // 2, 1))
    spans = Counter(spans_of(cut_windows(size, room, stride, answer), answer))
    every = [(start, stop) for start in range(size) for stop in range(start + 1, min(start + answer, size) + 1)]
    assert spans == Counter(every)


def test_windows_that_do_not_overlap_would_lose_spans():
    apart = [PassageWindow(0, 4, 0, 4), PassageWindow(4, 8, 4, 8)]
    assert (3, 5) not in spans_of(apart, 2)
    assert (3, 5) in spans_of(cut_windows(8, 4, 4, 2), 2)


def test_they_go_by_the_stride_and_what_fits_is_one():
    assert [window[:2] for window in cut_windows(300, 200, 50, 30)] == [(0, 200), (50, 250), (100, 300)]
    assert cut_windows(200, 200, 50, 30) == [PassageWindow(0, 200, 0, 200)]
    assert cut_windows(0, 10, 5, 3) == [PassageWindow(0, 0, 0, 0)]


def test_a_token_is_the_own_of_the_window_with_most_around_it():
    windows = cut_windows(300, 200, 50, 30)  # as _check_is_max_context of the code of Devlin et al. 2019 has it
    for token in range(300):
        around = [
            min(token - window.start, window.stop - 1 - token) if window.start <= token < window.stop else -1
            for window in windows
        ]
        best = windows[around.index(max(around))]
        assert best.low <= token < best.high


def test_a_token_changes_hands_only_where_an_answer_from_it_would_be_cut_off():
    first, second, *_ = cut_windows(20, 10, 5, 5)
    assert (first.stop, first.high, second.low) == (10, 6, 6)  # 5 to 9 is whole in the first, 6 to 10 is not
    first, second, *_ = cut_windows(20, 10, 5, 2)
    assert (first.high, second.low) == (8, 8)  # the middle of what both have, 5 to 9
