"""The tokenizer `sentencepiece` against transformers' MarianTokenizer: equal ids on both sides, equal text."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.marian_folders import MANY, TEXTS, read_tokenizer, write_tokenizer

from weft.errors import CheckpointError, ConfigError, DataError
from weft.formats.huggingface.marian import MARIAN_MAP
from weft.formats.huggingface.marian_tokenizer import read_marian
from weft.tasks.corpus.reuse import vocabulary
from weft.tokenization.sentencepiece.marian import SentencePiece
from weft.tokenization.trainable import load_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Return transformers' tokenizer and ours, of the same files."""
    folder = tmp_path_factory.mktemp("marian")
    size = write_tokenizer(folder)
    (folder / "config.json").write_text(f'{{"decoder_start_token_id": {size - 1}}}', encoding="utf-8")
    return read_tokenizer(folder), read_marian(folder, MARIAN_MAP, size)


def check_ids(there, here, texts):
    """Special token strings are text in weft: transformers has an option for that."""
    plain = {"add_special_tokens": False, "split_special_tokens": True}
    must = [there(text, **plain)["input_ids"] for text in texts]
    assert here.ids(texts) == must
    assert [here.encode(text).ids for text in texts] == must
    assert here.target.ids(texts) == [there(text_target=text, **plain)["input_ids"] for text in texts]


def test_the_ids_are_transformers(both):
    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(MANY)
    def each(texts):
        check_ids(*both, texts)

    each()
    check_ids(*both, TEXTS)


def test_the_sides_turned_about_are_caught(both):
    """The negative control."""
    there, here = both
    with pytest.raises(AssertionError):
        check_ids(there, SentencePiece(here.config, here.engine, here.target.spm, here), TEXTS)


def test_text_comes_back_as_transformers_has_it(both):
    there, here = both

    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.integers(0, len(here) - 1), max_size=30))
    def each(ids):
        assert here.target.decode(ids) == there.decode(ids, skip_special_tokens=True)

    each()
    assert here.decode(here.ids(["an  object 漢字 "])[0]) == "an object"


def test_what_no_side_knows_is_unknown_and_what_the_other_knows_is_not(both):
    _, here = both
    unknown = here.specials.unk
    assert here.ids(["漢"])[0][-1] == unknown
    (kyo,) = (id for id in here.ids(["東"])[0] if here.token(id) == "東")  # of the target's model alone
    assert "東" not in here.spm.pieces
    assert kyo != unknown
    pieces = here.encode("a </s> b")
    assert here.specials.eos not in pieces.ids


def test_a_code_of_a_language_is_one_token(both):
    _, here = both
    encoding = here.encode(">>fra<< The value")
    assert encoding.tokens[0] == ">>fra<<"
    assert encoding.ids[0] == here.engine.token_to_id(">>fra<<")
    assert encoding.offsets[0] == (0, 7)
    assert here.encode(">>xyz<< a").ids[0] == here.specials.unk
    assert here.encode("a >>fra<<").tokens[0] != ">>fra<<"


def test_offsets_are_places_in_the_text(both):
    _, here = both
    text = ">>fra<<The value of １２ ﬁne"
    encoding = here.encode(text)
    assert "".join(text[begin:end] for begin, end in encoding.offsets) == text
    assert [begin for begin, _ in encoding.offsets] == sorted(begin for begin, _ in encoding.offsets)


def test_it_is_saved_and_sent_to_workers_whole(both, tmp_path):
    _, here = both
    here.save(tmp_path)
    for again in (load_tokenizer(here.config, tmp_path), pickle.loads(pickle.dumps(here))):
        assert again.ids(TEXTS) == here.ids(TEXTS)
        assert again.target.ids(TEXTS) == here.target.ids(TEXTS)
        assert again.joint
        assert again.specials == here.specials
        assert vocabulary(again) == vocabulary(here)
    other = SentencePiece(here.config, here.engine, here.target.spm, here.target)
    assert vocabulary(other) != vocabulary(here)
    (tmp_path / "tokenizer.target.spm").unlink()
    with pytest.raises(CheckpointError, match="tokenizer.target.spm: cannot be read"):
        load_tokenizer(here.config, tmp_path)


def test_it_is_not_trained_nor_changed(both):
    _, here = both
    with pytest.raises(ConfigError, match="comes with a model that is named in model.weights"):
        train_tokenizer(SentencePiece.Config(name="sentencepiece"), ["a text"])
    with pytest.raises(ValueError, match="how texts are prepared is in the model's files"):
        SentencePiece.Config(name="sentencepiece", lowercase=True)
    with pytest.raises(DataError, match="not in this vocabulary"):
        here.decode([len(here)])
    with pytest.raises(CheckpointError, match="tokenizer.target must be 'sentencepiece', but is 'words'"):
        load_tokenizer(SentencePiece.Config(name="sentencepiece", target={"name": "words"}), None)
