"""Vocabularies that were made elsewhere, by their files."""

import pytest
from tests import hf_folders

from weft.errors import CheckpointError
from weft.text.vocabularies import read_engine, section_of

TEXT = "the lambda Expression, naïve"


@pytest.mark.parametrize(
    ("style", "vocabulary", "theirs"),
    [
        ("byte-bpe", hf_folders.byte_vocabulary, "GPT2Tokenizer"),
        ("word-bpe", hf_folders.word_vocabulary, "OpenAIGPTTokenizer"),
    ],
)
def test_files_are_read_as_transformers_reads_them(style, vocabulary, theirs, tmp_path):
    hf_folders.write_vocabulary(tmp_path, *vocabulary())
    engine, other = read_engine(tmp_path, style), getattr(hf_folders.transformers, theirs).from_pretrained(tmp_path)
    ids = engine.encode(TEXT).ids
    assert ids == other(TEXT).input_ids
    assert engine.decode(ids) == other.decode(ids)
    assert section_of(engine, 500) == {"name": "bpe", "size": 500, "bytes": style == "byte-bpe"}
    engine.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "vocab.json").unlink()
    assert read_engine(tmp_path, style).encode(TEXT).ids == ids


def test_another_style_is_another_reading(tmp_path):
    """The negative control."""
    hf_folders.write_vocabulary(tmp_path, *hf_folders.byte_vocabulary())
    ids = [read_engine(tmp_path, "byte-bpe", widened).encode(TEXT).ids for widened in (False, True)]
    assert ids[0] != ids[1]
    assert (
        read_engine(tmp_path, "byte-bpe", True).encode(TEXT).ids
        == read_engine(tmp_path, "byte-bpe").encode(f" {TEXT}").ids
    )


def test_what_is_not_there_or_no_vocabulary_is_told(tmp_path):
    with pytest.raises(CheckpointError, match=r"looked for tokenizer.json, or vocab.json and merges.txt"):
        read_engine(tmp_path, "byte-bpe")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot be read as a tokenizer"):
        read_engine(tmp_path, "byte-bpe")
