"""Incremental detokenization: the text that each new token adds, once it can no longer change."""

from collections.abc import Callable, Iterable, Iterator, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the decoding of an incomplete UTF-8 sequence


class IncrementalText:
    """The text of a sequence that grows: `add` returns what a token adds, once it can no longer change."""

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, stop
        self._ids: list[int] = []
        self._emitted = self._text = ""
        self.stopped = False  # whether a stop word has come

    def add(self, id: int) -> str:
        """Return the text that a token adds; it ends before the first stop word."""
        self._ids.append(id)
        self._text = text = self._decode(self._ids)
        if (end := find_stop_word(text, self._stop)) is not None:
            self.stopped = True
            return text[len(self._emitted) : end]
        stable = text[: len(text) - _partial_stop_length(text, self._stop)]
        if not stable.startswith(self._emitted) or text.endswith(INCOMPLETE):
            return ""
        added, self._emitted = stable[len(self._emitted) :], stable
        return added

    def end(self) -> str:
        """Return what is left at the end: an incomplete character, or the beginning of a stop word."""
        if self.stopped or not self._text.startswith(self._emitted):
            return ""
        return self._text[len(self._emitted) :]


def grown(ids: Iterable[int], decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> Iterator[str]:
    """Yield the text that each token adds; it ends before the first stop word."""
    text = IncrementalText(decode, stop)
    for id in ids:
        yield text.add(id)
        if text.stopped:
            return
    if rest := text.end():
        yield rest


def find_stop_word(text: str, stop: Sequence[str]) -> int | None:
    """Return the start of the stop word that ends first, None if there is none."""
    matches = [(start + len(word), start) for word in stop if (start := text.find(word)) >= 0]
    return min(matches)[1] if matches else None


def _partial_stop_length(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest suffix that may be the beginning of a stop word."""
    sizes = (size for word in stop for size in range(1, len(word)) if text.endswith(word[:size]))
    return max(sizes, default=0)
