"""BERT's masking: which tokens are chosen, exactly how many, and what replaces them."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mask_tokenizers import mask_tokenizer_sections, trained

from weft.errors import ConfigError
from weft.tasks.mlm.masking import MaskingVocabulary, choose_positions, mask_tokens, max_chosen_tokens

VOCAB, SPECIAL, MASK = 40, 4, 3
TEXTS = ["the walking dogs walked and the talking cats talked", "walks and talks. dogs and cats"] * 8


def masking_vocabulary(begins=None):
    special = np.arange(VOCAB) < SPECIAL
    starts = np.arange(VOCAB) % 3 > 0 if begins is None else begins
    return MaskingVocabulary(special, starts, np.zeros(VOCAB, bool), MASK)


def texts(lengths, seed=0, marks=True):
    """Return sequences of ordinary tokens, with a special token at each end."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(SPECIAL, VOCAB, sum(lengths))
    ends = np.cumsum(lengths)
    if marks:
        ids[np.concatenate([[0], ends[:-1]])], ids[ends - 1] = 0, 1
    return ids, np.array(lengths)


def rows_of(at, lengths):
    return np.searchsorted(np.cumsum(lengths), at, "right")


def due(count, share):
    return max(1, round(share * count)) if count else 0


@given(st.lists(st.integers(2, 60), min_size=1, max_size=12), st.sampled_from([0.05, 0.15, 0.5]), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_each_sequence_has_exactly_its_share_and_no_special_is_chosen(lengths, share, seed):
    ids, sizes = texts(lengths, seed)
    at = choose_positions(ids, sizes, masking_vocabulary(), share, False, np.random.default_rng(seed))
    assert (np.diff(at) > 0).all()
    assert (ids[at] >= SPECIAL).all()
    counts = np.bincount(rows_of(at, sizes), minlength=len(sizes))
    assert counts.tolist() == [due(length - 2, share) for length in lengths]
    assert len(at) <= max_chosen_tokens(share, len(ids), len(lengths), 2)


def test_the_bound_is_not_a_loose_one():
    ids, sizes = texts([128] * 50)
    at = choose_positions(ids, sizes, masking_vocabulary(), 0.15, False, np.random.default_rng(0))
    assert len(at) <= max_chosen_tokens(0.15, len(ids), 50, 2) <= 1.05 * len(at)
    # the negative control: what leaves no room for rounding is less than there can be
    ids, sizes = texts([3] * 50)
    assert len(choose_positions(ids, sizes, masking_vocabulary(), 0.15, False, np.random.default_rng(0))) > 0.15 * len(
        ids
    )


def test_every_place_is_as_likely_as_another():
    ids, sizes = texts([22] * 2000)
    at = choose_positions(ids, sizes, masking_vocabulary(), 0.15, False, np.random.default_rng(1))
    assert len(at) == 3 * 2000
    counts = np.bincount(at % 22, minlength=22)
    assert counts[0] == counts[21] == 0
    assert np.abs(counts[1:21] - 300).max() < 5 * np.sqrt(300)


def words_of(ids, sizes, vocabulary):
    """Return the positions of each word, one sequence after the other."""
    words, first = [], 0
    for size in sizes:
        word = []
        for place in range(first, first + size):
            if vocabulary.special[ids[place]]:
                word = []
                continue
            if vocabulary.begins[ids[place]] or not word:
                word = []
                words.append(word)
            word.append(place)
        first += size
    return words


@given(st.lists(st.integers(3, 60), min_size=1, max_size=12), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_whole_words_are_whole_and_fill_the_share_as_far_as_they_can(lengths, seed):
    vocabulary = masking_vocabulary()
    ids, sizes = texts(lengths, seed)
    at = set(choose_positions(ids, sizes, vocabulary, 0.15, True, np.random.default_rng(seed)).tolist())
    words = words_of(ids, sizes, vocabulary)
    for word in words:
        assert set(word) <= at or not set(word) & at
    for row, of_row in groupby(words, lambda word: int(rows_of(word[0], sizes))):
        own = list(of_row)
        taken = sum(len(word) for word in own if set(word) <= at)
        left = due(lengths[row] - 2, 0.15) - taken
        assert left >= 0
        assert all(len(word) > left for word in own if not set(word) & at)  # none that would still fit is left out


def test_by_tokens_words_come_apart():
    ids, sizes = texts([60] * 20)
    at = set(choose_positions(ids, sizes, masking_vocabulary(), 0.15, False, np.random.default_rng(0)).tolist())
    assert any(set(word) & at and not set(word) <= at for word in words_of(ids, sizes, masking_vocabulary()))


def test_of_what_is_chosen_eight_tenths_are_masked_a_tenth_changed_and_a_tenth_kept():
    ids, sizes = texts([102] * 2000)
    vocabulary = masking_vocabulary()
    at = choose_positions(ids, sizes, vocabulary, 0.15, False, np.random.default_rng(2))
    read = mask_tokens(ids, at, vocabulary, np.random.default_rng(3))
    count = len(at)
    assert count == 2000 * 15
    others = np.setdiff1d(np.arange(len(ids)), at)
    assert (read[others] == ids[others]).all()
    masked = int((read[at] == MASK).sum())
    assert abs(masked - 0.8 * count) < 4 * np.sqrt(count * 0.8 * 0.2)
    same = int((read[at] == ids[at]).sum())
    by_chance = 0.1 / (VOCAB - SPECIAL)  # another token may be the same
    assert abs(same - (0.1 + by_chance) * count) < 4 * np.sqrt(count * 0.1 * 0.9)
    changed = read[at][(read[at] != MASK) & (read[at] != ids[at])]
    assert changed.min() >= SPECIAL
    assert len(np.unique(changed)) == VOCAB - SPECIAL  # any of them


def test_it_hangs_on_the_generator_alone():
    ids, sizes = texts([50] * 9)

    def made(seed):
        rng = np.random.default_rng(seed)
        at = choose_positions(ids, sizes, masking_vocabulary(), 0.15, True, rng)
        return at.tolist(), mask_tokens(ids, at, masking_vocabulary(), rng).tolist()

    assert made(1) == made(1)
    assert made(1)[0] != made(2)[0]


def test_nothing_to_choose_from_is_nothing():
    for ids in (np.array([0, 1]), np.zeros(0, int)):
        for whole in (False, True):
            assert (
                choose_positions(
                    ids, np.array([len(ids)]), masking_vocabulary(), 0.15, whole, np.random.default_rng(0)
                ).tolist()
                == []
            )


KINDS = mask_tokenizer_sections("[MASK]", wordpiece=60, byte_bpe=290, character_bpe=60, unigram=40)


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_shows_where_words_begin(kind):
    tokenizer = trained(KINDS[kind], TEXTS)
    vocabulary = MaskingVocabulary.of(tokenizer)
    vocabulary.check_words()
    text = "the walking dogs talked"
    ids = np.array(tokenizer.ids([text])[0])
    first = vocabulary.begins[ids]
    first[0] = True
    words = np.split(ids, np.flatnonzero(first)[1:])
    assert [tokenizer.decode(word.tolist()).strip().removeprefix("##") for word in words] == text.split()
    assert vocabulary.special.sum() == len(tokenizer.special_tokens(tokenizer.config))
    assert vocabulary.special[vocabulary.mask]
    assert not vocabulary.special[ids].any()
    assert vocabulary.ends[tokenizer.ids(["."])[0][-1]]
    assert not vocabulary.ends[ids].any()


def test_a_vocabulary_that_does_not_show_it_is_refused():
    with pytest.raises(ConfigError, match=r"task\.whole_words: .* leave it out"):
        masking_vocabulary(np.zeros(VOCAB, bool)).check_words()
    masking_vocabulary().check_words()
