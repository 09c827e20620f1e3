"""How often each n-gram stands in a corpus, whatever the corpus's size.

Windows are all that is counted: the n words from each place on. Sorted, they are a trie in the order of its n-grams,
for those of k words are the windows' distinct beginnings of k words.

    runs    pieces of the corpus that fit into memory, sorted, on the disk (`weft.models.ngram.external_sort`)
    merge   all runs, read side by side, become one
    trie    the merged windows, read twice: how many n-grams of each order there are, then the n-grams themselves
"""

import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.errors import TrainingError
from weft.models.ngram.external_sort import Array, Corpus, Room, Windows, compiled, merge, shared, word_type

MOST = 2**32 - 1  # n-grams: what a pointer of the tables holds


@dataclass(frozen=True)
class Trie:
    """The n-grams of all orders: first all words, then those of two in order, and so on.

    The n-grams that go on from number g by one more word are those from number first[g] to first[g + 1]: as the orders
    lie end to end, so do these.
    """

    orders: Array  # (n + 1,) int64: where each order begins, and where the last one ends
    words: Array  # (G,) the last word of each
    first: Array  # (orders[n - 1] + 1,) uint32
    counts: Array  # (G,) int64
    room: Room  # where the arrays that go with it lie

    def level(self, order: int) -> slice:
        """Return where the n-grams of an order lie."""
        return slice(int(self.orders[order - 1]), int(self.orders[order]))


def count(corpus: Corpus, order: int, at_once: int, threads: int, folder: Path | None) -> Generator[int, None, Trie]:
    """Count all n-grams; yield the words of each run once it is sorted, and return the trie.

    A corpus of more than one run is counted in memory that does not grow: what grows lies on the disk.
    """
    pieces = corpus.pieces(at_once)
    room = Room(len(pieces) > 1, folder)
    try:
        if len(pieces) > 1:
            windows = yield from _merged(corpus, pieces, order, threads, room)
        else:
            windows = corpus.run(*pieces[0], order, threads)
            yield len(corpus.ids)
        trie = grow(windows, corpus.vocab, order, room)
    except OSError as error:
        place = folder or tempfile.gettempdir()
        raise TrainingError(
            f"{place}: n-grams are sorted here, but: {error.strerror}; make room on the disk"
        ) from error
    trie.counts[corpus.ids[0]] -= len(np.unique(corpus.starts)) - 1  # a beginning is no word that was said
    return trie


def _merged(
    corpus: Corpus, pieces: list[tuple[int, int]], order: int, threads: int, room: Room
) -> Generator[int, None, Windows]:
    """Sort runs onto the disk, and merge them."""
    bounds = [0]
    with tempfile.TemporaryFile(dir=room.folder) as words, tempfile.TemporaryFile(dir=room.folder) as counts:
        for start, stop in pieces:
            run = corpus.run(start, stop, order, threads)
            words.write(run.words.data)
            counts.write(run.counts.data)
            bounds.append(bounds[-1] + len(run.counts))
            yield stop - start
        words.flush()
        counts.flush()
        return merge(
            np.memmap(words, word_type(corpus.vocab), "r", shape=(bounds[-1], order)).view(np.ndarray),
            np.memmap(counts, np.uint32, "r", shape=(bounds[-1],)).view(np.ndarray),
            bounds,
            room,
        )


def grow(windows: Windows, vocab: int, order: int, room: Room) -> Trie:
    """Make the trie of sorted windows."""
    orders = np.concatenate([[0, vocab], _sizes(windows.words)]).cumsum()
    if orders[-1] > MOST:
        raise TrainingError(f"model: {orders[-1]:,} n-grams are more than its tables hold, {MOST:,}; lower model.order")
    words = room.empty(int(orders[-1]), word_type(vocab))
    first, counts = room.empty(int(orders[order - 1]) + 1, np.uint32), room.empty(len(words), np.int64)
    words[:vocab] = np.arange(vocab)
    counts[:] = 0
    _fill(*windows, orders, words, first, counts)
    return Trie(orders, words, first, counts, room)


@compiled
def _sizes(words: Array) -> Array:
    """Count the n-grams of order 2 and more."""
    order = words.shape[1]
    sizes = np.zeros(order + 1, np.int64)
    for number in range(len(words)):
        same = shared(words, number, number - 1) if number else 0
        for length in range(same + 1, order + 1):
            sizes[length] += words[number, length - 1] != 0
    return sizes[2:]


@compiled
def _fill(windows: Array, counts: Array, orders: Array, words: Array, first: Array, totals: Array) -> None:
    order = windows.shape[1]
    at, path, opened = orders[:-1].copy(), np.zeros(order, np.int64), 0
    for number in range(len(windows)):
        same = shared(windows, number, number - 1) if number else 0
        for depth in range(order):
            word = np.int64(windows[number, depth]) - 1
            if word < 0:
                break
            if depth >= same:
                path[depth] = word if depth == 0 else at[depth]
                words[path[depth]] = word
                at[depth] = path[depth] + 1
                if depth == 0 and order > 1:  # words that begin no window are passed over
                    first[opened : word + 1] = at[1]
                    opened = int(word) + 1
                elif depth < order - 1:
                    first[path[depth]] = at[depth + 1]
            totals[path[depth]] += counts[number]
    if order > 1:
        first[opened : orders[1]] = at[1]
    first[orders[order - 1]] = orders[order]
