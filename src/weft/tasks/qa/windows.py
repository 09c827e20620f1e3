"""A passage in windows that overlap."""

from typing import NamedTuple


class Cut(NamedTuple):
    """A stretch of a passage, in tokens, and which of them are its own to start an answer at."""

    start: int
    stop: int
    low: int
    high: int


def cut_windows(size: int, room: int, stride: int, answer: int) -> list[Cut]:
    """Cut a passage into windows that overlap, so that every span of so many tokens starts at one window's own token.

    A token that is in several is that window's own in which more of the passage stands around it, as in the code of
    Devlin et al. 2019; but no answer may be cut off by that. Both hold where windows are twice as long as answers.
    """
    step = min(stride, room - min(answer, room // 2))
    starts = list(range(0, max(size - room, 0) + step, step))
    stops = [min(start + room, size) for start in starts]
    bounds = [0]
    for start, stop in zip(starts[1:], stops, strict=False):
        middle = (start + stop + 1) // 2
        bounds.append(min(middle, max(start, stop - answer + 1)))
    return [Cut(*cut) for cut in zip(starts, stops, bounds, [*bounds[1:], size], strict=True)]
