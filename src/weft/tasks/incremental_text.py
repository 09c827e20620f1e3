"""Incremental detokenization: the text that each new token adds, once it can no longer change."""

from collections.abc import Callable, Iterable, Iterator, Sequence

CONTEXT = 8  # tokens before a sequence on which the text of its first one may depend
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the decoding of an incomplete UTF-8 sequence


class IncrementalText:
    """The text of a sequence that grows: `add` returns what tokens add, once it can no longer change.

    Only the newest tokens are decoded, with those that the text before them came from: a token's text may depend on its
    neighbours, by a space between words or by the bytes of one character. `context` is what comes before the sequence.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        self._decode, self._stop = decode, stop
        self._window = list(context)[-CONTEXT:]  # the tokens of the text before, and those that are new
        self._before = len(self._window)  # how many of them the text before came from
        self._text_before = decode(self._window) if self._window else ""
        self._held = ""  # text that may be the beginning of a stop word
        self.stopped = False  # whether a stop word has come

    def add(self, *ids: int) -> str:
        """Return the text that tokens add; it ends before the first stop word."""
        self._window += ids
        text = self._held + self._take()
        if (end := find_stop_word(text, self._stop)) is not None:
            self.stopped = True
            return text[:end]
        end = len(text) - _partial_stop_length(text, self._stop)
        self._held = text[end:]
        return text[:end]

    def _take(self) -> str:
        """Return the text of the new tokens; nothing as long as it may change."""
        text = self._decode(self._window)
        if text.endswith(INCOMPLETE) or not text.startswith(self._text_before):
            return ""
        if added := text[len(self._text_before) :]:
            self._window = self._window[self._before :]
            self._before, self._text_before = len(self._window), self._decode(self._window)
        return added

    def end(self) -> str:
        """Return what is left at the end: an incomplete character, or the beginning of a stop word."""
        text = self._decode(self._window) if self._window else ""
        if self.stopped or not text.startswith(self._text_before):
            return ""
        return self._held + text[len(self._text_before) :]


def grown(ids: Iterable[int], text: IncrementalText) -> Iterator[str]:
    """Yield the text that each token adds; it ends before the first stop word."""
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
