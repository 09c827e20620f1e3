"""Masked words: which are chosen, and what is read in their place (Devlin et al. 2019, sections 3.1 and A.1).

Of n tokens that are no specials, max(1, round(share · n)) are chosen in each sequence. Of these 80 % are read as the
mask, 10 % as any token of the vocabulary, specials aside, and 10 % as they are: a model cannot know which tokens are
right, so it must have an opinion on all. With whole words, all pieces of a word are chosen or none; words come in
random order, and one that would be more than the number allows is passed over, as in BERT's own code.
"""

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from weft.errors import ConfigError
from weft.tokenization.backend import BYTES, SPACE
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Specials

MASKED, CHANGED = 0.8, 0.1  # of what is chosen, the share that is read as the mask, and as another token
_SPACES = {SPACE, *(sign for sign, byte in BYTES.items() if chr(byte).isspace() and byte < 0x80)}
_ENDINGS = tuple(".!?…。！？\n")  # of a sentence
_CLOSING = "\"'”’)]»"  # what may stand after them


@dataclass(frozen=True)
class Vocabulary:
    """What masking must know of tokens, (V,) each."""

    special: np.ndarray  # whether it is one that no text has
    begins: np.ndarray  # whether a word begins with it
    ends: np.ndarray  # whether a sentence ends with it
    mask: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """Look through the vocabulary of a tokenizer that has a mask."""
        assert tokenizer.specials.mask is not None
        special, begins, ends = (np.zeros(len(tokenizer), bool) for _ in range(3))
        for token, id in tokenizer.engine.get_vocab().items():
            begins[id], ends[id] = _begins(token, tokenizer), _ends(token)
        known = (getattr(tokenizer.specials, role.name) for role in fields(Specials))
        special[[id for id in known if id is not None]] = True
        return cls(special, begins, ends, tokenizer.specials.mask)

    @cached_property
    def ordinary(self) -> np.ndarray:
        """The tokens that a text may have."""
        return np.flatnonzero(~self.special)

    def check_words(self) -> None:
        """Refuse a vocabulary that does not say where words begin."""
        if not self.begins[self.ordinary].any():
            raise ConfigError(
                "task.whole_words: the tokenizer's vocabulary does not show where a word begins; leave it out"
            )


def _begins(token: str, tokenizer: Tokenizer) -> bool:
    if tokenizer.model == "WordPiece":
        return not token.startswith(str(tokenizer.engine.model.continuing_subword_prefix))
    return tokenizer.model == "WordLevel" or token[:1] in _SPACES or token[:1].isspace()


def _ends(token: str) -> bool:
    return token.rstrip(_CLOSING).endswith(_ENDINGS) or token in ("Ċ", "<0x0A>")


def chosen_at_most(share: float, tokens: int, rows: int, specials: int) -> int:
    """Say how many tokens can be chosen at most, of so many in so many sequences that have so many specials each."""
    spare = max(0.5 - share * specials, 1 - share * (specials + 1), 0.0)  # what rounding can add to a sequence's share
    return int(np.ceil(share * tokens + spare * rows))


def choose(
    ids: np.ndarray, lengths: np.ndarray, known: Vocabulary, share: float, whole: bool, rng: np.random.Generator
) -> np.ndarray:
    """Choose tokens (M,), by their flat positions in order, of sequences laid end to end."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    free = ~known.special[ids]
    first = np.ones(len(ids), bool)  # of a word
    if whole:
        first[1:] = known.begins[ids[1:]] | ~free[:-1] | (rows[1:] != rows[:-1])
    places = np.flatnonzero(free)
    words = np.cumsum(first[places]) - 1
    counts = np.bincount(rows[places], minlength=len(lengths))
    room = np.where(counts > 0, np.maximum(np.rint(share * counts), 1), 0).astype(np.int64)
    taken = _take(np.bincount(words), rows[places[first[places]]], room, rng)
    found: np.ndarray = places[taken[words]] if len(places) else places
    return found


def _take(sizes: np.ndarray, rows: np.ndarray, room: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Take words, (W,) of such sizes in such rows, in random order, each that there is still room for in its row.

    A turn takes, in all rows at once, what comes before the first word that is too much. That word is too much for
    good, for room only ever gets less.
    """
    taken, room = np.zeros(len(sizes), bool), room.copy()
    left = np.argsort(rows + rng.random(len(rows)))
    while len(left := left[sizes[left] <= room[rows[left]]]):
        own, size = rows[left], sizes[left]
        ends = np.cumsum(size)
        firsts = np.flatnonzero(np.diff(own, prepend=-1))
        before = np.repeat((ends - size)[firsts], np.diff(firsts, append=len(own)))
        fits = ends - before <= room[own]
        taken[left[fits]] = True
        room -= np.bincount(own[fits], size[fits], len(room)).astype(np.int64)
        left = left[~fits]
    return taken


def hide(ids: np.ndarray, at: np.ndarray, known: Vocabulary, rng: np.random.Generator) -> np.ndarray:
    """Return what is read in place of the ids, of which those `at` were chosen."""
    read, drawn = ids.copy(), rng.random(len(at))
    read[at[drawn < MASKED]] = known.mask
    changed = at[(drawn >= MASKED) & (drawn < MASKED + CHANGED)]
    read[changed] = rng.choice(known.ordinary, len(changed))
    return read
