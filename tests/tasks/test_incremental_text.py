from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.registry import resolve
from weft.tasks.incremental_text import IncrementalText, find_stop_word
from weft.tasks.incremental_text import grown as grown_text
from weft.tokenization.base import train_tokenizer


def chars(ids):
    return "".join(chr(id) for id in ids)


def grown(ids, decode, stop=()):
    return grown_text(ids, IncrementalText(decode, stop))


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


@given(st.lists(texts, max_size=6), stops, texts)
def test_several_tokens_at_once_after_a_context(parts, stop, context):
    text, whole = IncrementalText(chars, stop, list(map(ord, context))), "".join(parts)
    shown = ""
    for part in parts:
        if not text.stopped:
            shown += text.add(*map(ord, part))
    assert shown + text.end() == whole[: find_stop_word(whole, stop)]


TOKENIZERS = [("words", 0), ("characters", 0), ("bytes", 0), ("bpe", 300), ("wordpiece", 90), ("unigram", 90)]
LINES = [
    "A misty ridge uprises from the surge.",
    "It's 5 o'clock, don't wait!",
    "Ünïcode: 東京 🙂 naïve café",
    "a b  c",
]


@cache
def trained(name, size):
    return train_tokenizer(resolve("tokenizer", name).Config(name=name, **({"size": size} if size else {})), 20 * LINES)


@pytest.mark.parametrize(("name", "size"), TOKENIZERS)
@given(data=st.data())
def test_the_pieces_are_the_text_of_all_tokens(name, size, data):
    """Whatever the tokenizer and however the tokens come; `bpe` of bytes has characters of several tokens."""
    tokenizer = trained(name, size)
    line = data.draw(st.sampled_from(LINES))
    ids = tokenizer.ids([line])[0]
    start = data.draw(st.integers(0, len(ids)))
    text, shown = IncrementalText(tokenizer.decode, (), ids[:start]), ""
    at = start
    while at < len(ids):
        step = data.draw(st.integers(1, 4))
        shown += text.add(*ids[at : at + step])
        at += step
    shown += text.end()
    whole, before = tokenizer.decode(ids), tokenizer.decode(ids[:start])
    if not before.endswith("\N{REPLACEMENT CHARACTER}"):  # the text before ends within a character
        assert shown == whole.removeprefix(before)
