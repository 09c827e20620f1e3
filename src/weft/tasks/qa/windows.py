"""Overlapping windows over a passage (doc stride)."""

from typing import NamedTuple


class PassageWindow(NamedTuple):
    """A window of a passage, tokens start to stop, and the tokens at which its answers may start, low to high."""

    start: int
    stop: int
    low: int
    high: int


def cut_windows(size: int, room: int, stride: int, answer: int) -> list[PassageWindow]:
    """Return overlapping windows of `room` tokens; each span of up to `answer` tokens starts at one window's own token.

    A token in several windows belongs to the one where it has the most context, as in the code of Devlin et al. 2019
    (`_check_is_max_context`), unless that cuts an answer off. Both hold where windows are twice as long as answers.
    """
    step = min(stride, room - min(answer, room // 2))
    starts = list(range(0, max(size - room, 0) + step, step))
    stops = [min(start + room, size) for start in starts]
    bounds = [0]
    for start, stop in zip(starts[1:], stops, strict=False):
        middle = (start + stop + 1) // 2
        bounds.append(min(middle, max(start, stop - answer + 1)))
    bounds_after = [*bounds[1:], size]
    return [PassageWindow(*window) for window in zip(starts, stops, bounds, bounds_after, strict=True)]
