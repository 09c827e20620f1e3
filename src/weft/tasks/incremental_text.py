"""Text that is shown while it is generated: what a new token adds is shown once it can no longer change."""

from collections.abc import Callable, Iterable, Iterator, Sequence

HALF = "\N{REPLACEMENT CHARACTER}"  # how the beginning of a character is decoded whose rest is still to come


def grown(ids: Iterable[int], decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> Iterator[str]:
    """Yield what each token adds to the text; it ends before the first of the stop words."""
    held: list[int] = []
    shown = text = ""
    for id in ids:
        held.append(id)
        text = decode(held)
        if (end := first_of(text, stop)) is not None:
            yield text[len(shown) : end]
            return
        sure = text[: len(text) - _begun(text, stop)]
        if sure.startswith(shown) and not text.endswith(HALF):
            yield sure[len(shown) :]
            shown = sure
    if text.startswith(shown) and text != shown:  # half a character, or what might have become a stop word
        yield text[len(shown) :]


def first_of(text: str, stop: Sequence[str]) -> int | None:
    """Say where the stop word begins that is complete first, if there is one."""
    found = [(at + len(word), at) for word in stop if (at := text.find(word)) >= 0]
    return min(found)[1] if found else None


def _begun(text: str, stop: Sequence[str]) -> int:
    """Say how much at the end of a text may be the beginning of a stop word."""
    sizes = (size for word in stop for size in range(1, len(word)) if text.endswith(word[:size]))
    return max(sizes, default=0)
