"""The tables of an n-gram model, and how they are looked up.

A table is a trie in arrays, its n-grams in the order of their words, those of k words before those of k + 1:

    words     the last word of each n-gram
    first     where the n-grams begin that go on from it by a word; they end where those of the next one begin
    logp      log p(its last word | the others)
    values    log γ(it), what it costs to look past it where it is the context; most have one of few values, so
    codes     says which; where there are none, each has its own value

A word takes 2 bytes in a vocabulary below 65,536, else 4. So an n-gram of the highest order takes 6 bytes, a lower one
12, and it is where the file has it: memory-mapped.

A context is followed in all its lengths at once: the numbers of its last word, of its last two, and so on, as long as
they are there. The next word is then looked for among what goes on from each, from the shortest to the longest: where
it is not found after one context, it is not there after a longer one.
"""

from dataclasses import dataclass

import numpy as np

from weft.models.ngram.external_sort import Array, compiled, share, word_type

CODES = 2**16  # how many values of log γ a code can tell apart
_LANES = 32  # words that are looked up side by side
_APART = 1 << 15  # words from which on it pays to share them among threads


@dataclass(frozen=True)
class Tables:
    """Arrays as above; `orders` says where each order begins, and where the last one ends."""

    orders: Array  # (n + 1,) int64
    words: Array  # (G,) uint16 or uint32
    first: Array  # (orders[n - 1] + 1,) uint32
    logp: Array  # (G,) float32
    codes: Array  # (orders[n - 1],) uint16, or none
    values: Array  # float32

    @property
    def order(self) -> int:
        """How many words the longest n-grams have."""
        return len(self.orders) - 1

    @property
    def vocab(self) -> int:
        """How many words there are."""
        return int(self.orders[1])

    def gammas(self, which: slice) -> Array:
        """Return log γ of some n-grams."""
        return self.values[self.codes[which]] if len(self.codes) else self.values[which]

    def level(self, order: int) -> slice:
        """Return where the n-grams of an order lie."""
        return slice(int(self.orders[order - 1]), int(self.orders[order]))

    @property
    def _read(self) -> tuple[Array, ...]:
        return self.words, self.first, self.logp, self.codes, self.values

    def score(self, ids: Array, starts: Array, targets: Array, threads: int = 1) -> Array:
        """Return log p of each target (N,), after the ids up to its place in its sequence."""
        self._check(ids, targets)
        scores, begins = np.empty(len(ids), np.float32), _begins(len(ids), starts)
        parts = threads if len(ids) > _APART else 1
        cuts = starts[np.searchsorted(starts, np.arange(parts + 1) * len(ids) // parts)]

        def look_up(part: int) -> None:
            own = slice(cuts[part], cuts[part + 1])
            _score(*self._read, self.order - 1, ids[own], begins[own], targets[own], scores[own])

        share(parts, look_up)
        return scores

    def contexts(self, ids: Array, starts: Array) -> Array:
        """Follow sequences: for each place, (N, n - 1) numbers of the last word, the last two and so on, or -1."""
        self._check(ids)
        found, known = np.zeros((self.order - 1, len(ids) + 1), np.uint32), np.zeros(len(ids) + 1, np.uint8)
        if self.order > 1:
            _follow(self.words, self.first, ids, _begins(len(ids), starts), found, known)
        there = np.arange(self.order - 1) < known[1:, None]
        return np.where(there, found[:, 1:].T.astype(np.int64), -1)

    def step(self, contexts: Array, ids: Array) -> Array:
        """Follow contexts (B, n - 1) by one word each."""
        self._check(ids)
        after = np.full_like(contexts, -1)
        _step(self.words, self.first, contexts, ids, after)
        return after

    def _check(self, *ids: Array) -> None:
        """Words that are none would be looked up outside of the tables."""
        assert all(not len(one) or (one.min() >= 0 and one.max() < self.vocab) for one in ids), (
            "ids are of the vocabulary"
        )

    def rows(self, contexts: Array) -> Array:
        """Return log p of all words after contexts (B, n - 1): (B, V)."""
        out = np.empty((len(contexts), self.vocab), np.float32)
        _spread(*self._read, contexts, out)
        return out

    def is_consistent(self, vocab: int, order: int) -> bool:
        """Say whether no look-up can leave the arrays: a file is not to be trusted."""
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


def _begins(size: int, starts: Array) -> Array:
    """Mark the places where sequences begin."""
    begins = np.zeros(size + 1, bool)
    begins[starts] = True
    return begins[:-1]


def uniform(vocab: int, order: int) -> Tables:
    """Return the tables of a model that has read nothing."""
    orders = np.full(order + 1, vocab, np.int64)
    orders[0] = 0
    inner = int(orders[order - 1])
    return Tables(
        orders,
        np.arange(vocab).astype(word_type(vocab)),
        np.full(inner + 1, vocab, np.uint32),
        np.full(vocab, -np.log(vocab), np.float32),
        np.zeros(inner, np.uint16),
        np.zeros(1, np.float32),
    )


def coded(gammas: Array) -> tuple[Array, Array]:
    """Return codes and values of numbers, or, where too many differ, no codes and the numbers."""
    values = np.empty(CODES, np.float32)
    codes = np.empty(len(gammas), np.uint16)
    size = _code(gammas.view(np.uint32), values.view(np.uint32), codes)
    return (codes, values[:size].copy()) if size >= 0 else (codes[:0], gammas)


@compiled
def _code(gammas: Array, values: Array, codes: Array) -> int:
    """Number values in the order in which they come, by a table of hashes; -1: they are too many."""
    mask = np.uint32(4 * len(values) - 1)
    places = np.full(4 * len(values), -1, np.int32)
    size = 0
    for number in range(len(gammas)):
        bits = gammas[number]
        place = ((bits * np.uint32(2654435769)) >> np.uint32(13)) & mask
        while places[place] >= 0 and values[places[place]] != bits:
            place = (place + np.uint32(1)) & mask
        if places[place] < 0:
            if size == len(values):
                return -1
            values[size], places[place] = bits, size
            size += 1
        codes[number] = places[place]
    return size


@compiled
def child(words: Array, first: Array, node: int, word: int) -> int:
    """Find what goes on from an n-gram by a word; -1: nothing."""
    low, size = np.int64(first[node]), np.int64(first[node + 1]) - np.int64(first[node])
    if size == 0:
        return -1
    while size > 1:  # without a branch that could be guessed wrongly
        half = size >> 1
        low += half if words[low + half] <= word else 0
        size -= half
    return int(low) if words[low] == word else -1


@compiled
def _follow(words: Array, first: Array, ids: Array, begins: Array, found: Array, known: Array) -> None:
    """Follow words from the state in the first column of `found`; column i + 1 is after word i.

    `known` says how many of a column's numbers are there. All places take the step to one length before any takes the
    next, and many are looked up side by side: no look-up then waits for the memory of another.
    """
    lanes, low, left = np.empty(_LANES, np.int64), np.empty(_LANES, np.int64), np.empty(_LANES, np.int64)
    for place in range(len(ids)):
        found[0, place + 1], known[place + 1] = ids[place], 1
    for length in range(1, len(found)):
        size = 0
        for place in range(len(ids)):
            if known[place] >= length and known[place + 1] == length and not begins[place]:
                node = found[length - 1, place]
                lanes[size], low[size], left[size] = place, first[node], np.int64(first[node + 1]) - first[node]
                size += left[size] > 0  # else nothing goes on from there
            if size == _LANES or place + 1 == len(ids):
                _find(words, ids, lanes[:size], low, left)
                for lane in range(size):
                    found[length, lanes[lane] + 1] = low[lane]
                    known[lanes[lane] + 1] += low[lane] >= 0
                size = 0


@compiled
def _find(words: Array, ids: Array, lanes: Array, low: Array, left: Array) -> None:
    """Halve many stretches of `left` numbers from `low` on until each has one; -1: it is not the word looked for."""
    most = np.int64(0)
    for lane in range(len(lanes)):
        most = max(most, left[lane])
    while most > 1:
        for lane in range(len(lanes)):
            half = left[lane] >> 1
            low[lane] += half if words[low[lane] + half] <= ids[lanes[lane]] else 0
            left[lane] -= half
        most -= most >> 1
    for lane in range(len(lanes)):
        if words[low[lane]] != ids[lanes[lane]]:
            low[lane] = -1


@compiled
def _step(words: Array, first: Array, contexts: Array, ids: Array, after: Array) -> None:
    for row in range(len(ids)):
        node = np.int64(ids[row])
        for length in range(contexts.shape[1]):
            after[row, length] = node
            if length + 1 == contexts.shape[1] or contexts[row, length] < 0:
                break
            node = child(words, first, contexts[row, length], ids[row])
            if node < 0:
                break


@compiled
def _score(
    words: Array, first: Array, logp: Array, codes: Array, values: Array,
    longest: int, ids: Array, begins: Array, targets: Array, scores: Array,
) -> None:  # fmt: skip
    found, known = np.empty((longest, len(ids) + 1), np.uint32), np.zeros(len(ids) + 2, np.uint8)
    if longest:
        _follow(words, first, ids, begins, found, known)
    for place in range(len(ids)):
        target, deep, depth, further = np.int64(targets[place]), np.int64(known[place + 1]), np.int64(0), True
        hit = target
        if longest and place + 1 < len(ids) and ids[place + 1] == target and not begins[place + 1]:
            depth = (
                np.int64(known[place + 2]) - 1
            )  # the target is the next word: it has been looked for in all lengths but one
            hit, further = np.int64(found[depth, place + 2]), depth + 1 == longest
        while further and depth < deep:
            node = child(words, first, found[depth, place + 1], target)
            if node < 0:
                break
            hit, depth = node, depth + 1
        cost = np.float32(0)
        for length in range(deep - 1, depth - 1, -1):  # in the order of `_spread`: the sums are the same
            node = found[length, place + 1]
            cost += values[codes[node]] if len(codes) else values[node]
        scores[place] = logp[hit] + cost


@compiled
def _spread(words: Array, first: Array, logp: Array, codes: Array, values: Array, contexts: Array, out: Array) -> None:
    """Write log p of all words: by the words alone, then over them what longer contexts know better."""
    longest = contexts.shape[1]
    rest = np.zeros(longest + 1, np.float32)  # what the contexts from some length on cost
    for row in range(len(contexts)):
        nodes, depth = contexts[row], 0
        while depth < longest and nodes[depth] >= 0:
            depth += 1
        rest[depth] = 0
        for length in range(depth - 1, -1, -1):
            cost = values[codes[nodes[length]]] if len(codes) else values[nodes[length]]
            rest[length] = rest[length + 1] + cost
        for word in range(out.shape[1]):
            out[row, word] = logp[word] + rest[0]
        for length in range(depth):
            for node in range(first[nodes[length]], first[nodes[length] + 1]):
                out[row, words[node]] = logp[node] + rest[length + 1]
