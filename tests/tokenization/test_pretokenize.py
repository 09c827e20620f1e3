"""Pre-tokenization of plain text, equal to that of the tokenizer `words`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import DataError
from weft.tokenization.pretokenize import split_words
from weft.tokenization.trainable import Words

WORDS = Words.train(["a b"], Words.Config(name="words"))


@given(st.text())
def test_they_are_those_of_the_tokenizer_words(text):
    cut = WORDS.encode(text).offsets
    assert split_words(text) == [text[first:last] for first, last in cut]
    assert "".join("".join(split_words(text)).split()) == "".join(text.split())  # nothing but space is lost


def test_marks_stay_with_their_letters():
    assert split_words("हिन्दी, e\u0301t\u0301") == ["हिन्दी", ",", "e\u0301t\u0301"]


def test_half_a_character_is_refused():
    with pytest.raises(DataError, match="lone surrogate"):
        split_words("\ud800")
