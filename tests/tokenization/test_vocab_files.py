"""Pretrained vocabulary files, read as tokenizers."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import bert_folders, hf_folders

from weft.errors import CheckpointError
from weft.formats.huggingface import bert
from weft.formats.huggingface.tokenizer import read_tokenizer
from weft.tokenization.vocab_files import read_engine, section_of

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
    lowered = {} if style == "byte-bpe" else {"lowercase": True}
    assert section_of(engine, 500) == {"name": "bpe", "size": 500, "bytes": style == "byte-bpe", **lowered}
    engine.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "vocab.json").unlink()
    assert read_engine(tmp_path, style).encode(TEXT).ids == ids


def test_another_style_is_another_reading(tmp_path):
    """The negative control."""
    hf_folders.write_vocabulary(tmp_path, *hf_folders.byte_vocabulary())
    plain, widened = (
        read_engine(tmp_path, "byte-bpe", {"add_prefix_space": prefix_space}) for prefix_space in (False, True)
    )
    assert plain.encode(TEXT).ids != widened.encode(TEXT).ids
    assert widened.encode(TEXT).ids == plain.encode(f" {TEXT}").ids


def test_what_is_not_there_or_no_vocabulary_is_told(tmp_path):
    with pytest.raises(CheckpointError, match=r"looked for tokenizer.json, or vocab.json and merges.txt"):
        read_engine(tmp_path, "byte-bpe")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: cannot be read as a tokenizer"):
        read_engine(tmp_path, "byte-bpe")


def test_no_file_of_wordpieces_or_of_sentencepiece(tmp_path):
    with pytest.raises(CheckpointError, match=r"looked for tokenizer.json, or vocab.txt"):
        read_engine(tmp_path, "wordpiece")
    (tmp_path / "spiece.model").write_bytes(b"\x0a\xff")
    with pytest.raises(CheckpointError, match=r"spiece.model cannot be read as a tokenizer: .*SentencePiece model"):
        read_engine(tmp_path, "sentencepiece")


# BERT's family, id for id. A special that a text spells is text here, and so it is there if `split_special_tokens` is
# set; but for ALBERT's <unk> and <pad>, which are whole words of its vocabulary: there such a text is taken for them.

CASES = {
    "uncased": ("bert", {}),
    "cased": ("bert", {"do_lower_case": False}),
    "with accents": ("bert", {"do_lower_case": True, "strip_accents": False}),
    "chinese words": ("bert", {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False}),
    "distilbert": ("distilbert", {}),
    "roberta": ("roberta", {}),
    "roberta after a space": ("roberta", {"add_prefix_space": True}),
    "albert": ("albert", {}),
    "albert with capitals": ("albert", {"do_lower_case": False, "keep_accents": True}),
}
MAPS = {family.model_type: family for family in bert.MAPS}
FIXED = [
    "",
    " ",
    "The café's naïve 1,234 GUESTS—don't!",
    "e\u0301 É ñ İstanbul ß Ǆ ﬁ ½",
    "東京 한국 ا क्षि",
    "🙂 👩\u200d👩\u200d👧 \U000e0041",
    "a\x00b\x07c\td\r\ne\u200d\u00ad\ufffd\u2028\u0085\u3000f",
    "x" * 150,
    "lambda" * 60,
    "the [MASK] [CLS]x[SEP] <mask></s> [UNK]",
    "``quoted'' ▁##ing ##",
]
strings = st.sampled_from([*FIXED, "the ", "lambda", " ", "\n", "[MASK]", "<mask>", "</s>", "'s", "1,2", "(", "-"])
texts = st.one_of(st.text(max_size=60), st.lists(st.one_of(strings, st.text(max_size=4)), max_size=10).map("".join))


@cache
def tokenizers(case: str):
    family, tokenizer_config = CASES[case]
    name = {"distilbert": "DistilBert"}.get(family, family.title())
    with TemporaryDirectory() as place:
        folder = Path(place) / "it"
        size = bert_folders.write_files(folder, family)
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        theirs = getattr(hf_folders.transformers, f"{name}Tokenizer").from_pretrained(folder)
        return read_tokenizer(folder, MAPS[family], size), theirs


def check_ids(case, text):
    mine, theirs = tokenizers(case)
    ids = mine.encode(text).ids
    assert mine.ids([text]) == [ids]
    if case.startswith("albert") and any(special in text for special in ("<unk>", "<pad>")):
        return
    assert ids == theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids


@pytest.mark.parametrize("case", CASES)
def test_id_for_id(case):
    @settings(derandomize=True, deadline=None, max_examples=60, database=None)
    @given(texts)
    def each(text):
        check_ids(case, text)

    each()
    for text in FIXED:
        check_ids(case, text)


@pytest.mark.parametrize("case", CASES)
def test_specials_have_their_numbers_and_what_spells_them_is_text(case):
    mine, theirs = tokenizers(case)
    special = mine.specials
    assert (special.bos, special.eos) == (theirs.cls_token_id, theirs.sep_token_id)
    assert (special.unk, special.mask, special.pad) == (theirs.unk_token_id, theirs.mask_token_id, theirs.pad_token_id)
    text = f"a {theirs.mask_token} b {theirs.pad_token}{theirs.cls_token}"
    assert theirs.mask_token_id in theirs(text).input_ids
    assert not {special.bos, special.eos, special.mask, special.pad} & set(mine.encode(text).ids)
    pair = theirs("a", "b").input_ids
    assert pair == [special.bos, *mine.encode("a").ids, *mine.pair_separator, *mine.encode("b").ids, special.eos]
    assert mine.config.lowercase == (not case.startswith("roberta") and theirs.do_lower_case)


def test_another_preparation_is_another_reading():
    """The negative control: tokenizer_config.json has an effect."""
    kinds = [[case for case in CASES if CASES[case][0] == family] for family in ("bert", "roberta", "albert")]
    text = "The É 東京x lambda"
    for cases in kinds:
        read = [tuple(tokenizers(case)[0].encode(text).ids) for case in cases]
        assert len(set(read)) == len(cases)
