from hypothesis import given
from hypothesis import strategies as st

from weft.tasks.incremental_text import find_stop_word, grown


def chars(ids):
    return "".join(chr(id) for id in ids)


texts = st.text("abc", max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


@given(texts, stops)
def test_the_pieces_are_the_text_up_to_its_first_stop_word(text, stop):
    end = find_stop_word(text, stop)
    assert "".join(grown(map(ord, text), chars, stop)) == text[:end]


@given(texts, stops)
def test_no_piece_is_taken_back(text, stop):
    shown = ""
    for piece in grown(map(ord, text), chars, stop):
        shown += piece
        assert text.startswith(shown)


def test_half_a_character_waits():
    whole = "é".encode()
    pieces = list(grown(whole, lambda ids: bytes(ids).decode(errors="replace")))
    assert [piece for piece in pieces if piece] == ["é"]


def test_generation_ends_with_the_stop_word():
    asked = []

    def ids():
        for char in "abcabc":
            asked.append(char)
            yield ord(char)

    assert "".join(grown(ids(), chars, ["ca"])) == "ab"
    assert asked == list("abca")
