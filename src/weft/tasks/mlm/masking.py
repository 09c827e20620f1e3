"""BERT's masking: which tokens are chosen, and what replaces them (Devlin et al. 2019, sections 3.1 and A.1).

Of n tokens that are not special, max(1, round(share · n)) are chosen in each sequence. Of these 80 % are replaced by
the mask, 10 % by a random token of the vocabulary, special tokens aside, and 10 % are left as they are: a model cannot
tell which tokens are correct, so it must represent all. With whole words, all or no tokens of a word are chosen; words
come in random order, and one that would exceed the number is skipped, as in BERT's own code.
"""

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from weft.errors import ConfigError
from weft.tokenization.backend import BYTES, SPACE
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Specials

MASKED, CHANGED = 0.8, 0.1  # share of the chosen tokens replaced by the mask, and by a random token
_SPACES = {SPACE, *(char for char, byte in BYTES.items() if chr(byte).isspace() and byte < 0x80)}
_ENDINGS = tuple(".!?…。！？\n")  # of a sentence
_CLOSING = "\"'”’)]»"  # may follow them


@dataclass(frozen=True)
class MaskingVocabulary:
    """Properties of the tokens of a vocabulary, (V,) each."""

    special: np.ndarray  # whether it is a special token
    begins: np.ndarray  # whether it begins a word
    ends: np.ndarray  # whether it ends a sentence
    mask: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "MaskingVocabulary":
        """Return the properties of the vocabulary of a tokenizer that has a mask."""
        assert tokenizer.specials.mask is not None
        special, begins, ends = (np.zeros(len(tokenizer), bool) for _ in range(3))
        for token, id in tokenizer.engine.get_vocab().items():
            begins[id], ends[id] = _begins_word(token, tokenizer), _ends_sentence(token)
        special_ids = (getattr(tokenizer.specials, role.name) for role in fields(Specials))
        special[[id for id in special_ids if id is not None]] = True
        return cls(special, begins, ends, tokenizer.specials.mask)

    @cached_property
    def ordinary(self) -> np.ndarray:
        """The ids of tokens that are not special."""
        return np.flatnonzero(~self.special)

    def check_words(self) -> None:
        """Raise if the vocabulary does not show where words begin."""
        if not self.begins[self.ordinary].any():
            raise ConfigError(
                "task.whole_words: the tokenizer's vocabulary does not show where a word begins; leave it out"
            )


def _begins_word(token: str, tokenizer: Tokenizer) -> bool:
    if tokenizer.model == "WordPiece":
        return not token.startswith(str(tokenizer.engine.model.continuing_subword_prefix))
    return tokenizer.model == "WordLevel" or token[:1] in _SPACES or token[:1].isspace()


def _ends_sentence(token: str) -> bool:
    return token.rstrip(_CLOSING).endswith(_ENDINGS) or token in ("Ċ", "<0x0A>")


def max_chosen_tokens(share: float, tokens: int, rows: int, specials: int) -> int:
    """Return the most tokens that can be chosen, of `tokens` in `rows` sequences with `specials` specials each."""
    rounding = max(0.5 - share * specials, 1 - share * (specials + 1), 0.0)  # what it can add to a sequence's share
    return int(np.ceil(share * tokens + rounding * rows))


def choose_positions(
    ids: np.ndarray,
    lengths: np.ndarray,
    vocabulary: MaskingVocabulary,
    share: float,
    whole_words: bool,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return the sorted flat positions (M,) of the tokens chosen in concatenated sequences."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    ordinary = ~vocabulary.special[ids]
    first = np.ones(len(ids), bool)  # of a word
    if whole_words:
        first[1:] = vocabulary.begins[ids[1:]] | ~ordinary[:-1] | (rows[1:] != rows[:-1])
    candidates = np.flatnonzero(ordinary)
    words = np.cumsum(first[candidates]) - 1
    counts = np.bincount(rows[candidates], minlength=len(lengths))
    budget = np.where(counts > 0, np.maximum(np.rint(share * counts), 1), 0).astype(np.int64)
    is_chosen = _choose_words(np.bincount(words), rows[candidates[first[candidates]]], budget, rng)
    chosen: np.ndarray = candidates[is_chosen[words]] if len(candidates) else candidates
    return chosen


def _choose_words(sizes: np.ndarray, rows: np.ndarray, budget: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return which words (W,), of these sizes and rows, are chosen: in random order, each that fits its row's budget.

    An iteration chooses, in all rows at once, the words before the first that does not fit. That word will never fit,
    since budgets only shrink.
    """
    is_chosen, budget = np.zeros(len(sizes), bool), budget.copy()
    remaining = np.argsort(rows + rng.random(len(rows)))
    while len(remaining := remaining[sizes[remaining] <= budget[rows[remaining]]]):
        row, length = rows[remaining], sizes[remaining]
        ends = np.cumsum(length)
        row_starts = np.flatnonzero(np.diff(row, prepend=-1))
        before = np.repeat((ends - length)[row_starts], np.diff(row_starts, append=len(row)))
        fits = ends - before <= budget[row]
        is_chosen[remaining[fits]] = True
        budget -= np.bincount(row[fits], length[fits], len(budget)).astype(np.int64)
        remaining = remaining[~fits]
    return is_chosen


def mask_tokens(ids: np.ndarray, at: np.ndarray, vocabulary: MaskingVocabulary, rng: np.random.Generator) -> np.ndarray:
    """Return the ids with those `at` the chosen positions replaced."""
    masked, draws = ids.copy(), rng.random(len(at))
    masked[at[draws < MASKED]] = vocabulary.mask
    changed = at[(draws >= MASKED) & (draws < MASKED + CHANGED)]
    masked[changed] = rng.choice(vocabulary.ordinary, len(changed))
    return masked
