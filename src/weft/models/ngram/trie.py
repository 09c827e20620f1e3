"""Look-up tables of an n-gram model: a sorted trie in arrays, with queries compiled by numba.

The nodes are the n-grams in lexicographic order, those of k words before those of k + 1:

    words     the last word of each n-gram
    first     the first child of each, the n-grams that extend it by a word; they end at the next node's first child
    logp      log p(its last word | the others)
    values    log γ, the back-off weight of each as a context; most share few distinct values, so that
    codes     are indices into `values`; without codes each n-gram has its own value

A word takes 2 bytes in a vocabulary below 65,536, else 4. So an n-gram of the highest order takes 6 bytes, a lower one
12, and the arrays are memory-mapped from the file.

A context is represented by its nodes of all lengths: of its last word, its last two, and so on, as far as they exist.
The next word is searched among the children of each, from the shortest context to the longest: a word that does not
follow one context does not follow a longer one.
"""

from dataclasses import dataclass

import numpy as np

from weft.jit import Array, jit_compile
from weft.models.ngram.external_sort import run_threads, word_type

CODES = 2**16  # the range of a code
_LANES = 32  # binary searches that are interleaved
_MIN_THREADED = 1 << 15  # tokens from which on threads pay off


@dataclass(frozen=True)
class NGramTables:
    """Arrays as above; `orders` are the offsets of the orders, and the total."""

    orders: Array  # (n + 1,) int64
    words: Array  # (G,) uint16 or uint32
    first: Array  # (orders[n - 1] + 1,) uint32
    logp: Array  # (G,) float32
    codes: Array  # (orders[n - 1],) uint16, or none
    values: Array  # float32

    @property
    def order(self) -> int:
        """n, the length of the longest n-grams."""
        return len(self.orders) - 1

    @property
    def vocab(self) -> int:
        """The size of the vocabulary."""
        return int(self.orders[1])

    def gammas(self, which: slice) -> Array:
        """Return log γ of a slice of nodes."""
        return self.values[self.codes[which]] if len(self.codes) else self.values[which]

    def level(self, order: int) -> slice:
        """Return the slice of the nodes of an order."""
        return slice(int(self.orders[order - 1]), int(self.orders[order]))

    @property
    def _arrays(self) -> tuple[Array, ...]:
        return self.words, self.first, self.logp, self.codes, self.values

    def score(self, ids: Array, starts: Array, targets: Array, threads: int = 1) -> Array:
        """Return log p of each target (N,), given the ids of its sequence up to its position."""
        self._check(ids, targets)
        scores, is_start = np.empty(len(ids), np.float32), _start_mask(len(ids), starts)
        parts = threads if len(ids) > _MIN_THREADED else 1
        cuts = starts[np.searchsorted(starts, np.arange(parts + 1) * len(ids) // parts)]

        def look_up(part: int) -> None:
            own = slice(cuts[part], cuts[part + 1])
            _score(*self._arrays, self.order - 1, ids[own], is_start[own], targets[own], scores[own])

        run_threads(parts, look_up)
        return scores

    def contexts(self, ids: Array, starts: Array) -> Array:
        """Return the context after each token, (N, n - 1): the nodes of the last word, last two and so on, or -1."""
        self._check(ids)
        nodes, depths = np.zeros((self.order - 1, len(ids) + 1), np.uint32), np.zeros(len(ids) + 1, np.uint8)
        if self.order > 1:
            _find_contexts(self.words, self.first, ids, _start_mask(len(ids), starts), nodes, depths)
        exists = np.arange(self.order - 1) < depths[1:, None]
        return np.where(exists, nodes[:, 1:].T.astype(np.int64), -1)

    def step(self, contexts: Array, ids: Array) -> Array:
        """Return the contexts (B, n - 1) extended by one word each."""
        self._check(ids)
        extended = np.full_like(contexts, -1)
        _extend(self.words, self.first, contexts, ids, extended)
        return extended

    def _check(self, *ids: Array) -> None:
        """Assert that ids are in the vocabulary: others would read outside of the arrays."""
        for array in ids:
            assert not len(array) or (array.min() >= 0 and array.max() < self.vocab), "ids are of the vocabulary"

    def rows(self, contexts: Array) -> Array:
        """Return log p of all words given contexts (B, n - 1): (B, V)."""
        out = np.empty((len(contexts), self.vocab), np.float32)
        _log_probs(*self._arrays, contexts, out)
        return out

    def is_consistent(self, vocab: int, order: int) -> bool:
        """Return whether no look-up can leave the arrays: files are untrusted."""
        orders = self.orders.astype(np.int64)
        if len(orders) != order + 1 or orders[0] != 0 or orders[1] != vocab or (np.diff(orders) < 0).any():
            return False
        size, inner = int(orders[-1]), int(orders[-2])
        if not len(self.words) == len(self.logp) == size or len(self.first) != inner + 1:
            return False
        if len(self.codes) not in (0, inner) or (not len(self.codes) and len(self.values) != inner):
            return False
        ordered = (self.first[:-1] <= self.first[1:]).all() and self.first[-1] == size
        inside = self.words.max() < vocab and (order == 1 or self.first[0] == vocab)
        return bool(ordered and inside and (not len(self.codes) or int(self.codes.max()) < len(self.values)))


def _start_mask(size: int, starts: Array) -> Array:
    """Return the mask (N,) of the first tokens of sequences."""
    mask = np.zeros(size + 1, bool)
    mask[starts] = True
    return mask[:-1]


def uniform_tables(vocab: int, order: int) -> NGramTables:
    """Return the tables of the uniform distribution, before any fit."""
    orders = np.full(order + 1, vocab, np.int64)
    orders[0] = 0
    inner = int(orders[order - 1])
    return NGramTables(
        orders,
        np.arange(vocab).astype(word_type(vocab)),
        np.full(inner + 1, vocab, np.uint32),
        np.full(vocab, -np.log(vocab), np.float32),
        np.zeros(inner, np.uint16),
        np.zeros(1, np.float32),
    )


def code_values(gammas: Array) -> tuple[Array, Array]:
    """Return codes and distinct values, or, with too many distinct values, no codes and the input."""
    values = np.empty(CODES, np.float32)
    codes = np.empty(len(gammas), np.uint16)
    size = _code(gammas.view(np.uint32), values.view(np.uint32), codes)
    return (codes, values[:size].copy()) if size >= 0 else (codes[:0], gammas)


@jit_compile
def _code(gammas: Array, values: Array, codes: Array) -> int:
    """Write codes in the order of first occurrence, by an open-addressing hash table; -1: too many values."""
    mask = np.uint32(4 * len(values) - 1)
    slots = np.full(4 * len(values), -1, np.int32)
    size = 0
    for number in range(len(gammas)):
        bits = gammas[number]
        slot = ((bits * np.uint32(2654435769)) >> np.uint32(13)) & mask
        while slots[slot] >= 0 and values[slots[slot]] != bits:
            slot = (slot + np.uint32(1)) & mask
        if slots[slot] < 0:
            if size == len(values):
                return -1
            values[size], slots[slot] = bits, size
            size += 1
        codes[number] = slots[slot]
    return size


@jit_compile
def child(words: Array, first: Array, node: int, word: int) -> int:
    """Return the child of a node by a word; -1: none."""
    low, size = np.int64(first[node]), np.int64(first[node + 1]) - np.int64(first[node])
    if size == 0:
        return -1
    while size > 1:  # branchless binary search
        half = size >> 1
        low += half if words[low + half] <= word else 0
        size -= half
    return int(low) if words[low] == word else -1


@jit_compile
def _find_contexts(words: Array, first: Array, ids: Array, is_start: Array, nodes: Array, depths: Array) -> None:
    """Write the context after each word: column i + 1 of `nodes` is after word i, column 0 before the first.

    depths[i] is the number of nodes in column i. All positions are searched for one length before the next, and many
    binary searches are interleaved, to overlap their memory latencies.
    """
    lanes, low, sizes = np.empty(_LANES, np.int64), np.empty(_LANES, np.int64), np.empty(_LANES, np.int64)
    for position in range(len(ids)):
        nodes[0, position + 1], depths[position + 1] = ids[position], 1
    for length in range(1, len(nodes)):
        count = 0
        for position in range(len(ids)):
            if depths[position] >= length and depths[position + 1] == length and not is_start[position]:
                node = nodes[length - 1, position]
                lanes[count], low[count], sizes[count] = position, first[node], np.int64(first[node + 1]) - first[node]
                count += sizes[count] > 0  # else it has no children
            if count == _LANES or position + 1 == len(ids):
                _search_lanes(words, ids, lanes[:count], low, sizes)
                for lane in range(count):
                    nodes[length, lanes[lane] + 1] = low[lane]
                    depths[lanes[lane] + 1] += low[lane] >= 0
                count = 0


@jit_compile
def _search_lanes(words: Array, ids: Array, lanes: Array, low: Array, sizes: Array) -> None:
    """Binary search for ids[lanes] in the ranges of `sizes` nodes from `low` on; `low` becomes the node, -1: none."""
    largest = np.int64(0)
    for lane in range(len(lanes)):
        largest = max(largest, sizes[lane])
    while largest > 1:
        for lane in range(len(lanes)):
            half = sizes[lane] >> 1
            low[lane] += half if words[low[lane] + half] <= ids[lanes[lane]] else 0
            sizes[lane] -= half
        largest -= largest >> 1
    for lane in range(len(lanes)):
        if words[low[lane]] != ids[lanes[lane]]:
            low[lane] = -1


@jit_compile
def _extend(words: Array, first: Array, contexts: Array, ids: Array, extended: Array) -> None:
    for row in range(len(ids)):
        node = np.int64(ids[row])
        for length in range(contexts.shape[1]):
            extended[row, length] = node
            if length + 1 == contexts.shape[1] or contexts[row, length] < 0:
                break
            node = child(words, first, contexts[row, length], ids[row])
            if node < 0:
                break


@jit_compile
def _score(
    words: Array, first: Array, logp: Array, codes: Array, values: Array,
    longest: int, ids: Array, is_start: Array, targets: Array, scores: Array,
) -> None:  # fmt: skip
    nodes, depths = np.empty((longest, len(ids) + 1), np.uint32), np.zeros(len(ids) + 2, np.uint8)
    if longest:
        _find_contexts(words, first, ids, is_start, nodes, depths)
    for i in range(len(ids)):
        target, context_depth, depth, longer = np.int64(targets[i]), np.int64(depths[i + 1]), np.int64(0), True
        match = target
        if longest and i + 1 < len(ids) and ids[i + 1] == target and not is_start[i + 1]:
            # The target is the next word: all lengths but the longest have been searched.
            depth = np.int64(depths[i + 2]) - 1
            match, longer = np.int64(nodes[depth, i + 2]), depth + 1 == longest
        while longer and depth < context_depth:
            node = child(words, first, nodes[depth, i + 1], target)
            if node < 0:
                break
            match, depth = node, depth + 1
        backoff = np.float32(0)
        for length in range(context_depth - 1, depth - 1, -1):  # in the order of `_log_probs`, for equal sums
            node = nodes[length, i + 1]
            backoff += values[codes[node]] if len(codes) else values[node]
        scores[i] = logp[match] + backoff


@jit_compile
def _log_probs(
    words: Array, first: Array, logp: Array, codes: Array, values: Array, contexts: Array, out: Array
) -> None:
    """Write log p of all words: first the unigrams with back-off, then the children of longer and longer contexts."""
    longest = contexts.shape[1]
    backoff = np.zeros(longest + 1, np.float32)  # summed log γ of the contexts longer than each length
    for row in range(len(contexts)):
        nodes, depth = contexts[row], 0
        while depth < longest and nodes[depth] >= 0:
            depth += 1
        backoff[depth] = 0
        for length in range(depth - 1, -1, -1):
            gamma = values[codes[nodes[length]]] if len(codes) else values[nodes[length]]
            backoff[length] = backoff[length + 1] + gamma
        for word in range(out.shape[1]):
            out[row, word] = logp[word] + backoff[0]
        for length in range(depth):
            for node in range(first[nodes[length]], first[nodes[length] + 1]):
                out[row, words[node]] = logp[node] + backoff[length + 1]
