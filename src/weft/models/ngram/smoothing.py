"""From counts to probabilities: the equations at the head of `weft.models.ngram.model`, over a trie of n-grams.

With g = u w an n-gram's number, what follows u lies side by side, and `links` lead from u w to u' w. So each order is
estimated by one walk over the contexts, which adds up what follows each, and reads p(w | u') of the order before.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from weft.models.ngram.counting import Trie
from weft.models.ngram.external_sort import Array, compiled, share
from weft.models.ngram.trie import Tables, coded

_BLOCK = 1 << 22
FALLBACK = (0.5, 1.0, 1.5)  # discounts where an order has too few n-grams to tell: lmplz --discount_fallback


class Estimate(NamedTuple):
    """What is known of each n-gram."""

    p: Array  # (G,) p(w | u) of g = u w
    gamma: Array  # (orders[n - 1],) γ(g)
    discounts: Array  # (n, 3)


def kneser_ney(trie: Trie, bos: int, eos: int, kept: Array, threads: int) -> Estimate:
    """Interpolated modified Kneser-Ney."""
    order, p = len(trie.orders) - 1, trie.room.empty(len(trie.words), np.float64)
    gamma = trie.room.empty(int(trie.orders[order - 1]), np.float64)
    links = link(trie, threads)
    a = adjusted(trie, links, bos)
    discounts = np.array([discounts_of(_histogram(a[trie.level(length)])) for length in range(1, order + 1)])
    _words(a[trie.level(1)], kept[trie.level(1)], discounts[0], _follow_at_all(trie, bos, eos), p[trie.level(1)])
    for length in range(2, order + 1):
        d = np.append(0.0, discounts[length - 1])
        cuts = _cuts(trie, length - 1, threads)
        share(threads, lambda part: _interpolate(trie.first, a, kept, links, d, cuts[part], cuts[part + 1], p, gamma))  # noqa: B023
    return Estimate(p, gamma, discounts)


def link(trie: Trie, threads: int) -> Array:
    """Return the number of each n-gram without its first word."""
    links = trie.room.empty(len(trie.words), np.uint32)
    for length in range(2, len(trie.orders)):
        if length == 2:
            links[trie.level(2)] = trie.words[trie.level(2)]
            continue
        cuts = _cuts(trie, length - 1, threads)
        share(threads, lambda part: _suffixes(trie.words, trie.first, cuts[part], cuts[part + 1], links))  # noqa: B023
    return links


def adjusted(trie: Trie, links: Array, bos: int) -> Array:
    """Return a(g): its count, or where it is a part of longer ones, how many words it was seen after."""
    order, a = len(trie.orders) - 1, trie.room.empty(len(trie.words), np.int64)
    begin, stop = bos, bos + 1  # the n-grams that begin with bos
    a[:] = trie.counts
    for length in range(1, order):
        a[trie.level(length)] = 0
        _tally(links[trie.level(length + 1)], a)
        if length > 1:
            begin, stop = int(trie.first[begin]), int(trie.first[stop])
            a[begin:stop] = trie.counts[begin:stop]
    return a


def discounts_of(n: Array) -> tuple[float, ...]:
    """Return D_1, D_2 and D_3 from how many n-grams have an a(g) of 1, 2, 3 and 4: Chen & Goodman 1999, eq. 26."""
    if not n[1:4].all():
        return FALLBACK
    y = n[1] / (n[1] + 2 * n[2])
    d = tuple(float(r - (r + 1) * y * n[r + 1] / n[r]) for r in (1, 2, 3))
    return d if all(0 <= d[r - 1] <= r for r in (1, 2, 3)) else FALLBACK


def relative(trie: Trie, bos: int, eos: int, k: float) -> Estimate:
    """Add-k, and with k = 0 maximum likelihood.

    With add-k what a shorter context knows has no part in it: there p is 1 / |V|, unless it is short as bos begins it.
    """
    order, follow = len(trie.orders) - 1, _follow_at_all(trie, bos, eos)
    p, gamma = trie.room.empty(len(trie.words), np.float64), trie.room.empty(int(trie.orders[order - 1]), np.float64)
    p[:], gamma[:] = 1 / follow.sum(), 1.0
    counts = trie.counts[trie.level(1)]
    if order == 1 or not k:
        p[trie.level(1)] = (counts + k) / (counts.sum() + k * follow.sum())
    p[trie.level(1)] *= follow
    begin, stop = bos, bos + 1
    for length in range(1, order):
        if not k or length == order - 1:
            begin, stop = int(trie.orders[length - 1]), int(trie.orders[length])
        _relate(trie.first, trie.counts, k, k * follow.sum(), begin, stop, p, gamma)
        begin, stop = int(trie.first[begin]), int(trie.first[stop])
    return Estimate(p, gamma, np.zeros((order, 3)))


def _follow_at_all(trie: Trie, bos: int, eos: int) -> Array:
    """Say which words can follow: all but bos, unless it is what ends a text too."""
    follow = np.ones(int(trie.orders[1]), bool)
    follow[bos] = bos == eos
    return follow


def _words(a: Array, kept: Array, discounts: Array, follow: Array, p: Array) -> None:
    """Estimate words with no context."""
    d = np.append(0.0, discounts)[np.minimum(a, 3)]
    gamma = np.where(kept, d, a).sum() / a.sum()
    p[:] = np.where(kept, a - d, 0) / a.sum() + gamma / follow.sum()
    p *= follow


def seen_often(trie: Trie, prune: Sequence[int], eos: int) -> Array:
    """Say which n-grams were seen more often than `prune` has it, one number an order; an end always was."""
    kept = trie.room.empty(len(trie.words), bool)
    for length, most in enumerate(prune, 1):
        np.greater(trie.counts[trie.level(length)], most, out=kept[trie.level(length)])
    kept[eos] = True
    return kept


def without(trie: Trie, kept: Array) -> Trie:
    """Leave out n-grams that are not kept; words alone stay, as never seen."""
    kept, words = kept.copy(), trie.level(1)
    trie.counts[words] *= kept[words]
    kept[words] = True
    orders = np.append(0, [np.count_nonzero(kept[: int(end)]) for end in trie.orders[1:]])
    first = trie.room.empty(int(orders[-2]) + 1, np.uint32)
    _renumber(trie.first, kept, first)
    return replace(
        trie, orders=orders, words=_chosen(trie, trie.words, kept), first=first, counts=_chosen(trie, trie.counts, kept)
    )


def among(trie: Trie, found: Estimate, kept: Array) -> Estimate:
    """Leave out what is known of n-grams that are not kept."""
    kept = kept.copy()
    kept[trie.level(1)] = True
    return found._replace(p=_chosen(trie, found.p, kept), gamma=_chosen(trie, found.gamma, kept[: len(found.gamma)]))


def _chosen(trie: Trie, values: Array, kept: Array) -> Array:
    out, at = trie.room.empty(int(np.count_nonzero(kept)), values.dtype), 0
    for start in range(0, len(values), _BLOCK):
        part = values[start : start + _BLOCK][kept[start : start + _BLOCK]]
        out[at : at + len(part)] = part
        at += len(part)
    return out


def tables_of(trie: Trie, found: Estimate) -> Tables:
    """Write probabilities as tables."""
    return Tables(
        trie.orders, trie.words, trie.first, _logarithms(trie, found.p), *coded(_logarithms(trie, found.gamma))
    )


def _logarithms(trie: Trie, values: Array) -> Array:
    out = trie.room.empty(len(values), np.float32)
    with np.errstate(divide="ignore"):  # log 0 is -inf
        for start in range(0, len(values), _BLOCK):
            out[start : start + _BLOCK] = np.log(values[start : start + _BLOCK])
    return out


def _cuts(trie: Trie, length: int, parts: int) -> list[int]:
    begin, stop = int(trie.orders[length - 1]), int(trie.orders[length])
    return [begin + (stop - begin) * part // parts for part in range(parts + 1)]


@compiled
def _suffixes(words: Array, first: Array, begin: int, stop: int, links: Array) -> None:
    """For the n-grams that go on from those from number `begin` to `stop`, find them without their first word."""
    for node in range(begin, stop):
        shorter = np.int64(links[node])
        low, high = np.int64(first[shorter]), np.int64(first[shorter + 1])
        for longer in range(first[node], first[node + 1]):
            word, step = words[longer], np.int64(1)
            while low + step < high and words[low + step] < word:  # both are in order: gallop on from the last
                low, step = low + step, step * 2
            end = min(low + step, high - 1)
            while low < end:
                middle = (low + end) >> 1
                if words[middle] < word:
                    low = middle + 1
                else:
                    end = middle
            links[longer] = low


@compiled
def _histogram(a: Array) -> Array:
    """Count the numbers from 0 to 4."""
    n = np.zeros(5, np.int64)
    for g in range(len(a)):
        if a[g] < 5:
            n[a[g]] += 1
    return n


@compiled
def _tally(links: Array, a: Array) -> None:
    for g in range(len(links)):
        a[links[g]] += 1


@compiled
def _interpolate(
    first: Array, a: Array, kept: Array, links: Array, d: Array, begin: int, stop: int, p: Array, gamma: Array
) -> None:
    for u in range(begin, stop):
        total, left = 0, 0.0
        for g in range(first[u], first[u + 1]):
            total += a[g]
            left += d[min(a[g], 3)] if kept[g] else a[g]
        gamma[u] = left / total if total else 1.0
        for g in range(first[u], first[u + 1]):
            own = (a[g] - d[min(a[g], 3)]) / total if kept[g] and total else 0.0
            p[g] = own + gamma[u] * p[links[g]]


@compiled
def _relate(
    first: Array, counts: Array, k: float, spread: float, begin: int, stop: int, p: Array, gamma: Array
) -> None:
    for u in range(begin, stop):
        total = spread
        for g in range(first[u], first[u + 1]):
            total += counts[g]
        if total > 0:
            gamma[u] = spread / total
        for g in range(first[u], first[u + 1]):
            p[g] = (counts[g] + k) / total


@compiled
def _renumber(first: Array, kept: Array, out: Array) -> None:
    """Say where what goes on from each begins, once what is not kept is left out."""
    at, passed, left = 0, 0, 0  # at: of all n-grams; passed: of those that stay; left: of contexts that stay
    for u in range(len(first)):
        while at < first[u]:
            passed += kept[at]
            at += 1
        if u == len(first) - 1 or kept[u]:
            out[left] = passed
            left += 1
