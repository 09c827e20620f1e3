"""Word vectors, looked into: which words are near, and what the vectors know beside what people say.

Analogies are judged as gensim and word2vec's compute-accuracy do, by 3CosAdd: "a is to b as c is to d" holds where d is
the word nearest to b - a + c, with all vectors of length 1 and a, b and c left out. Similarities are judged by how the
cosines of pairs of words go with what people said of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.data.readers.lines import BadRow, chomp, read_lines
from weft.errors import DataError, did_you_mean

MOST = 300_000  # words, the first, among which answers are looked for: gensim's and word2vec's own limit
_LINE = 1 << 20  # bytes of a line of questions
_AT_ONCE = 1 << 25  # cosines held at a time
_TRIED = 5  # of an analogy's nearest words, those that may be a, b or c in other letters, as gensim looks at

Question = tuple[str, str, str, str]


@dataclass(frozen=True)
class Section:
    """How many questions of a kind were answered right, of those whose words are all known."""

    name: str
    correct: int
    asked: int

    @property
    def accuracy(self) -> float:
        """The share of right answers; 0 where nothing could be asked."""
        return self.correct / self.asked if self.asked else 0.0


@dataclass(frozen=True)
class Analogies:
    """The sections of a file, and how many of its questions have an unknown word."""

    sections: tuple[Section, ...]
    unknown: int

    @property
    def total(self) -> Section:
        """All sections together."""
        return Section("total", sum(one.correct for one in self.sections), sum(one.asked for one in self.sections))

    @property
    def kinds(self) -> tuple[Section, Section]:
        """What the words mean, and what form they have (sections whose names begin with gram), as papers report it."""
        forms = [one.name.startswith("gram") for one in self.sections]
        found = []
        for name, wanted in (("semantic", False), ("syntactic", True)):
            own = [one for one, form in zip(self.sections, forms, strict=True) if form is wanted]
            found.append(Section(name, sum(one.correct for one in own), sum(one.asked for one in own)))
        return found[0], found[1]


@dataclass(frozen=True)
class Similarity:
    """How cosines go with people's judgement over `pairs`; `unknown` is the share with an unknown word."""

    spearman: float
    pearson: float
    pairs: int
    unknown: float


@dataclass(frozen=True)
class WordVectors:
    """Words, the most frequent first, and a vector for each."""

    words: Sequence[str]
    rows: np.ndarray  # (V, D)

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each word stands."""
        return {word: place for place, word in reversed(list(enumerate(self.words)))}

    @cached_property
    def directions(self) -> np.ndarray:
        """The vectors, each of length 1; one of zeros stays so."""
        rows = self.rows.astype(np.float32)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        found: np.ndarray = rows / np.where(lengths > 0, lengths, 1)
        return found

    def _hint(self, word: str) -> str:
        hint = did_you_mean(word, self._likely)  # where none is near, all that there are
        return hint if len(hint) < 200 else "try another spelling, or upper or lower case"

    def neighbours(self, word: str, count: int = 10) -> list[tuple[str, float]]:
        """Return the words whose vectors point the most in the same direction, with their cosines."""
        if word not in self.places:
            raise DataError(f"{word!r} is not among the {len(self.words):,} words; {self._hint(word)}")
        cosines = self.directions @ self.directions[self.places[word]]
        cosines[self.places[word]] = -np.inf
        nearest = np.argsort(-cosines, kind="stable")[: min(count, len(self.words) - 1)]
        return [(self.words[place], float(cosines[place])) for place in nearest.tolist()]

    @property
    def _likely(self) -> Sequence[str]:
        return self.words[:5000]  # to compare a word with every other would take seconds

    def analogies(self, path: str, most: int = MOST, fold: bool = True) -> Analogies:
        """Answer the questions of a file in the form of question-words.txt, among the first `most` words.

        `fold` takes words that differ in upper and lower case for one, the most frequent of them.
        """
        known, sections, unknown = self._known(most, fold), [], 0
        for name, questions in _read_sections(path):
            asked = [tuple(_folded(word, fold) for word in question) for question in questions]
            whole = [question for question in asked if all(word in known for word in question)]
            unknown += len(asked) - len(whole)
            answers = self._answers(np.array([[known[w] for w in one] for one in whole]).reshape(-1, 4), most, fold)
            right = sum(answer == one[3] for answer, one in zip(answers, whole, strict=True))
            sections.append(Section(name, right, len(whole)))
        return Analogies(tuple(sections), unknown)

    def _answers(self, asked: np.ndarray, most: int, fold: bool) -> Iterator[str]:
        """Answer a is to b as c is to what, for each row (a, b, c, ...) of places."""
        among = self.directions[:most]
        for first in range(0, len(asked), max(1, _AT_ONCE // len(among))):
            a, b, c = asked[first : first + max(1, _AT_ONCE // len(among)), :3].T
            cosines = (self.directions[b] - self.directions[a] + self.directions[c]) @ among.T
            for given in (a, b, c):
                cosines[np.arange(len(given)), given] = -np.inf
            tried = min(_TRIED, cosines.shape[1])
            nearest = np.argpartition(-cosines, tried - 1, axis=1)[:, :tried]
            for row, places, *given in zip(cosines, nearest, a, b, c, strict=True):
                yield self._chosen(places[np.argsort(-row[places], kind="stable")], given, fold)

    def _chosen(self, nearest: np.ndarray, given: Sequence[int], fold: bool) -> str:
        """The nearest word that is none of the given ones in other letters."""
        left_out = {_folded(self.words[place], fold) for place in given}
        tried = [_folded(self.words[place], fold) for place in nearest.tolist()]
        return next((word for word in tried if word not in left_out), tried[-1])

    def similarity(self, path: str, most: int = MOST, fold: bool = True) -> Similarity:
        """Compare cosines with people's judgement: WordSim-353, SimLex-999 and others, of tab-separated columns."""
        known, pairs = self._known(most, fold), list(_read_pairs(path))
        found = [(_folded(a, fold), _folded(b, fold), value) for a, b, value in pairs]
        found = [one for one in found if one[0] in known and one[1] in known]
        if len(found) < 2:
            raise DataError(
                f"{path}: {len(found)} of its {len(pairs):,} pairs are of known words; is it another language?"
            )
        a, b = [known[first] for first, _, _ in found], [known[second] for _, second, _ in found]
        cosines = (self.directions[a].astype(np.float64) * self.directions[b]).sum(1)
        said = np.array([value for _, _, value in found])
        return Similarity(
            _correlation(_ranks(cosines.round(6)), _ranks(said)),  # what only rounding tells apart is equal
            _correlation(cosines, said),
            len(found),
            1 - len(found) / len(pairs),
        )

    def _known(self, most: int, fold: bool) -> dict[str, int]:
        first = list(enumerate(self.words[:most]))
        return {_folded(word, fold): place for place, word in reversed(first)}


def _folded(word: str, fold: bool) -> str:
    return word.upper() if fold else word


def _lines(path: str) -> Iterator[tuple[int, str]]:
    for number, line in read_lines(path, _LINE):
        if isinstance(line, BadRow):
            raise line
        if line.strip():
            yield number, chomp(line)


def _read_sections(path: str) -> Iterator[tuple[str, list[Question]]]:
    """Read sections, each after a line ": name", of questions of four words."""
    name: str | None = None
    questions: list[Question] = []
    for number, line in _lines(path):
        if line.startswith(":"):
            if name is not None:
                yield name, questions
            name, questions = line.lstrip(": ").strip(), []
            continue
        words = line.split()
        if name is None or len(words) != 4:
            what = "four words" if name is not None else 'a line ": name" before the first question'
            raise DataError(f"{path}:{number}: a file of analogies has {what} here, but this is {line[:60]!r}")
        questions.append((words[0], words[1], words[2], words[3]))
    if name is None:
        raise DataError(f"{path}: has no questions; a file of analogies begins with a line such as ': family'")
    yield name, questions


def _read_pairs(path: str) -> Iterator[tuple[str, str, float]]:
    """Read two words and a number a line; a line of # is a remark, and a first line without a number names columns."""
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
    """Rank numbers from 1; equal ones share the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    found: np.ndarray = (last - (counts - 1) / 2)[places]
    return found


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else float("nan")
