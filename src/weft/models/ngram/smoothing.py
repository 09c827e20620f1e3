"""Smoothing of n-gram counts: the equations of `weft.models.ngram.model` over a trie.

With g = u w the node of an n-gram, the children of u are contiguous, and suffix links lead from u w to u' w. So each
order is estimated in one pass over its contexts u, which sums the counts of u's children and reads p(w | u') of the
order below.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from weft.jit import Array, jit_compile
from weft.models.ngram.counting import Trie
from weft.models.ngram.external_sort import run_threads
from weft.models.ngram.trie import NGramTables, code_values

_BLOCK = 1 << 22
FALLBACK = (0.5, 1.0, 1.5)  # discounts where an order has too few n-grams: lmplz --discount_fallback


class Estimate(NamedTuple):
    """Probabilities and back-off weights of all n-grams."""

    p: Array  # (G,) p(w | u) of g = u w
    gamma: Array  # (orders[n - 1],) the back-off weight γ(g)
    discounts: Array  # (n, 3)


def kneser_ney(trie: Trie, bos: int, eos: int, keep_mask: Array, threads: int) -> Estimate:
    """Return the interpolated modified Kneser-Ney estimate (Chen & Goodman 1999)."""
    order, p = len(trie.orders) - 1, trie.allocator.empty(len(trie.words), np.float64)
    gamma = trie.allocator.empty(int(trie.orders[order - 1]), np.float64)
    links = suffix_links(trie, threads)
    a = adjusted_counts(trie, links, bos)
    discounts = np.array([estimate_discounts(_histogram(a[trie.level(length)])) for length in range(1, order + 1)])
    first, words = trie.first, trie.level(1)
    _unigrams(a[words], keep_mask[words], discounts[0], _predictable(trie, bos, eos), p[words])
    for length in range(2, order + 1):
        d = np.append(0.0, discounts[length - 1])
        cuts = _cuts(trie, length - 1, threads)
        run_threads(threads, lambda part: _interpolate(first, a, keep_mask, links, d, *cuts[part : part + 2], p, gamma))  # noqa: B023
    return Estimate(p, gamma, discounts)


def suffix_links(trie: Trie, threads: int) -> Array:
    """Return for each n-gram the node of its suffix, the n-gram without its first word."""
    links = trie.allocator.empty(len(trie.words), np.uint32)
    for length in range(2, len(trie.orders)):
        if length == 2:
            links[trie.level(2)] = trie.words[trie.level(2)]
            continue
        cuts = _cuts(trie, length - 1, threads)
        run_threads(threads, lambda part: _link_children(trie.words, trie.first, cuts[part], cuts[part + 1], links))  # noqa: B023
    return links


def adjusted_counts(trie: Trie, links: Array, bos: int) -> Array:
    """Return a(g): the count of the highest order and after bos, otherwise the continuation count."""
    order, a = len(trie.orders) - 1, trie.allocator.empty(len(trie.words), np.int64)
    begin, stop = bos, bos + 1  # the n-grams that begin with bos
    a[:] = trie.counts
    for length in range(1, order):
        a[trie.level(length)] = 0
        _count_links(links[trie.level(length + 1)], a)
        if length > 1:
            begin, stop = int(trie.first[begin]), int(trie.first[stop])
            a[begin:stop] = trie.counts[begin:stop]
    return a


def estimate_discounts(n: Array) -> tuple[float, ...]:
    """Return D_1, D_2 and D_3 from n_r, the number of n-grams with a(g) = r: Chen & Goodman 1999, eq. 26."""
    if not n[1:4].all():
        return FALLBACK
    y = n[1] / (n[1] + 2 * n[2])
    d = tuple(float(r - (r + 1) * y * n[r + 1] / n[r]) for r in (1, 2, 3))
    return d if all(0 <= d[r - 1] <= r for r in (1, 2, 3)) else FALLBACK


def add_k(trie: Trie, bos: int, eos: int, k: float) -> Estimate:
    """Return the add-k estimate, which with k = 0 is maximum likelihood.

    Add-k does not back off to shorter contexts: their p is 1 / |V|, except for contexts that are short because they
    begin with bos.
    """
    order, predictable = len(trie.orders) - 1, _predictable(trie, bos, eos)
    p, gamma = (trie.allocator.empty(size, np.float64) for size in (len(trie.words), int(trie.orders[order - 1])))
    p[:], gamma[:] = 1 / predictable.sum(), 1.0
    counts = trie.counts[trie.level(1)]
    if order == 1 or not k:
        p[trie.level(1)] = (counts + k) / (counts.sum() + k * predictable.sum())
    p[trie.level(1)] *= predictable
    begin, stop = bos, bos + 1
    for length in range(1, order):
        if not k or length == order - 1:
            begin, stop = int(trie.orders[length - 1]), int(trie.orders[length])
        _add_k_order(trie.first, trie.counts, k, k * predictable.sum(), begin, stop, p, gamma)
        begin, stop = int(trie.first[begin]), int(trie.first[stop])
    return Estimate(p, gamma, np.zeros((order, 3)))


def _predictable(trie: Trie, bos: int, eos: int) -> Array:
    """Return the mask (V,) of predictable words: all but bos, unless it is eos, too."""
    mask = np.ones(int(trie.orders[1]), bool)
    mask[bos] = bos == eos
    return mask


def _unigrams(a: Array, keep_mask: Array, discounts: Array, predictable: Array, p: Array) -> None:
    """Write the Kneser-Ney probabilities of words with an empty context."""
    d = np.append(0.0, discounts)[np.minimum(a, 3)]
    gamma = np.where(keep_mask, d, a).sum() / a.sum()
    p[:] = np.where(keep_mask, a - d, 0) / a.sum() + gamma / predictable.sum()
    p *= predictable


def above_thresholds(trie: Trie, prune: Sequence[int], eos: int) -> Array:
    """Return the mask (G,) of n-grams with counts above the threshold of their order in `prune`; eos always is."""
    keep_mask = trie.allocator.empty(len(trie.words), bool)
    for length, threshold in enumerate(prune, 1):
        np.greater(trie.counts[trie.level(length)], threshold, out=keep_mask[trie.level(length)])
    keep_mask[eos] = True
    return keep_mask


def prune_trie(trie: Trie, keep_mask: Array) -> Trie:
    """Return the trie of the n-grams that are kept; pruned unigrams stay, with count 0."""
    keep_mask, unigrams = keep_mask.copy(), trie.level(1)
    trie.counts[unigrams] *= keep_mask[unigrams]
    keep_mask[unigrams] = True
    orders = np.append(0, [np.count_nonzero(keep_mask[: int(end)]) for end in trie.orders[1:]])
    first = trie.allocator.empty(int(orders[-2]) + 1, np.uint32)
    _renumber(trie.first, keep_mask, first)
    words, counts = _select(trie, trie.words, keep_mask), _select(trie, trie.counts, keep_mask)
    return replace(trie, orders=orders, words=words, first=first, counts=counts)


def prune_estimate(trie: Trie, estimate: Estimate, keep_mask: Array) -> Estimate:
    """Return the estimate of the n-grams that are kept."""
    keep_mask = keep_mask.copy()
    keep_mask[trie.level(1)] = True
    p, gamma = _select(trie, estimate.p, keep_mask), _select(trie, estimate.gamma, keep_mask[: len(estimate.gamma)])
    return estimate._replace(p=p, gamma=gamma)


def _select(trie: Trie, values: Array, keep_mask: Array) -> Array:
    """Return values[kept], a block at a time."""
    out, size = trie.allocator.empty(int(np.count_nonzero(keep_mask)), values.dtype), 0
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK][keep_mask[start : start + _BLOCK]]
        out[size : size + len(block)] = block
        size += len(block)
    return out


def make_tables(trie: Trie, estimate: Estimate) -> NGramTables:
    """Return the look-up tables of an estimate."""
    return NGramTables(
        trie.orders, trie.words, trie.first, _log(trie, estimate.p), *code_values(_log(trie, estimate.gamma))
    )


def _log(trie: Trie, values: Array) -> Array:
    """Return log(values), a block at a time."""
    out = trie.allocator.empty(len(values), np.float32)
    with np.errstate(divide="ignore"):  # log 0 is -inf
        for start in range(0, len(values), _BLOCK):
            out[start : start + _BLOCK] = np.log(values[start : start + _BLOCK])
    return out


def _cuts(trie: Trie, length: int, parts: int) -> list[int]:
    """Return the bounds of equal parts of the nodes of an order."""
    begin, stop = int(trie.orders[length - 1]), int(trie.orders[length])
    return [begin + (stop - begin) * part // parts for part in range(parts + 1)]


@jit_compile
def _link_children(words: Array, first: Array, begin: int, stop: int, links: Array) -> None:
    """Write the suffix links of the children of nodes `begin` to `stop`."""
    for node in range(begin, stop):
        shorter = np.int64(links[node])
        low, high = np.int64(first[shorter]), np.int64(first[shorter + 1])
        for longer in range(first[node], first[node + 1]):
            word, step = words[longer], np.int64(1)
            while low + step < high and words[low + step] < word:  # both are sorted: galloping search from the last one
                low, step = low + step, step * 2
            end = min(low + step, high - 1)
            while low < end:
                middle = (low + end) >> 1
                if words[middle] < word:
                    low = middle + 1
                else:
                    end = middle
            links[longer] = low


@jit_compile
def _histogram(a: Array) -> Array:
    """Return how often each of 0 to 4 occurs."""
    n = np.zeros(5, np.int64)
    for g in range(len(a)):
        if a[g] < 5:
            n[a[g]] += 1
    return n


@jit_compile
def _count_links(links: Array, a: Array) -> None:
    for g in range(len(links)):
        a[links[g]] += 1


@jit_compile
def _interpolate(
    first: Array, a: Array, keep_mask: Array, links: Array, d: Array, begin: int, stop: int, p: Array, gamma: Array
) -> None:
    """Write p and γ of the contexts `begin` to `stop`: the first two Kneser-Ney equations."""
    for u in range(begin, stop):
        total, discounted = 0, 0.0
        for g in range(first[u], first[u + 1]):
            total += a[g]
            discounted += d[min(a[g], 3)] if keep_mask[g] else a[g]
        gamma[u] = discounted / total if total else 1.0
        for g in range(first[u], first[u + 1]):
            higher = (a[g] - d[min(a[g], 3)]) / total if keep_mask[g] and total else 0.0
            p[g] = higher + gamma[u] * p[links[g]]


@jit_compile
def _add_k_order(
    first: Array, counts: Array, k: float, added: float, begin: int, stop: int, p: Array, gamma: Array
) -> None:
    """Write p and γ of the contexts `begin` to `stop`; `added` is k |V|."""
    for u in range(begin, stop):
        total = added
        for g in range(first[u], first[u + 1]):
            total += counts[g]
        if total > 0:
            gamma[u] = added / total
        for g in range(first[u], first[u + 1]):
            p[g] = (counts[g] + k) / total


@jit_compile
def _renumber(first: Array, keep_mask: Array, out: Array) -> None:
    """Write `first` for the nodes that are kept, in their new numbers."""
    node, kept_nodes, kept_contexts = 0, 0, 0
    for u in range(len(first)):
        while node < first[u]:
            kept_nodes += keep_mask[node]
            node += 1
        if u == len(first) - 1 or keep_mask[u]:
            out[kept_contexts] = kept_nodes
            kept_contexts += 1
