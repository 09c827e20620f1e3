"""ARPA files: n-gram models as text, one n-gram a line, read and written by KenLM, SRILM and most other tools.

    \\data\\
    ngram 1=4
    ngram 2=3

    \\1-grams:
    -1.20412    <unk>    0          log10 p(w | u), the words u w, and below the highest order log10 γ(u w)
    ...
    \\end\\

Words are parted by one space, the fields by tabs. `<s>` begins a text and is never said: its p is -99, SRILM's way to
write log 0. Files that end in .gz are packed.
"""

import gzip
import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from weft.errors import DataError
from weft.models.ngram.external_sort import Array, word_type
from weft.models.ngram.model import NGram, NGramConfig
from weft.models.ngram.trie import Tables, coded

UNK, BOS, EOS = SPECIALS = ("<unk>", "<s>", "</s>")
ZERO = -99.0  # stands for log10 0
UNKNOWN = -100.0  # log10 p of an unknown word where a file has none, as KenLM has it
LN10 = math.log(10)
PARTING = frozenset(" \t\n\v\f\r\0")  # what parts words in a file
_BLOCK = 1 << 16


class Grams(NamedTuple):
    """The n-grams of one order, as the file has them."""

    ids: Array  # (M, k)
    logp: Array  # (M,) natural logarithms
    gamma: Array  # (M,)


def opened(path: Path, mode: str) -> IO[str]:
    """Open a file for reading ("rt") or writing ("wt"), packed where its name ends in .gz."""
    if path.suffix == ".gz":
        return gzip.open(path, mode, encoding="utf-8", newline="\n")  # type: ignore[return-value]
    return path.open(mode.rstrip("t"), encoding="utf-8", newline="\n")


def write_arpa(model: NGram, words: Sequence[str], path: str | Path) -> None:
    """Write a model; `words` spells each id, with <s>, </s> and <unk> for those that are that."""
    check_words(words)
    tables, ids = model.tables, np.arange(model.vocab, dtype=np.uint32)[:, None]
    names = np.array(words, object)
    with opened(Path(path), "wt") as file:
        file.write("\\data\\\n")
        file.writelines(f"ngram {k}={b - a}\n" for k, (a, b) in enumerate(pairwise(tables.orders.tolist()), 1))
        for length in range(1, tables.order + 1):
            level = tables.level(length)
            if length > 1:
                before = tables.level(length - 1)
                starts = tables.first[before.start : before.stop + 1].astype(np.int64)
                ids = np.column_stack([np.repeat(ids, starts[1:] - starts[:-1], axis=0), tables.words[level]])
            file.write(f"\n\\{length}-grams:\n")
            for start in range(0, len(ids), _BLOCK):
                file.writelines(_lines(tables, names, ids[start : start + _BLOCK], level.start + start, length))
        file.write("\n\\end\\\n")


def check_words(words: Sequence[str]) -> None:
    """Refuse words that an ARPA file cannot hold."""
    if bad := [word for word in words if not word or set(word) & PARTING]:
        raise DataError(f"an ARPA file parts words by spaces, so it cannot hold the token {bad[0]!r}; use words or BPE")
    if BOS not in words or EOS not in words:
        raise DataError(
            f"an ARPA file has {BOS} for the beginning of a text and {EOS} for its end; got one token for both"
        )


def _lines(tables: Tables, names: Array, ids: Array, start: int, length: int) -> Iterator[str]:
    here = slice(start, start + len(ids))
    logp = np.maximum(tables.logp[here] / LN10, ZERO).tolist()
    spelt = [" ".join(row) for row in names[ids].tolist()]
    if length == tables.order:
        return (f"{p:.7g}\t{gram}\n" for p, gram in zip(logp, spelt, strict=True))
    gammas = np.maximum(tables.gammas(here) / LN10, ZERO).tolist()
    return (f"{p:.7g}\t{gram}\t{g:.7g}\n" for p, gram, g in zip(logp, spelt, gammas, strict=True))


def read_arpa(path: str | Path) -> tuple[NGram, list[str]]:
    """Read a model, and how its ids are spelt: <unk>, <s> and </s> are 0, 1 and 2; the rest is in the file's order."""
    try:
        with opened(Path(path), "rt") as file:
            words, grams = Reader(file, str(path)).read()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}; is it an ARPA file?") from None
    model = NGram(NGramConfig(name="ngram", order=len(grams)), len(words))
    model.tables = tables_of(grams, len(words))
    return model, words


class Reader:
    """Reads the lines of an ARPA file; an error names the line."""

    def __init__(self, file: IO[str], path: str) -> None:
        self._lines = enumerate(file, 1)
        self._path, self._number = path, 0
        self._ids = {word: id for id, word in enumerate(SPECIALS)}
        self._seen: set[int] = set()

    def read(self) -> tuple[list[str], list[Grams]]:
        """Return the words and the n-grams of each order."""
        sizes, found = self._header(), []
        for length, size in enumerate(sizes, 1):
            if self._next() != f"\\{length}-grams:":
                raise self._wrong(f"must begin the {length}-grams by \\{length}-grams:")
            found.append(self._section(length, size, length == len(sizes)))
        if self._next() != "\\end\\":
            raise self._wrong("must be \\end\\ after the last n-gram")
        return list(self._ids), [self._by_id(found[0]), *found[1:]]

    def _header(self) -> list[int]:
        while self._next() != "\\data\\":
            pass
        sizes: list[int] = []
        for number, line in self._lines:
            self._number = number
            if not line.strip():
                break
            key, _, value = line.partition("=")
            if key.split() != ["ngram", str(len(sizes) + 1)] or not value.strip().isdigit():
                raise self._wrong(f"must say how many {len(sizes) + 1}-grams there are, as in ngram 1=33280")
            sizes.append(int(value))
        if not sizes:
            raise self._wrong("must say how many n-grams there are, as in ngram 1=33280")
        return sizes

    def _next(self) -> str:
        """Return the next line that is not empty."""
        for number, line in self._lines:
            self._number = number
            if line.strip():
                return line.strip()
        raise DataError(f"{self._path}: ends too soon, before \\end\\; is it an ARPA file, and whole?")

    def _section(self, length: int, size: int, highest: bool) -> Grams:
        ids, logp, gamma = array("q"), array("d"), array("d")
        number_of = self._new if length == 1 else self._ids.__getitem__
        for _ in range(size):
            self._number, line = next(self._lines, (self._number, ""))
            fields = line.rstrip("\r\n ").replace("\t", " ").split(" ")
            if not length + 1 <= len(fields) <= length + 2 - highest:
                back = "" if highest else " and a back-off weight"
                raise self._wrong(f"must be a probability, {length} words{back}, but is {line.strip()!r}")
            try:
                logp.append(float(fields[0]))
                gamma.append(float(fields[-1]) if len(fields) > length + 1 else 0.0)
                ids.extend(map(number_of, fields[1 : length + 1]))
            except ValueError as error:
                raise self._wrong(f"a probability and a back-off weight are numbers: {error}") from None
            except KeyError as error:
                raise self._wrong(f"has a word that is not among the 1-grams: {error}") from None
        found = Grams(np.array(ids).reshape(size, length), np.array(logp) * LN10, np.array(gamma) * LN10)
        if not (found.logp <= 0).all() or np.isnan(found.gamma).any():
            raise DataError(f"{self._path}: log10 of a probability is at most 0, but that of one {length}-gram is not")
        return found

    def _new(self, word: str) -> int:
        """Number a word; each is there once."""
        id = self._ids.setdefault(word, len(self._ids))
        if id in self._seen:
            raise self._wrong(f"is there twice among the 1-grams: {word!r}")
        self._seen.add(id)
        return id

    def _by_id(self, given: Grams) -> Grams:
        """Put words in the order of their ids; <s> is never said, and what is unknown is so unlikely as with KenLM."""
        for word in (BOS, EOS):
            if self._ids[word] not in self._seen:
                raise DataError(f"{self._path}: the 1-grams must have {word}; is it a language model of sentences?")
        size = len(self._ids)
        logp, gamma = np.full(size, UNKNOWN * LN10), np.zeros(size)
        logp[given.ids[:, 0]], gamma[given.ids[:, 0]] = given.logp, given.gamma
        logp[self._ids[BOS]] = -np.inf
        return Grams(np.arange(size)[:, None], logp, gamma)

    def _wrong(self, told: str) -> DataError:
        return DataError(f"{self._path}:{self._number}: {told}")


def tables_of(grams: Sequence[Grams], vocab: int) -> Tables:
    """Put n-grams in order; those that others are made of and that the file lacks are added."""
    try:
        levels = _sorted(grams, vocab)
    except KeyError:
        levels = _sorted(completed(grams), vocab)
    sizes = [len(level.ids) for level in levels]
    orders = np.concatenate([[0], np.cumsum(sizes)])
    words = np.concatenate([level.ids[:, -1] for level in levels]).astype(word_type(vocab))
    first = np.concatenate(
        [orders[k + 1] + _begins(levels[k + 1].ids[:, -2], sizes[k]) for k in range(len(levels) - 1)] + [orders[-1:]]
    )
    logp, gamma = (np.concatenate([level[part] for level in levels]).astype(np.float32) for part in (1, 2))
    return Tables(orders, words, first.astype(np.uint32), logp, *coded(gamma[: orders[-2]].copy()))


def _begins(parents: Array, size: int) -> Array:
    return np.searchsorted(parents, np.arange(size))


def _sorted(grams: Sequence[Grams], vocab: int) -> list[Grams]:
    """Sort each order by what an n-gram goes on from, its number in the order below, and its last word.

    The ids of the result are (M, 2) these two. KeyError: an n-gram without its last word, or without its first, is not
    there.
    """
    keys: list[Array] = [np.arange(vocab)]
    found = [Grams(np.column_stack([np.zeros(vocab, np.int64), grams[0].ids]), *grams[0][1:])]
    for one in grams[1:]:
        _find(keys, one.ids[:, 1:], vocab)
        key = _find(keys, one.ids[:, :-1], vocab) * vocab + one.ids[:, -1]
        order = np.argsort(key, kind="stable")
        keys.append(key[order])
        if (np.diff(keys[-1]) == 0).any():
            raise DataError(f"ARPA: a {one.ids.shape[1]}-gram is there twice; each must be there once")
        found.append(Grams(np.column_stack([keys[-1] // vocab, keys[-1] % vocab]), one.logp[order], one.gamma[order]))
    return found


def _find(keys: Sequence[Array], ids: Array, vocab: int) -> Array:
    """Return the numbers of n-grams in their order."""
    numbers = ids[:, 0]
    for length in range(1, ids.shape[1]):
        key = numbers * vocab + ids[:, length]
        numbers = np.minimum(np.searchsorted(keys[length], key), len(keys[length]) - 1)
        if len(key) and (not len(keys[length]) or (keys[length][numbers] != key).any()):
            raise KeyError
    return numbers


def completed(grams: Sequence[Grams]) -> list[Grams]:
    """Add n-grams that are parts of others; they have the probability that they had without being there."""
    known = [{tuple(ids): (p, g) for ids, p, g in zip(one.ids.tolist(), *one[1:], strict=True)} for one in grams]
    for length in range(len(known), 2, -1):
        for gram in list(known[length - 1]):
            for part in (gram[:-1], gram[1:]):
                known[length - 2].setdefault(part, (math.nan, 0.0))

    def p_of(gram: tuple[int, ...]) -> float:
        p = known[len(gram) - 1].get(gram, (math.nan, 0.0))[0]
        if not math.isnan(p):
            return float(p)
        return float(known[len(gram) - 2].get(gram[:-1], (0.0, 0.0))[1]) + p_of(gram[1:])

    return [
        Grams(
            np.array(list(level), np.int64).reshape(len(level), length),
            np.array([p_of(gram) for gram in level]),
            np.array([gamma for _, gamma in level.values()]),
        )
        for length, level in enumerate(known, 1)
    ]
