"""Windows over a passage: all of it is read, and every span that can be an answer is some one window's own."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from weft.tasks.qa.windows import PassageWindow, cut_windows

SIZES = st.integers(0, 90), st.integers(1, 40), st.integers(1, 60), st.integers(1, 20)


def spans_of(cuts, longest):
    """List the spans of at most so many tokens that windows offer: those that start at their own tokens."""
    return [
        (start, stop)
        for cut in cuts
        for start in range(cut.low, cut.high)
        for stop in range(start + 1, min(start + longest, cut.stop) + 1)
    ]


@given(*SIZES)
def test_windows_cover_a_passage_and_each_token_is_the_own_of_one(size, room, stride, answer):
    cuts = cut_windows(size, room, stride, answer)
    assert cuts[0].start == 0
    assert cuts[-1].stop == size
    assert [token for cut in cuts for token in range(cut.low, cut.high)] == list(range(size))
    for cut in cuts:
        assert cut.start <= cut.low <= cut.high <= cut.stop <= cut.start + room
    for one, other in pairwise(cuts):
        assert one.start < other.start <= min(one.stop, one.start + stride)
        assert one.stop < other.stop  # none is inside another


@given(*SIZES)
def test_every_span_is_offered_once_where_windows_are_twice_as_long_as_answers(size, room, stride, answer):
    answer = min(answer, max(room // 2, 1))
    found = Counter(spans_of(cut_windows(size, room, stride, answer), answer))
    every = [(start, stop) for start in range(size) for stop in range(start + 1, min(start + answer, size) + 1)]
    assert found == Counter(every)


def test_windows_that_do_not_overlap_would_lose_spans():
    apart = [PassageWindow(0, 4, 0, 4), PassageWindow(4, 8, 4, 8)]
    assert (3, 5) not in spans_of(apart, 2)
    assert (3, 5) in spans_of(cut_windows(8, 4, 4, 2), 2)


def test_they_go_by_the_stride_and_what_fits_is_one():
    assert [cut[:2] for cut in cut_windows(300, 200, 50, 30)] == [(0, 200), (50, 250), (100, 300)]
    assert cut_windows(200, 200, 50, 30) == [PassageWindow(0, 200, 0, 200)]
    assert cut_windows(0, 10, 5, 3) == [PassageWindow(0, 0, 0, 0)]


def test_a_token_is_the_own_of_the_window_with_most_around_it():
    cuts = cut_windows(300, 200, 50, 30)  # as _check_is_max_context of the code of Devlin et al. 2019 has it
    for token in range(300):
        around = [min(token - cut.start, cut.stop - 1 - token) if cut.start <= token < cut.stop else -1 for cut in cuts]
        best = cuts[around.index(max(around))]
        assert best.low <= token < best.high


def test_a_token_changes_hands_only_where_an_answer_from_it_would_be_cut_off():
    first, second, *_ = cut_windows(20, 10, 5, 5)
    assert (first.stop, first.high, second.low) == (10, 6, 6)  # 5 to 9 is whole in the first, 6 to 10 is not
    first, second, *_ = cut_windows(20, 10, 5, 2)
    assert (first.high, second.low) == (8, 8)  # the middle of what both have, 5 to 9
