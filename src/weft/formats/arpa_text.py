"""The ARPA format: n-gram models as text, one n-gram a line, as in KenLM, SRILM and most other tools.

    \\data\\
    ngram 1=4
    ngram 2=3

    \\1-grams:
    -1.20412    <unk>    0          log10 p(w | u), the words u w, and below the highest order log10 γ(u w)
    ...
    \\end\\

Words are separated by one space, fields by tabs. `<s>` begins a text and is never predicted: its log10 p is -99,
SRILM's notation of log 0. Files that end in .gz are compressed.
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
from weft.jit import Array
from weft.models.ngram.external_sort import word_type
from weft.models.ngram.model import NGram, NGramConfig
from weft.models.ngram.trie import NGramTables, code_values

UNK, BOS, EOS = SPECIALS = ("<unk>", "<s>", "</s>")
ZERO = -99.0  # notation of log10 0
UNK_LOG10 = -100.0  # log10 p of <unk> where a file lacks it, as in KenLM
LN10 = math.log(10)
SEPARATORS = frozenset(" \t\n\v\f\r\0")  # whitespace that separates words in a file
_BLOCK = 1 << 16


class Grams(NamedTuple):
    """The n-grams of one order, in the order of the file."""

    ids: Array  # (M, k)
    logp: Array  # (M,) natural logarithms
    gamma: Array  # (M,)


def open_text(path: Path, mode: str) -> IO[str]:
    """Open a file for reading ("rt") or writing ("wt"), with gzip where its name ends in .gz."""
    if path.suffix == ".gz":
        return gzip.open(path, mode, encoding="utf-8", newline="\n")  # type: ignore[return-value]
    return path.open(mode.rstrip("t"), encoding="utf-8", newline="\n")


def write_arpa(model: NGram, words: Sequence[str], path: str | Path) -> None:
    """Write a model as an ARPA file; `words` is the token of each id, with <s>, </s> and <unk> among them."""
    check_words(words)
    tables, ids = model.tables, np.arange(model.vocab, dtype=np.uint32)[:, None]
    tokens = np.array(words, object)
    with open_text(Path(path), "wt") as file:
        file.write("\\data\\\n")
        file.writelines(f"ngram {k}={b - a}\n" for k, (a, b) in enumerate(pairwise(tables.orders.tolist()), 1))
        for length in range(1, tables.order + 1):
            level = tables.level(length)
            if length > 1:
                prefixes = tables.level(length - 1)
                offsets = tables.first[prefixes.start : prefixes.stop + 1].astype(np.int64)
                ids = np.column_stack([np.repeat(ids, offsets[1:] - offsets[:-1], axis=0), tables.words[level]])
            file.write(f"\n\\{length}-grams:\n")
            for start in range(0, len(ids), _BLOCK):
                file.writelines(_format_lines(tables, tokens, ids[start : start + _BLOCK], level.start + start, length))
        file.write("\n\\end\\\n")


def check_words(words: Sequence[str]) -> None:
    """Raise an error for words that an ARPA file cannot represent."""
    if bad := [word for word in words if not word or set(word) & SEPARATORS]:
        raise DataError(
            f"an ARPA file separates words by spaces, so it cannot have the token {bad[0]!r}; use words or BPE"
        )
    if BOS not in words or EOS not in words:
        raise DataError(
            f"an ARPA file has {BOS} for the beginning of a text and {EOS} for its end; got one token for both"
        )


def _format_lines(tables: NGramTables, tokens: Array, ids: Array, start: int, length: int) -> Iterator[str]:
    span = slice(start, start + len(ids))
    logp = np.maximum(tables.logp[span] / LN10, ZERO).tolist()
    texts = [" ".join(row) for row in tokens[ids].tolist()]
    if length == tables.order:
        return (f"{p:.7g}\t{gram}\n" for p, gram in zip(logp, texts, strict=True))
    gammas = np.maximum(tables.gammas(span) / LN10, ZERO).tolist()
    return (f"{p:.7g}\t{gram}\t{g:.7g}\n" for p, gram, g in zip(logp, texts, gammas, strict=True))


def read_arpa(path: str | Path) -> tuple[NGram, list[str]]:
    """Return a model and its tokens by id: <unk>, <s> and </s> are 0, 1 and 2; the rest is in the file's order."""
    try:
        with open_text(Path(path), "rt") as file:
            words, grams = Reader(file, str(path)).read()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}; is it an ARPA file?") from None
    model = NGram(NGramConfig(name="ngram", order=len(grams)), len(words))
    model.tables = build_tables(grams, len(words))
    return model, words


class Reader:
    """Parser of an ARPA file; an error names the line."""

    def __init__(self, file: IO[str], path: str) -> None:
        self._lines = enumerate(file, 1)
        self._path, self._number = path, 0
        self._ids = {word: id for id, word in enumerate(SPECIALS)}
        self._defined: set[int] = set()  # ids of the 1-grams read so far

    def read(self) -> tuple[list[str], list[Grams]]:
        """Return the words and the n-grams of each order."""
        sizes, levels = self._read_header(), []
        for length, size in enumerate(sizes, 1):
            if self._next_line() != f"\\{length}-grams:":
                raise self._error(f"must begin the {length}-grams by \\{length}-grams:")
            levels.append(self._read_section(length, size, length == len(sizes)))
        if self._next_line() != "\\end\\":
            raise self._error("must be \\end\\ after the last n-gram")
        return list(self._ids), [self._sort_unigrams(levels[0]), *levels[1:]]

    def _read_header(self) -> list[int]:
        while self._next_line() != "\\data\\":
            pass
        sizes: list[int] = []
        for number, line in self._lines:
            self._number = number
            if not line.strip():
                break
            key, _, value = line.partition("=")
            if key.split() != ["ngram", str(len(sizes) + 1)] or not value.strip().isdigit():
                raise self._error(f"must say how many {len(sizes) + 1}-grams there are, as in ngram 1=33280")
            sizes.append(int(value))
        if not sizes:
            raise self._error("must say how many n-grams there are, as in ngram 1=33280")
        return sizes

    def _next_line(self) -> str:
        """Return the next non-empty line, stripped."""
        for number, line in self._lines:
            self._number = number
            if line.strip():
                return line.strip()
        raise DataError(f"{self._path}: ends too soon, before \\end\\; is it an ARPA file, and whole?")

    def _read_section(self, length: int, size: int, highest: bool) -> Grams:
        ids, logp, gamma = array("q"), array("d"), array("d")
        id_of = self._add_word if length == 1 else self._ids.__getitem__
        for _ in range(size):
            self._number, line = next(self._lines, (self._number, ""))
            fields = line.rstrip("\r\n ").replace("\t", " ").split(" ")
            if not length + 1 <= len(fields) <= length + 2 - highest:
                backoff = "" if highest else " and a back-off weight"
                raise self._error(f"must be a probability, {length} words{backoff}, but is {line.strip()!r}")
            try:
                logp.append(float(fields[0]))
                gamma.append(float(fields[-1]) if len(fields) > length + 1 else 0.0)
                ids.extend(map(id_of, fields[1 : length + 1]))
            except ValueError as error:
                raise self._error(f"a probability and a back-off weight are numbers: {error}") from None
            except KeyError as error:
                raise self._error(f"has a word that is not among the 1-grams: {error}") from None
        grams = Grams(np.array(ids).reshape(size, length), np.array(logp) * LN10, np.array(gamma) * LN10)
        if not (grams.logp <= 0).all() or np.isnan(grams.gamma).any():
            raise DataError(f"{self._path}: log10 of a probability is at most 0, but that of one {length}-gram is not")
        return grams

    def _add_word(self, word: str) -> int:
        """Return a new id for a word of the 1-grams; a duplicate is an error."""
        id = self._ids.setdefault(word, len(self._ids))
        if id in self._defined:
            raise self._error(f"is there twice among the 1-grams: {word!r}")
        self._defined.add(id)
        return id

    def _sort_unigrams(self, unigrams: Grams) -> Grams:
        """Sort the 1-grams by id; p(<s>) is 0, and a missing <unk> has KenLM's probability."""
        for word in (BOS, EOS):
            if self._ids[word] not in self._defined:
                raise DataError(f"{self._path}: the 1-grams must have {word}; is it a language model of sentences?")
        size = len(self._ids)
        logp, gamma = np.full(size, UNK_LOG10 * LN10), np.zeros(size)
        logp[unigrams.ids[:, 0]], gamma[unigrams.ids[:, 0]] = unigrams.logp, unigrams.gamma
        logp[self._ids[BOS]] = -np.inf
        return Grams(np.arange(size)[:, None], logp, gamma)

    def _error(self, message: str) -> DataError:
        return DataError(f"{self._path}:{self._number}: {message}")


def build_tables(grams: Sequence[Grams], vocab: int) -> NGramTables:
    """Return the trie of sorted n-grams; missing prefixes and suffixes of n-grams are added."""
    try:
        levels = _sort_levels(grams, vocab)
    except KeyError:
        levels = _sort_levels(add_missing(grams), vocab)
    sizes = [len(level.ids) for level in levels]
    orders = np.concatenate([[0], np.cumsum(sizes)])
    words = np.concatenate([level.ids[:, -1] for level in levels]).astype(word_type(vocab))
    first = np.concatenate(
        [orders[k + 1] + _first_children(levels[k + 1].ids[:, -2], sizes[k]) for k in range(len(levels) - 1)]
        + [orders[-1:]]
    )
    logp, gamma = (np.concatenate([level[part] for level in levels]).astype(np.float32) for part in (1, 2))
    return NGramTables(orders, words, first.astype(np.uint32), logp, *code_values(gamma[: orders[-2]].copy()))


def _first_children(parents: Array, size: int) -> Array:
    return np.searchsorted(parents, np.arange(size))


def _sort_levels(grams: Sequence[Grams], vocab: int) -> list[Grams]:
    """Sort each order by the index of an n-gram's prefix in the order below, then by its last word.

    The ids of the result are (M, 2): prefix index and last word. KeyError if the prefix or suffix of an n-gram is
    missing.
    """
    keys: list[Array] = [np.arange(vocab)]
    levels = [Grams(np.column_stack([np.zeros(vocab, np.int64), grams[0].ids]), *grams[0][1:])]
    for level in grams[1:]:
        _lookup(keys, level.ids[:, 1:], vocab)
        key = _lookup(keys, level.ids[:, :-1], vocab) * vocab + level.ids[:, -1]
        order = np.argsort(key, kind="stable")
        keys.append(key[order])
        if (np.diff(keys[-1]) == 0).any():
            raise DataError(f"ARPA: a {level.ids.shape[1]}-gram is there twice; each must be there once")
        ids = np.column_stack([keys[-1] // vocab, keys[-1] % vocab])
        levels.append(Grams(ids, level.logp[order], level.gamma[order]))
    return levels


def _lookup(keys: Sequence[Array], ids: Array, vocab: int) -> Array:
    """Return the indices of n-grams in their sorted order; KeyError if one is missing."""
    indices = ids[:, 0]
    for length in range(1, ids.shape[1]):
        key = indices * vocab + ids[:, length]
        indices = np.minimum(np.searchsorted(keys[length], key), len(keys[length]) - 1)
        if len(key) and (not len(keys[length]) or (keys[length][indices] != key).any()):
            raise KeyError
    return indices


def add_missing(grams: Sequence[Grams]) -> list[Grams]:
    """Add missing prefixes and suffixes of n-grams, with their back-off probability, so the model is unchanged."""
    levels = [{tuple(ids): (p, g) for ids, p, g in zip(level.ids.tolist(), *level[1:], strict=True)} for level in grams]
    for length in range(len(levels), 2, -1):
        for gram in list(levels[length - 1]):
            for part in (gram[:-1], gram[1:]):
                levels[length - 2].setdefault(part, (math.nan, 0.0))

    def logp_of(gram: tuple[int, ...]) -> float:
        p = levels[len(gram) - 1].get(gram, (math.nan, 0.0))[0]
        if not math.isnan(p):
            return float(p)
        return float(levels[len(gram) - 2].get(gram[:-1], (0.0, 0.0))[1]) + logp_of(gram[1:])

    return [
        Grams(
            np.array(list(level), np.int64).reshape(len(level), length),
            np.array([logp_of(gram) for gram in level]),
            np.array([gamma for _, gamma in level.values()]),
        )
        for length, level in enumerate(levels, 1)
    ]
