"""N-gram counts of a corpus of any size, by external merge sort, as a trie.

Only windows are counted: the n words from each position on. The sorted windows are the trie in lexicographic order, as
the n-grams of k words are the distinct k-word prefixes of the windows.

    runs    parts of the corpus that fit into memory, sorted, on disk (`weft.models.ngram.external_sort`)
    merge   k-way merge of all runs into one
    trie    two passes over the merged windows: the number of n-grams of each order, then the n-grams themselves
"""

import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.errors import TrainingError
from weft.jit import Array, jit_compile
from weft.models.ngram.external_sort import Allocator, NGramCorpus, SortedWindows, common_prefix, merge_runs, word_type

MAX_NGRAMS = 2**32 - 1  # the range of a uint32 pointer of the trie


@dataclass(frozen=True)
class Trie:
    """The n-grams of all orders: first all words, then the sorted bigrams, and so on.

    The children of node g, the n-grams that extend it by one word, are the nodes first[g] to first[g + 1]: the orders
    are contiguous, and so are the children.
    """

    orders: Array  # (n + 1,) int64: the offset of each order, and the total
    words: Array  # (G,) the last word of each n-gram
    first: Array  # (orders[n - 1] + 1,) uint32
    counts: Array  # (G,) int64
    allocator: Allocator  # for arrays of the same sizes

    def level(self, order: int) -> slice:
        """Return the slice of the nodes of an order."""
        return slice(int(self.orders[order - 1]), int(self.orders[order]))


def count_ngrams(
    corpus: NGramCorpus, order: int, at_once: int, threads: int, folder: Path | None
) -> Generator[int, None, Trie]:
    """Count all n-grams; yield the number of words of each run once it is sorted, and return the trie.

    A corpus of more than one run takes constant memory: its arrays are memory-mapped files.
    """
    bounds = corpus.run_bounds(at_once)
    allocator = Allocator(len(bounds) > 1, folder)
    try:
        if len(bounds) > 1:
            windows = yield from _merge_runs(corpus, bounds, order, threads, allocator)
        else:
            windows = corpus.sorted_run(*bounds[0], order, threads)
            yield len(corpus.ids)
        trie = build_trie(windows, corpus.vocab, order, allocator)
    except OSError as error:
        place = folder or tempfile.gettempdir()
        raise TrainingError(
            f"{place}: n-grams are sorted here, but: {error.strerror}; make room on the disk"
        ) from error
    trie.counts[corpus.ids[0]] -= len(np.unique(corpus.starts)) - 1  # bos is context, not a predicted word
    return trie


def _merge_runs(
    corpus: NGramCorpus, bounds: list[tuple[int, int]], order: int, threads: int, allocator: Allocator
) -> Generator[int, None, SortedWindows]:
    """Write sorted runs to disk, yield the words of each, and return the merged windows."""
    offsets, folder = [0], allocator.folder
    with tempfile.TemporaryFile(dir=folder) as words, tempfile.TemporaryFile(dir=folder) as counts:
        for start, stop in bounds:
            run = corpus.sorted_run(start, stop, order, threads)
            words.write(run.words.data)
            counts.write(run.counts.data)
            offsets.append(offsets[-1] + len(run.counts))
            yield stop - start
        words.flush()
        counts.flush()
        return merge_runs(
            np.memmap(words, word_type(corpus.vocab), "r", shape=(offsets[-1], order)).view(np.ndarray),
            np.memmap(counts, np.uint32, "r", shape=(offsets[-1],)).view(np.ndarray),
            offsets,
            allocator,
        )


def build_trie(windows: SortedWindows, vocab: int, order: int, allocator: Allocator) -> Trie:
    """Return the trie of sorted windows."""
    orders = np.concatenate([[0, vocab], _order_sizes(windows.words)]).cumsum()
    if orders[-1] > MAX_NGRAMS:
        raise TrainingError(
            f"model: {orders[-1]:,} n-grams are more than its tables hold, {MAX_NGRAMS:,}; lower model.order"
        )
    words = allocator.empty(int(orders[-1]), word_type(vocab))
    first, counts = allocator.empty(int(orders[order - 1]) + 1, np.uint32), allocator.empty(len(words), np.int64)
    words[:vocab] = np.arange(vocab)
    counts[:] = 0
    _fill_trie(*windows, orders, words, first, counts)
    return Trie(orders, words, first, counts, allocator)


@jit_compile
def _order_sizes(words: Array) -> Array:
    """Return the number of n-grams of each order from 2 on."""
    order = words.shape[1]
    sizes = np.zeros(order + 1, np.int64)
    for row in range(len(words)):
        same = common_prefix(words, row, row - 1) if row else 0
        for length in range(same + 1, order + 1):
            sizes[length] += words[row, length - 1] != 0
    return sizes[2:]


@jit_compile
def _fill_trie(windows: Array, counts: Array, orders: Array, words: Array, first: Array, totals: Array) -> None:
    """Write the nodes of sorted windows; `path` is the current window's nodes, `next_node` the next of each order."""
    order = windows.shape[1]
    next_node, path, next_word = orders[:-1].copy(), np.zeros(order, np.int64), 0
    for row in range(len(windows)):
        same = common_prefix(windows, row, row - 1) if row else 0
        for depth in range(order):
            word = np.int64(windows[row, depth]) - 1
            if word < 0:
                break
            if depth >= same:
                path[depth] = word if depth == 0 else next_node[depth]
                words[path[depth]] = word
                next_node[depth] = path[depth] + 1
                if depth == 0 and order > 1:  # words that begin no window have no children
                    first[next_word : word + 1] = next_node[1]
                    next_word = int(word) + 1
                elif depth < order - 1:
                    first[path[depth]] = next_node[depth + 1]
            totals[path[depth]] += counts[row]
    if order > 1:
        first[next_word : orders[1]] = next_node[1]
    first[orders[order - 1]] = orders[order]
