"""The nearest contexts of a word: where a corpus uses it as a text does, by the vectors that a model gives it there.

Table 4 of Peters et al. 2018, "Deep contextualized word representations": "play" in a text on the theatre finds other
plays, in one on baseball other games. The vector of a word is the mean over its tokens, of the layers chosen one after
the other; near is what has a large cosine. A corpus is read once, and no more of it is held than a batch and the best.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappush, heapreplace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.analysis.render.page import heading, paragraph, table
from weft.data.readers.lines import count
from weft.errors import ConfigError, DataError, RoleError
from weft.models.base import Role
from weft.tasks.base import Head, Task
from weft.tasks.char_inputs import Spelling
from weft.tasks.lm.task import LM
from weft.tokens import Tokens, spell

BUDGET = 8192  # tokens in a batch
_SIDE = 60  # characters shown on either side of the word
_DIGITS = 6


@dataclass(frozen=True, order=True)
class Neighbour:
    """A use of the word, and how near it is."""

    similarity: float
    place: str
    before: str
    word: str
    after: str

    def plain(self) -> dict[str, Any]:
        """Return it as JSON-ready numbers and words."""
        context = {"before": self.before, "word": self.word, "after": self.after}
        return {"similarity": round(self.similarity, _DIGITS), "place": self.place, **context}


@dataclass(frozen=True)
class Neighbours:
    """The uses of a word nearest to the one in a text, nearest first; `uses` is how many there were to choose from."""

    text: str
    word: str
    layers: tuple[int, ...]
    uses: int
    nearest: tuple[Neighbour, ...]

    def plain(self) -> dict[str, Any]:
        """Return it as JSON-ready numbers and words."""
        asked = {"text": self.text, "word": self.word, "layers": list(self.layers), "uses": self.uses}
        return {**asked, "nearest": [one.plain() for one in self.nearest]}

    def shown(self) -> list[str]:
        """Return the parts of a page."""
        rows = [[f"{one.similarity:.3f}", one.before, one.word, one.after, one.place] for one in self.nearest]
        told = f"“{self.word}” is used {count(self.uses, 'time')} in the corpus. Nearest to how it is used here:"
        return [heading(self.text), paragraph(told), table(["cosine", "before", "word", "after", "place"], rows)]


@dataclass(frozen=True)
class _Use:
    """A word in its context: the tokens that the model reads, which of them it is, and what is shown of it."""

    ids: list[int]
    spelling: np.ndarray | None
    at: tuple[int, int]
    shown: tuple[str, str, str, str]


class Finder:
    """Looks for the uses of a word; it holds what of a model and its task is needed for that."""

    def __init__(self, task: Task, head: Head, longest: int, layers: Sequence[int] = (-1,)) -> None:
        roles = type(head.body).roles(head.body.config)
        if Role.ENCODER not in roles:
            raise RoleError(
                f"model: {head.body.config.name!r}, as configured, gives words no vectors: it does not encode; look at "
                "one that does, such as an elmo, gpt or rnn"
            )
        self.task, self.head, self.layers = task, head.eval(), tuple(layers)
        most = getattr(head.body, "reads", None)
        self._room = max(1, min(longest, most or longest) - 2)  # without the signs of beginning and end

    def nearest(self, text: str, word: str, corpus: Iterable[tuple[str, str]], top: int = 10) -> Neighbours:
        """Find the uses of `word` in a corpus of texts and their places, nearest to the first one in `text` first."""
        own = next(self._uses("", text, word), None)
        if own is None:
            raise DataError(f"--word: {word!r} is not in {text!r}; give a word that is")
        wanted, best, uses = self._vectors([own])[0], list[Neighbour](), 0
        for batch in _batches(use for place, line in corpus if line != text for use in self._uses(place, line, word)):
            uses += len(batch)
            for near, use in zip(self._vectors(batch) @ wanted, batch, strict=True):
                _keep(best, Neighbour(min(1.0, float(near)), *use.shown), top)
        if not uses:
            raise DataError(f"--word: {word!r} stands nowhere in the corpus; name another, or another word")
        return Neighbours(text, word, self.layers, uses, tuple(sorted(best, reverse=True)))

    def _uses(self, place: str, text: str, word: str) -> Iterator[_Use]:
        """Yield each use of a word in a text, whole and in whatever case, among as many tokens as the model reads."""
        found = list(re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))
        if not found:
            return
        cut = self.task.tokenizer.encode(text)
        spelt, special = self._spelt(text, cut.offsets), self.task.tokenizer.specials
        for match in found:
            inside = [n for n, (a, b) in enumerate(cut.offsets) if a < match.end() and b > match.start()]
            if not inside or len(inside) > self._room:
                continue
            first = max(0, min((inside[0] + inside[-1] + 1 - self._room) // 2, len(cut.ids) - self._room))
            last = min(first + self._room, len(cut.ids))
            signs = np.concatenate([spelt[0], *spelt[first + 1 : last + 1], spelt[-1]]) if spelt else None
            ids = [special.bos, *cut.ids[first:last], special.eos]
            at = inside[0] - first + 1, inside[-1] - first + 2
            yield _Use(ids, signs, at, (place, *_context(text, match.start(), match.end())))

    def _spelt(self, text: str, offsets: Sequence[tuple[int, int]]) -> list[np.ndarray] | None:
        """Spell the tokens of a text as the task does, with those of beginning and end."""
        if not self.task.uses_chars:
            return None
        if isinstance(self.task, LM):
            return Spelling.of(self.task.tokenizer).of_texts([text])[0]
        return [spell([word]) for word in ("", *(text[a:b].strip() for a, b in offsets), "")]

    def _vectors(self, uses: Sequence[_Use]) -> Tensor:
        """Return the vector of each use, of length 1: (U, L·D)."""
        tokens = Tokens.pack([use.ids for use in uses])
        if self.task.uses_chars:
            tokens = tokens.spelt([use.spelling for use in uses if use.spelling is not None])
        device = next(self.head.parameters()).device
        with torch.inference_mode():
            states = torch.cat(list(self.head.body.encode(tokens.to(device), self.layers)), -1).float().cpu()
        means = [states[first + use.at[0] : first + use.at[1]].mean(0) for first, use in _placed(tokens, uses)]
        return F.normalize(torch.stack(means), dim=-1)


def _placed(tokens: Tokens, uses: Sequence[_Use]) -> Iterator[tuple[int, _Use]]:
    return zip(tokens.starts.tolist(), uses, strict=False)


def _batches(uses: Iterable[_Use]) -> Iterator[list[_Use]]:
    batch, size = list[_Use](), 0
    for use in uses:
        if batch and size + len(use.ids) > BUDGET:
            yield batch
            batch, size = [], 0
        batch.append(use)
        size += len(use.ids)
    if batch:
        yield batch


def _keep(best: list[Neighbour], one: Neighbour, top: int) -> None:
    """Put a use among the best, if it is: a heap, the least of them first. What reads the same is there once."""
    if any((one.before, one.word, one.after) == (other.before, other.word, other.after) for other in best):
        return
    if len(best) < top:
        heappush(best, one)
    elif one > best[0]:
        heapreplace(best, one)


def _context(text: str, start: int, end: int) -> tuple[str, str, str]:
    """Return what stands before a word, the word, and what stands after: as much as fits, from space to space."""
    before, after = " ".join(text[:start].split()), " ".join(text[end:].split())
    if len(before) > _SIDE:
        before = "… " + before[-_SIDE:].partition(" ")[2]
    if len(after) > _SIDE:
        after = after[:_SIDE].rpartition(" ")[0] + " …"
    return before, text[start:end], after


def check_word(text: str, word: str | None, top: int) -> str:
    """Return the word that is looked for; of a text that is one word, that."""
    if top < 1:
        raise ConfigError(f"--top: must be 1 or more, but is {top} instead")
    if not text.strip():
        raise ConfigError("--neighbours: must be a text that has words, but is empty")
    if word is not None and not word.strip():
        raise ConfigError("--word: must be a word of the text, but is empty")
    if word is None and len(text.split()) > 1:
        raise ConfigError(f"--word: say which word of {text!r} is looked for, such as --word {text.split()[-1]}")
    return (word or text).strip()
