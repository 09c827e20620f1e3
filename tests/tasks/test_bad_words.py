import pytest
from tests.mask_tokenizers import mask_tokenizer_sections, trained

from weft.decoding.config import DecodingConfig
from weft.errors import ConfigError
from weft.tasks.bad_words import BadWords, bad_word_ids

TEXTS = ["the cat sat on the mat (mat)", "a cat, the cat and (the cat)", "concat the mat on a mat"] * 5
SECTIONS = mask_tokenizer_sections("<mask>", wordpiece=60, byte_bpe=300, character_bpe=60, unigram=40)


@pytest.mark.parametrize("kind", SECTIONS)
@pytest.mark.parametrize("text", ["cat the", "the cat", "a cat", "(cat the"])
def test_what_the_tokenizer_writes_is_found_wherever_it_stands(kind, text):
    tokenizer = trained(SECTIONS[kind], TEXTS)
    ids = tokenizer.ids([text])[0]
    bad = BadWords(tokenizer)(["cat"])
    assert any(tuple(ids[at : at + len(word)]) == word for word in bad for at in range(len(ids))), (bad, ids)


@pytest.mark.parametrize("kind", ["words", "wordpiece", "byte bpe", "unigram"])
def test_another_word_is_not(kind):
    """The negative control."""
    tokenizer = trained(SECTIONS[kind], TEXTS)
    ids = tokenizer.ids(["the mat on a mat"])[0]
    assert not any(tuple(ids[at : at + len(word)]) == word for word in BadWords(tokenizer)(["cat"]) for at in range(9))


def test_what_cannot_be_written_has_no_tokens():
    tokenizer = trained(SECTIONS["words"], TEXTS)
    assert BadWords(tokenizer)(["dog"]) == []
    assert tokenizer.ids(["dog"]) == [[tokenizer.specials.unk]]


def test_what_has_no_tokens_is_refused():
    with pytest.raises(ConfigError, match="bad_words: ' ' has no tokens"):
        BadWords(trained(SECTIONS["words"], TEXTS))([" "])


def test_a_head_without_a_tokenizer_refuses_them():
    assert bad_word_ids(None, DecodingConfig()) == []
    with pytest.raises(ConfigError, match="bad_words: this head has no tokenizer"):
        bad_word_ids(None, DecodingConfig(bad_words=("cat",)))
