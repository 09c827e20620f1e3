"""Compiled whitespace tokenizer against the tokenizers library."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import DataError
from weft.tokenization.trainable import Tokenizer, Words
from weft.tokenization.whitespace import WordTable

quick = settings(deadline=None, derandomize=True, max_examples=30)
WHITE = [chr(code) for code in range(0x110000) if chr(code).isspace() and not 0x1C <= code <= 0x1F]
TEXTS = ["the cat <unk> sat", "na\u00efve \u6771\u4eac \U0001f642 . the", "a a\u0301 \u00c5", "</s> a", "x" * 300]


@pytest.fixture(scope="module")
def words():
    return Words.train(TEXTS, Words.Config(name="words", split="whitespace"))


def slowly(words: Words, texts):
    return [words._mask_special_ids(ids) for ids in Tokenizer.ids(words, texts)]


@quick
@given(
    st.lists(
        st.lists(st.one_of(st.sampled_from([*TEXTS, *WHITE, "<s>", "the", "<unk>", "cat"]), st.text(max_size=5))).map(
            "".join
        ),
        max_size=5,
    )
)
def test_it_is_what_the_library_gives(words, texts):
    assert words.ids(texts) == slowly(words, texts)


def test_every_sign_parts_words_as_it_does_in_the_library(words):
    signs = [chr(code) for code in range(1, 0x110000) if not 0xD800 <= code < 0xE000]
    texts = ["".join(f"the{sign}cat " for sign in signs[start : start + 4096]) for start in range(0, len(signs), 4096)]
    assert words.ids(texts) == slowly(words, texts)


def test_many_words_are_told_apart():
    names = {f"w{number}": number for number in range(5000)}
    spaces = WordTable(names, -1)
    assert spaces.ids([" ".join(names), "w5000 w17 w", ""]) == [list(range(5000)), [-1, 17, -1], []]
    assert spaces.ids([]) == []


def test_what_is_no_text_is_refused(words):
    with pytest.raises(DataError, match="surrogate"):
        words.ids(["the", "\ud800"])


def test_one_that_knows_more_words_reads_them(words):
    other = Words(words.config, type(words.engine).from_str(words.engine.to_str()))
    unknown = other.specials.unk
    assert other.ids(["bird cat"])[0][0] == unknown
    other.extend(["bird"])
    assert unknown not in other.ids(["bird cat"])[0]


def test_what_changes_words_before_they_are_looked_up_still_does():
    lower = Words.train(["The CAT 12"], Words.Config(name="words", split="whitespace", lowercase=True, zeros=True))
    assert lower.ids(["the cat 99"]) == [[lower.engine.token_to_id(word) for word in ("the", "cat", "00")]]
