"""Nearest neighbours of contextual word embeddings: the uses of a word in a corpus most like its use in a text.

Table 4 of Peters et al. 2018, "Deep contextualized word representations": "play" in a text on the theatre finds other
plays, in one on baseball other games. The vector of a word is the mean over its tokens of the chosen layers,
concatenated; the similarity is the cosine. A corpus is read once, and only a batch and the best uses are in memory.
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
from weft.data.readers.lines import plural
from weft.errors import ConfigError, DataError, RoleError
from weft.models.base import Role
from weft.tasks.base import Task
from weft.tasks.char_inputs import Spelling
from weft.tasks.head import Head
from weft.tasks.lm.task import LM
from weft.tokens import Tokens, char_ids

BATCH_TOKENS = 8192  # tokens in a batch
_CONTEXT = 60  # characters shown on either side of the word
_DIGITS = 6


@dataclass(frozen=True, order=True)
class Neighbour:
    """A use of the word and its similarity."""

    similarity: float
    place: str
    before: str
    word: str
    after: str

    def to_dict(self) -> dict[str, Any]:
        """Return the data as JSON-ready values."""
        context = {"before": self.before, "word": self.word, "after": self.after}
        return {"similarity": round(self.similarity, _DIGITS), "place": self.place, **context}


@dataclass(frozen=True)
class ContextualNeighbours:
    """The uses of a word that are most similar to the one in a text, best first; `uses` is how many the corpus has."""

    text: str
    word: str
    layers: tuple[int, ...]
    uses: int
    nearest: tuple[Neighbour, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the data as JSON-ready values."""
        query = {"text": self.text, "word": self.word, "layers": list(self.layers), "uses": self.uses}
        return {**query, "nearest": [neighbour.to_dict() for neighbour in self.nearest]}

    def html(self) -> list[str]:
        """Return the HTML fragments of a page."""
        rows = [[f"{near.similarity:.3f}", near.before, near.word, near.after, near.place] for near in self.nearest]
        text = f"“{self.word}” occurs {plural(self.uses, 'time')} in the corpus. The nearest uses:"
        return [heading(self.text), paragraph(text), table(["cosine", "before", "word", "after", "place"], rows)]


@dataclass(frozen=True)
class _Use:
    """A word in its context: input ids, the span of the word in them, and what is shown of it."""

    ids: list[int]
    chars: np.ndarray | None
    span: tuple[int, int]
    shown: tuple[str, str, str, str]  # place, text before, word, text after


class NeighbourSearch:
    """Search for the uses of a word in a corpus, by the vectors of a model."""

    def __init__(self, task: Task, head: Head, longest: int, layers: Sequence[int] = (-1,)) -> None:
        roles = type(head.body).roles(head.body.config)
        if Role.ENCODER not in roles:
            raise RoleError(
                f"model: {head.body.config.name!r}, as configured, gives words no vectors: it does not encode; use "
                "one that does, such as an elmo, gpt or rnn"
            )
        self.task, self.head, self.layers = task, head.eval(), tuple(layers)
        max_positions = getattr(head.body, "max_positions", None)
        self._max_tokens = max(1, min(longest, max_positions or longest) - 2)  # without BOS and EOS

    def nearest(self, text: str, word: str, corpus: Iterable[tuple[str, str]], top: int = 10) -> ContextualNeighbours:
        """Return the uses of `word` in a corpus of (place, text) that are most similar to its first use in `text`."""
        query = next(self._uses("", text, word), None)
        if query is None:
            raise DataError(f"--word: {word!r} is not in {text!r}; give a word that is")
        query_vector, best, uses = self._vectors([query])[0], list[Neighbour](), 0
        for batch in _batches(use for place, line in corpus if line != text for use in self._uses(place, line, word)):
            uses += len(batch)
            for cosine, use in zip(self._vectors(batch) @ query_vector, batch, strict=True):
                _push(best, Neighbour(min(1.0, float(cosine)), *use.shown), top)
        if not uses:
            raise DataError(f"--word: {word!r} is not in the corpus; give another word, or another corpus")
        return ContextualNeighbours(text, word, self.layers, uses, tuple(sorted(best, reverse=True)))

    def _uses(self, place: str, text: str, word: str) -> Iterator[_Use]:
        """Yield each use of a word in a text, whole and in any case, with as much context as the model reads."""
        matches = list(re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))
        if not matches:
            return
        encoding = self.task.tokenizer.encode(text)
        chars, special = self._chars(text, encoding.offsets), self.task.tokenizer.specials
        for match in matches:
            inside = [n for n, (a, b) in enumerate(encoding.offsets) if a < match.end() and b > match.start()]
            if not inside or len(inside) > self._max_tokens:
                continue
            first = max(
                0, min((inside[0] + inside[-1] + 1 - self._max_tokens) // 2, len(encoding.ids) - self._max_tokens)
            )
            last = min(first + self._max_tokens, len(encoding.ids))
            window = np.concatenate([chars[0], *chars[first + 1 : last + 1], chars[-1]]) if chars else None
            ids = [special.bos, *encoding.ids[first:last], special.eos]
            span = inside[0] - first + 1, inside[-1] - first + 2
            yield _Use(ids, window, span, (place, *_context(text, match.start(), match.end())))

    def _chars(self, text: str, offsets: Sequence[tuple[int, int]]) -> list[np.ndarray] | None:
        """Return the characters of each token of a text as the task does, with those of beginning and end."""
        if not self.task.uses_chars:
            return None
        if isinstance(self.task, LM):
            return Spelling.of(self.task.tokenizer).of_texts([text])[0]
        return [char_ids([word]) for word in ("", *(text[a:b].strip() for a, b in offsets), "")]

    def _vectors(self, uses: Sequence[_Use]) -> Tensor:
        """Return the unit vector of each use, (U, L·D)."""
        tokens = Tokens.pack([use.ids for use in uses])
        if self.task.uses_chars:
            tokens = tokens.with_chars([use.chars for use in uses if use.chars is not None])
        device = self.head.device
        with torch.inference_mode():
            hidden = torch.cat(list(self.head.body.encode(tokens.to(device), self.layers)), -1).float().cpu()
        starts = tokens.starts.tolist()
        means = [
            hidden[start + use.span[0] : start + use.span[1]].mean(0) for start, use in zip(starts, uses, strict=False)
        ]
        return F.normalize(torch.stack(means), dim=-1)


def _batches(uses: Iterable[_Use]) -> Iterator[list[_Use]]:
    """Group uses into batches of at most `BUDGET` tokens."""
    batch, size = list[_Use](), 0
    for use in uses:
        if batch and size + len(use.ids) > BATCH_TOKENS:
            yield batch
            batch, size = [], 0
        batch.append(use)
        size += len(use.ids)
    if batch:
        yield batch


def _push(best: list[Neighbour], new: Neighbour, top: int) -> None:
    """Add a use to the heap of the `top` best, if it is among them; the same context is kept once."""
    if any((new.before, new.word, new.after) == (other.before, other.word, other.after) for other in best):
        return
    if len(best) < top:
        heappush(best, new)
    elif new > best[0]:
        heapreplace(best, new)


def _context(text: str, start: int, end: int) -> tuple[str, str, str]:
    """Return the text before a word, the word, and the text after: as much as fits, cut at spaces."""
    before, after = " ".join(text[:start].split()), " ".join(text[end:].split())
    if len(before) > _CONTEXT:
        before = "… " + before[-_CONTEXT:].partition(" ")[2]
    if len(after) > _CONTEXT:
        after = after[:_CONTEXT].rpartition(" ")[0] + " …"
    return before, text[start:end], after


def check_word(text: str, word: str | None, top: int) -> str:
    """Return the word to search for; if none is given, the text, which must be one word."""
    if top < 1:
        raise ConfigError(f"--top: must be 1 or more, but is {top} instead")
    if not text.strip():
        raise ConfigError("TEXT: must have words, but is empty")
    if word is not None and not word.strip():
        raise ConfigError("--word: must be a word of the text, but is empty")
    if word is None and len(text.split()) > 1:
        raise ConfigError(f"--word: {text!r} has several words; name one, such as --word {text.split()[-1]}")
    return (word or text).strip()
