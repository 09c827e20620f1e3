"""Very long texts: in pieces they have the same tokens, and no call of the tokenizer gets more than a piece."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.registry import resolve
from weft.tokenization import long_texts
from weft.tokenization.base import train_tokenizer
from weft.tokenization.long_texts import group_texts, split_text

TEXTS = [
    "the cat sat on the mat",
    "un été à Zürich: 12 °C, déjà vu!",
    "a\tb\nc  d   e",
    "don't <s> [MASK] </s>",
    "日本語 の 文",
]
CONFIGS = [
    {"name": "words"},
    {"name": "words", "split": "whitespace"},
    {"name": "words", "zeros": True, "lowercase": True},
    {"name": "characters"},
    {"name": "bytes"},
    {"name": "bpe", "size": 300},
    {"name": "bpe", "size": 60, "bytes": False},
    {"name": "wordpiece", "size": 120, "lowercase": True},
    {"name": "unigram", "size": 60},
]


@pytest.fixture(params=CONFIGS, ids=str)
def tokenizer(request):
    return train_tokenizer(resolve("tokenizer", request.param["name"]).Config(**request.param), TEXTS)


@pytest.fixture
def short_pieces(monkeypatch):
    """Let a piece have 40 characters, and a group 100."""
    for module in ("long_texts", "base"):
        monkeypatch.setattr(f"weft.tokenization.{module}.MAX_PIECE", 40)
    monkeypatch.setattr(long_texts, "MAX_GROUP", 100)


words = st.sampled_from(
    ["cat", "mat", "été", "Zürich", "12", "don't", "<s>", "[MASK]", "the", "°C,", "日本語", "\t", "\n\n", " "]
)
long_text = st.lists(words, min_size=30, max_size=60).map(" ".join)


def test_the_pieces_of_a_text_have_its_tokens(tokenizer, monkeypatch):
    @settings(max_examples=25)
    @given(st.lists(long_text, max_size=3))
    def check(texts):
        whole, encodings = tokenizer.ids(texts), [tokenizer.encode(text) for text in texts]
        with monkeypatch.context() as patch:
            patch.setattr("weft.tokenization.base.MAX_PIECE", 40)
            patch.setattr(long_texts, "MAX_PIECE", 40)
            assert tokenizer.ids(texts) == whole
            assert [tokenizer.encode(text) for text in texts] == encodings

    check()


def test_pieces_that_are_cut_anywhere_would_not(tokenizer, short_pieces, monkeypatch):
    if tokenizer.config.name in ("characters", "bytes"):
        pytest.skip("each character is a token")
    text = "the cat sat on the mat " * 10
    expected = tokenizer.ids([text])
    monkeypatch.setattr(long_texts, "_piece_end", lambda text, start: start + 37)
    assert tokenizer.ids([text]) != expected


def test_no_call_gets_more_than_a_piece_or_a_group(short_pieces):
    text = "word " * 100 + "x" * 100 + "\n" + "y" * 30
    pieces = list(split_text(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) == 40
    texts = ["a" * 30] * 7 + [text, "b", text, ""] + ["c"] * 150
    groups = list(group_texts(texts))
    assert [text for group in groups for text in group] == texts
    assert all(len(group) == 1 or sum(map(len, group)) <= 100 for group in groups)
    assert [len(group) for group in groups] == [3, 3, 1, 1, 1, 1, 100, 51]
    assert list(group_texts([])) == []


def test_no_more_is_tokenized_than_is_needed(tokenizer, short_pieces):
    text = "the cat sat on the mat " * 50
    whole, short = tokenizer.ids([text])[0], "the cat"
    beginning, other = tokenizer.ids([text, short], 5)
    assert 5 <= len(beginning) <= 45
    assert beginning == whole[: len(beginning)]
    assert tokenizer.encode(text, 5).ids == beginning
    assert other == tokenizer.ids([short])[0]
