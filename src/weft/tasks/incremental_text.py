"""Incremental detokenization: the text that each new token adds, once it can no longer change."""

from collections.abc import Callable, Iterable, Iterator, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the decoding of an incomplete UTF-8 sequence


def grown(ids: Iterable[int], decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> Iterator[str]:
    """Yield the text that each token adds; it ends before the first stop word."""
    seen: list[int] = []
    emitted = text = ""
    for id in ids:
        seen.append(id)
        text = decode(seen)
        if (end := find_stop_word(text, stop)) is not None:
            yield text[len(emitted) : end]
            return
        stable = text[: len(text) - _partial_stop_length(text, stop)]
        if stable.startswith(emitted) and not text.endswith(INCOMPLETE):
            yield stable[len(emitted) :]
            emitted = stable
    if text.startswith(emitted) and text != emitted:  # an incomplete character, or the beginning of a stop word
        yield text[len(emitted) :]


def find_stop_word(text: str, stop: Sequence[str]) -> int | None:
    """Return the start of the stop word that ends first, None if there is none."""
    matches = [(start + len(word), start) for word in stop if (start := text.find(word)) >= 0]
    return min(matches)[1] if matches else None


def _partial_stop_length(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest suffix that may be the beginning of a stop word."""
    sizes = (size for word in stop for size in range(1, len(word)) if text.endswith(word[:size]))
    return max(sizes, default=0)
