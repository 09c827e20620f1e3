"""Word vectors: queries of single words, and evaluation by analogies and by human similarity ratings.

`WordVectors` has the names of gensim's KeyedVectors. Analogies are solved as there and in word2vec's compute-accuracy,
by 3CosAdd (Mikolov, Yih & Zweig 2013; Levy & Goldberg 2014, section 2): "a is to b as c is to d" holds if d is the word
nearest to b - a + c, with all vectors of length 1 and a, b and c left out. Similarity is evaluated by the correlation
between the cosines of pairs of words and human ratings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.data.readers.lines import BadRow, chomp, read_lines
from weft.errors import DataError, did_you_mean

RESTRICT_VOCAB = 300_000  # the number of most frequent words that are searched, as in gensim and word2vec
_LINE = 1 << 20  # maximal bytes of a line of questions
_AT_ONCE = 1 << 25  # cosines in memory at a time
_CANDIDATES = (
    5  # nearest words of an analogy that are considered, since some may be a, b or c in another case; as gensim
)

_Question = tuple[str, str, str, str]


@dataclass(frozen=True)
class AnalogySection:
    """The number of correct answers among the questions of a section whose words are all in the vocabulary."""

    name: str
    correct: int
    asked: int

    @property
    def accuracy(self) -> float:
        """The share of correct answers; 0 without questions."""
        return self.correct / self.asked if self.asked else 0.0


@dataclass(frozen=True)
class Analogies:
    """The sections of a file, and the number of questions with an out-of-vocabulary word."""

    sections: tuple[AnalogySection, ...]
    unknown: int

    @property
    def total(self) -> AnalogySection:
        """All sections together."""
        return _sum_sections("total", self.sections)

    @property
    def kinds(self) -> tuple[AnalogySection, AnalogySection]:
        """Semantic and syntactic questions (sections whose names begin with gram), as papers report them."""
        semantic = [section for section in self.sections if not section.name.startswith("gram")]
        syntactic = [section for section in self.sections if section.name.startswith("gram")]
        return _sum_sections("semantic", semantic), _sum_sections("syntactic", syntactic)


def _sum_sections(name: str, sections: Sequence[AnalogySection]) -> AnalogySection:
    correct, asked = sum(section.correct for section in sections), sum(section.asked for section in sections)
    return AnalogySection(name, correct, asked)


@dataclass(frozen=True)
class Similarity:
    """Correlation of cosines with human ratings over `pairs`; `unknown` is the share with an unknown word."""

    spearman: float
    pearson: float
    pairs: int
    unknown: float


@dataclass(frozen=True)
class WordVectors:
    """Words, the most frequent first, and their vectors."""

    words: Sequence[str]
    rows: np.ndarray  # (V, D)

    @cached_property
    def places(self) -> dict[str, int]:
        """The row of each word; of duplicates the first."""
        return {word: row for row, word in reversed(list(enumerate(self.words)))}

    @cached_property
    def directions(self) -> np.ndarray:
        """The vectors, normalized to length 1; zero vectors stay zero."""
        rows = self.rows.astype(np.float32)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        normalized: np.ndarray = rows / np.where(lengths > 0, lengths, 1)
        return normalized

    def __len__(self) -> int:
        """Return the number of words."""
        return len(self.words)

    def __iter__(self) -> Iterator[str]:
        """Yield the words, the most frequent first."""
        return iter(self.words)

    def __contains__(self, word: object) -> bool:
        """Return whether a word has a vector."""
        return word in self.places

    def __getitem__(self, word: str) -> np.ndarray:
        """Return the vector of a word, (D,), of its own length."""
        vector: np.ndarray = self.rows[self._row(word)]
        return vector

    def most_similar(
        self,
        positive: str | Sequence[str] = (),
        negative: str | Sequence[str] = (),
        topn: int = 10,
        restrict_vocab: int | None = None,
    ) -> list[tuple[str, float]]:
        """Return the `topn` words with the highest cosine to Σ positive - Σ negative, and the cosines (3CosAdd).

        The vectors of the sum have length 1. The given words are left out. `restrict_vocab` searches only the so many
        most frequent words.
        """
        added, subtracted = ([self._row(word) for word in _as_words(words)] for words in (positive, negative))
        if not added and not subtracted:
            raise DataError(
                "most_similar: needs a word to start from, but has none; give positive=['king', 'woman'], say"
            )
        query = self.directions[added].sum(0) - self.directions[subtracted].sum(0)
        length = float(np.linalg.norm(query))
        cosines = self.directions[:restrict_vocab] @ (query / (length or 1))
        given = {row for row in (*added, *subtracted) if row < len(cosines)}
        cosines[list(given)] = -np.inf
        nearest = np.argsort(-cosines, kind="stable")[: min(topn, len(cosines) - len(given))]
        return [(self.words[row], float(cosines[row])) for row in nearest.tolist()]

    def similarity(self, a: str, b: str) -> float:
        """Return the cosine of two words."""
        return float(self.directions[self._row(a)] @ self.directions[self._row(b)])

    def doesnt_match(self, words: Sequence[str]) -> str:
        """Return the word with the lowest cosine to the mean direction of all of them; of equal ones, the first."""
        rows = [self._row(word) for word in _as_words(words)]
        if not rows:
            raise DataError("doesnt_match: needs words to choose from, but has none; give a list of words")
        directions = self.directions[rows]
        cosines = directions @ directions.mean(0)  # of a mean of any length: the order is the same
        return self.words[rows[int(np.argmin(cosines))]]

    def _row(self, word: str) -> int:
        """Return the row of a word; raise if it has none."""
        if word not in self.places:
            raise DataError(f"{word!r} is not among the {len(self.words):,} words; {self._hint(word)}")
        return self.places[word]

    def _hint(self, word: str) -> str:
        hint = did_you_mean(str(word), self.words[:5000])  # comparing with every word would take seconds
        # If no word is similar, the hint lists all.
        return hint if len(hint) < 200 else "try another spelling, or upper or lower case"

    def evaluate_word_analogies(self, path: str, most: int = RESTRICT_VOCAB, fold: bool = True) -> Analogies:
        """Answer the questions of a file in the form of question-words.txt, among the first `most` words.

        `fold` ignores case: of words that differ in case alone, the most frequent is used.
        """
        vocab, sections, unknown = self._vocab(most, fold), [], 0
        for name, questions in _read_sections(path):
            folded = [tuple(_fold(word, fold) for word in question) for question in questions]
            known = [question for question in folded if all(word in vocab for word in question)]
            unknown += len(folded) - len(known)
            rows = np.array([[vocab[word] for word in question] for question in known]).reshape(-1, 4)
            answers = self._answers(rows, most, fold)
            correct = sum(answer == question[3] for answer, question in zip(answers, known, strict=True))
            sections.append(AnalogySection(name, correct, len(known)))
        return Analogies(tuple(sections), unknown)

    def _answers(self, questions: np.ndarray, most: int, fold: bool) -> Iterator[str]:
        """Yield the answer d to "a is to b as c is to d", for each question (a, b, c, ...) of row numbers."""
        candidates = self.directions[:most]
        step = max(1, _AT_ONCE // len(candidates))
        for first in range(0, len(questions), step):
            a, b, c = questions[first : first + step, :3].T
            cosines = (self.directions[b] - self.directions[a] + self.directions[c]) @ candidates.T
            for given in (a, b, c):
                cosines[np.arange(len(given)), given] = -np.inf
            count = min(_CANDIDATES, cosines.shape[1])
            nearest = np.argpartition(-cosines, count - 1, axis=1)[:, :count]
            for scores, rows, *given in zip(cosines, nearest, a, b, c, strict=True):
                yield self._best_answer(rows[np.argsort(-scores[rows], kind="stable")], given, fold)

    def _best_answer(self, nearest: np.ndarray, given: Sequence[int], fold: bool) -> str:
        """Return the nearest word that is none of the given ones in another case."""
        excluded = {_fold(self.words[row], fold) for row in given}
        words = [_fold(self.words[row], fold) for row in nearest.tolist()]
        return next((word for word in words if word not in excluded), words[-1])

    def evaluate_word_pairs(self, path: str, most: int = RESTRICT_VOCAB, fold: bool = True) -> Similarity:
        """Correlate cosines with human ratings: WordSim-353, SimLex-999 and others, of tab-separated columns."""
        vocab, pairs = self._vocab(most, fold), list(_read_pairs(path))
        known = [(_fold(a, fold), _fold(b, fold), rating) for a, b, rating in pairs]
        known = [pair for pair in known if pair[0] in vocab and pair[1] in vocab]
        if len(known) < 2:
            raise DataError(
                f"{path}: {len(known)} of its {len(pairs):,} pairs are of known words; is it another language?"
            )
        a, b = [vocab[first] for first, _, _ in known], [vocab[second] for _, second, _ in known]
        cosines = (self.directions[a].astype(np.float64) * self.directions[b]).sum(1)
        ratings = np.array([rating for _, _, rating in known])
        return Similarity(
            _correlation(
                _ranks(cosines.round(6)), _ranks(ratings)
            ),  # rounded, so that cosines equal up to rounding errors tie
            _correlation(cosines, ratings),
            len(known),
            1 - len(known) / len(pairs),
        )

    def _vocab(self, most: int, fold: bool) -> dict[str, int]:
        """Return the rows of the first `most` words."""
        words = list(enumerate(self.words[:most]))
        return {_fold(word, fold): row for row, word in reversed(words)}


def _as_words(words: str | Sequence[str]) -> Sequence[str]:
    """Return a list of words, of one alone too."""
    return [words] if isinstance(words, str) else words


def _fold(word: str, fold: bool) -> str:
    return word.upper() if fold else word


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not empty, with their numbers."""
    for number, line in read_lines(path, _LINE):
        if isinstance(line, BadRow):
            raise line
        if line.strip():
            yield number, chomp(line)


def _read_sections(path: str) -> Iterator[tuple[str, list[_Question]]]:
    """Yield sections, each a line ": name" and questions of four words."""
    name: str | None = None
    questions: list[_Question] = []
    for number, line in _lines(path):
        if line.startswith(":"):
            if name is not None:
                yield name, questions
            name, questions = line.lstrip(": ").strip(), []
            continue
        words = line.split()
        if name is None or len(words) != 4:
            expected = "four words" if name is not None else 'a line ": name" before the first question'
            raise DataError(f"{path}:{number}: a file of analogies has {expected} here, but this is {line[:60]!r}")
        questions.append((words[0], words[1], words[2], words[3]))
    if name is None:
        raise DataError(f"{path}: has no questions; a file of analogies begins with a line such as ': family'")
    yield name, questions


def _read_pairs(path: str) -> Iterator[tuple[str, str, float]]:
    """Yield two words and a rating per line; lines with # are comments, a first line without a number is a header."""
    column, first = 2, True
    for number, line in _lines(path):
        if line.startswith("#"):
            continue
        fields = line.split("\t")
        try:
            yield fields[0].strip(), fields[1].strip(), float(fields[column])
        except (IndexError, ValueError):
            if not first or len(fields) < 3:
                raise DataError(
                    f"{path}:{number}: a line has two words and a number, with tabs between, but this is {line[:60]!r}"
                ) from None
            column = fields.index("SimLex999") if "SimLex999" in fields else 2
        first = False


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    ranks: np.ndarray = (last - (counts - 1) / 2)[inverse]
    return ranks


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Pearson's correlation; NaN if one is constant."""
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else float("nan")
