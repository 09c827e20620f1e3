"""SentencePiece model files and segmentation against its own library: equal pieces, offsets and ids."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.marian_folders import MANY, SOURCES, TARGETS, sentencepiece, sides, spm

from weft.errors import CheckpointError
from weft.tokenization.sentencepiece import segmenter
from weft.tokenization.sentencepiece.model_file import BYTE, parse_spm, read_spm
from weft.tokenization.sentencepiece.segmenter import Segmenter

SYMBOLS = ["<x>", "(", ".", "é"]
CASES = {
    "unigram": {},
    "bpe": {"kind": "bpe"},
    "unigram with symbols of a user": {"user_defined_symbols": SYMBOLS, "character_coverage": 0.98},
    "bpe with symbols of a user": {"kind": "bpe", "user_defined_symbols": SYMBOLS, "character_coverage": 0.98},
    "as it is": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False},
    "without capitals": {"normalization_rule_name": "nmt_nfkc_cf", "remove_extra_whitespaces": False},
}


@cache
def trained(case):
    """Train a model; return it as read by sentencepiece and by weft."""
    file = spm(SOURCES + TARGETS[-3:] * 10, **CASES[case])
    return sentencepiece.SentencePieceProcessor(model_proto=file), parse_spm(file, "it")


def check_segmentation(there, here, text):
    pieces, raw, segmentation = there.encode(text, return_type="proto").pieces, text.encode(), here.segment(text)
    assert segmentation.ids.tolist() == [piece.id for piece in pieces]
    assert segmentation.pieces() == [piece.piece for piece in pieces]
    offsets = [(len(raw[: piece.begin].decode()), len(raw[: piece.end].decode())) for piece in pieces]
    assert segmentation.offsets(text) == offsets


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_read(case, tmp_path):
    there, here = trained(case)
    (tmp_path / "it.spm").write_bytes(here.raw)
    assert read_spm(tmp_path / "it.spm") == here
    assert list(here.pieces) == [there.id_to_piece(id) for id in range(len(there))]
    assert list(here.scores) == [there.get_score(id) for id in range(len(there))]
    assert here.unk == there.unk_id()
    assert here.kind == ("bpe" if "bpe" in case else "unigram")
    assert here.add_dummy_prefix == CASES[case].get("add_dummy_prefix", True)
    assert here.remove_extra_whitespaces == CASES[case].get("remove_extra_whitespaces", True)


@pytest.mark.parametrize("case", CASES)
def test_texts_are_cut_the_same(case):
    there, file = trained(case)
    here = Segmenter(file)

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(MANY)
    def each(texts):
        for text in texts:
            check_segmentation(there, here, text)

    each()
    for text in ("", " ", "a" * 3000, " ".join(SOURCES), "=" * 500 + "東" * 500, "\u0300" * 300, "ﷺ" * 50):
        check_segmentation(there, here, text)


def test_another_search_is_caught(monkeypatch):
    """The negative controls: another model, spaces that are kept, and no rules."""
    there, file = trained("unigram")
    with pytest.raises(AssertionError):
        check_segmentation(there, Segmenter(parse_spm(sides()[1], "another")), "the value of an expression")
    with pytest.raises(AssertionError):
        check_segmentation(there, Segmenter(replace(file, remove_extra_whitespaces=False)), "two  spaces")
    monkeypatch.setattr(segmenter, "split_charsmap", lambda charsmap: (b"", b""))
    with pytest.raises(AssertionError):
        check_segmentation(there, Segmenter(file), "ﬁne １２３")


def varint(number):
    return bytes([number & 0x7F | 0x80] * (number > 0x7F) + [number >> 7 or number])


def field(number, value):
    return varint(number << 3 | 2) + varint(len(value)) + value


def piece(name, kind=1):
    return field(1, field(1, name.encode()) + bytes([3 << 3, kind]))


UNKNOWN = piece("<unk>", 2)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"", "one piece for the unknown, but has 0 in 0 pieces"),
        (b"\xff" * 11, "more than ten bytes"),
        (b"\x0a\xff", "ends in the middle of a number"),
        (b"\x0a\x05ab", "field 1 ends after the file does"),
        (b"\x0b", "field 1 is written in a way"),
        (b"\x08\x01", "a number (1) stands where text must"),
        (UNKNOWN + field(1, field(1, b"\xff\xfe")), "codec can't decode"),
        (UNKNOWN + field(1, b""), "the piece '' with"),
        (UNKNOWN + piece("a") + piece("a"), "a piece twice"),
        (UNKNOWN + UNKNOWN, "one piece for the unknown, but has 2"),
        (UNKNOWN + piece("a", 9), "type 9 is none"),
        (UNKNOWN + field(2, b"\x18\x04"), "its model_type is 4, and only unigram (1) and bpe (2)"),
        (UNKNOWN + piece("<0x00>", BYTE), "falls back to bytes (byte_fallback)"),
        (UNKNOWN + field(2, varint(24 << 3) + b"\x01"), "treat_whitespace_as_suffix"),
        (UNKNOWN + piece("a", 5) + field(2, b"\x18\x02"), "merges that are not used"),
        (UNKNOWN + field(3, field(2, b"\x08\x00\x00\x00abcd")), "rules for characters are damaged"),
    ],
)
def test_a_damaged_file_is_refused(file, message, tmp_path):
    (tmp_path / "it.spm").write_bytes(file)
    with pytest.raises(CheckpointError) as error:
        read_spm(tmp_path / "it.spm")
    assert str(error.value).startswith(f"{tmp_path / 'it.spm'}: cannot be read as a SentencePiece model: ")
    assert message in str(error.value)


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="it.spm: cannot be read"):
        read_spm(tmp_path / "it.spm")
    (tmp_path / "it.spm").write_bytes(UNKNOWN)
    assert read_spm(tmp_path / "it.spm").pieces == ("<unk>",)
    monkeypatch.setattr("weft.tokenization.sentencepiece.model_file.LARGEST", 3)
    with pytest.raises(CheckpointError, match="which no SentencePiece model has"):
        read_spm(tmp_path / "it.spm")


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_bytes_that_were_changed_are_refused_or_read_and_never_more(data):
    """A truncated or modified model file either raises or is another valid model."""
    file = bytearray(sides()[0])
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    whole = bytes(file[: data.draw(st.integers(0, len(file)))]) if data.draw(st.booleans()) else bytes(file)
    try:
        read = parse_spm(whole, "it")
    except CheckpointError:
        return
    assert sum(map(len, Segmenter(read).segment("The café's １２３ ﬁne\tvalues").pieces())) < 1000
