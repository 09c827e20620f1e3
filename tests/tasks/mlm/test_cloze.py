"""Cloze texts: encoding and filling masks, with the spaces around them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.mask_tokenizers import mask_tokenizer_sections, trained

from weft.tasks.mlm.cloze import Blanks

TEXTS = ["the walking dogs walked, and the talking cats talked.", "a cat, dogs and cats."] * 8
KINDS = mask_tokenizer_sections("<mask>", wordpiece=80, byte_bpe=320, character_bpe=90, unigram=60)


def make_blanks(kind):
    tokenizer = trained(KINDS[kind], TEXTS)
    return Blanks(tokenizer, tokenizer.specials.mask)


BLANKS = {kind: make_blanks(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_has_its_own_spelling_and_one_that_all_have(kind):
    blanks = BLANKS[kind]
    own = "[MASK]" if kind == "wordpiece" else "<mask>"
    assert blanks.mask_strings == list(dict.fromkeys([own, "[MASK]"]))
    assert blanks.ids(f"the {own} dogs") == blanks.ids("the [MASK] dogs")
    assert blanks.cut("a [MASK] b [MASK]") == ["a ", " b ", ""]
    assert blanks.cut("a") == ["a"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_spells_another_special_is_text(kind):
    blanks, tokenizer = BLANKS[kind], BLANKS[kind].tokenizer
    ids = blanks.ids("a [SEP] </s> [MASK]")
    assert ids.count(blanks.mask) == 1
    assert tokenizer.specials.eos not in ids
    assert tokenizer.specials.mask not in tokenizer.ids(["a [MASK]"])[0]  # what the tokenizer itself makes of it


@pytest.mark.parametrize("kind", KINDS)
@given(st.text("the dogsctalk.,[]<", max_size=30))
def test_a_text_without_masks_is_read_as_ever(kind, text):
    assert BLANKS[kind].ids(text) == BLANKS[kind].tokenizer.ids([text])[0]


def named(kind, masked):
    blanks = BLANKS[kind]
    return [blanks.tokenizer.token(id) if id != blanks.mask else "_" for id in blanks.ids(masked)]


@pytest.mark.parametrize("kind", ["wordpiece", "words"])
def test_words_know_no_spaces(kind):
    assert named(kind, "the [MASK] dogs") == named(kind, "the[MASK]dogs") == ["the", "_", "dogs"]
    assert named(kind, "[MASK], and[MASK]") == ["_", ",", "and", "_"]


@pytest.mark.parametrize("kind", ["characters", "bytes"])
def test_a_space_that_is_a_token_stays_one(kind):
    assert named(kind, "a [MASK] b") == ["a", " ", "_", " ", *named(kind, "b")]
    assert named(kind, "a [MASK]b") == ["a", " ", "_", *named(kind, "b")]


@pytest.mark.parametrize("kind", ["byte bpe", "character bpe", "unigram"])
def test_a_space_before_a_mask_is_its_own_and_one_after_it_the_next_words(kind):
    blanks = BLANKS[kind]
    before, after = blanks.tokenizer.ids(["the", " dogs"])
    assert blanks.ids("the [MASK] dogs") == blanks.ids("the[MASK] dogs") == [*before, blanks.mask, *after]
    assert blanks.ids("[MASK] dogs") == blanks.ids(" [MASK] dogs") == [blanks.mask, *after]
    assert "".join(named(kind, "the [MASK]dogs")).endswith("_dogs")
    assert "".join(named(kind, "the [MASK] [MASK], and")).endswith("__, and")


def tokens(kind, *spelt):
    engine = BLANKS[kind].tokenizer.engine
    ids = [engine.token_to_id(token) for token in spelt]
    assert None not in ids
    return ids


@pytest.mark.parametrize(
    ("kind", "masked", "spelt", "text"),
    [
        ("wordpiece", "The [MASK] ran", ["dogs"], "The dogs ran"),
        ("wordpiece", "The walk [MASK] dogs", ["##ing"], "The walking dogs"),
        ("wordpiece", "[MASK] ran [MASK]", ["cats", "and"], "cats ran and"),
        ("byte bpe", "The [MASK] ran", ["Ġdogs"], "The dogs ran"),
        ("byte bpe", "The walk [MASK] dogs", ["ing"], "The walking dogs"),
        ("byte bpe", "[MASK] ran", ["Ġdogs"], "dogs ran"),
        ("character bpe", "The [MASK], ran", ["▁dogs"], "The dogs, ran"),
        ("unigram", "The [MASK] [MASK].", ["▁", "a"], "The a."),
        ("words", "The [MASK] ran", ["dogs"], "The dogs ran"),
        ("characters", "a [MASK]og", ["d"], "a dog"),
        ("bytes", "a [MASK]og", ["d"], "a dog"),
    ],
)
def test_the_best_tokens_make_a_text(kind, masked, spelt, text):
    assert BLANKS[kind].filled(masked, tokens(kind, *spelt)) == text


def test_a_sign_of_a_space_that_is_not_there_is_taken_off():
    blanks = BLANKS["character bpe"]
    comma = blanks.tokenizer.ids([", and"])[0]
    assert blanks.tokenizer.token(comma[0]).startswith(" ")  # as every text begins
    after = blanks.ids("the [MASK], and")[2:]
    assert blanks.tokenizer.token(after[0]) == ","
