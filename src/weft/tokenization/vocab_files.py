"""Vocabularies that were made elsewhere: files that list tokens and merges, to engines of the `tokenizers` library."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from weft.errors import CheckpointError
from weft.tokenization.backend import SPACE, apart, byte_engine
from weft.tokenization.sentencepiece.model_file import USER, read_spm

KINDS = {"BPE": "bpe", "WordPiece": "wordpiece", "WordLevel": "words", "Unigram": "unigram"}
Told = Mapping[str, Any]  # what tokenizer_config.json says


def read_engine(folder: Path, style: str, told: Told | None = None) -> Engine:
    """Read a tokenizer.json or, where there is none, the vocabulary's own files, in their `style`.

    A vocabulary does not say how a text is prepared for it: whether a space is put before it, or it is put in lower
    case; `told` does.
    """
    names = ["tokenizer.json"] if (folder / "tokenizer.json").is_file() else FILES[style]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: has no tokenizer: looked for tokenizer.json, or {' and '.join(FILES[style])}")
    try:
        if names == ["tokenizer.json"]:
            return Engine.from_file(str(folder / names[0]))
        return READERS[style](folder, told or {})
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{folder}: {' and '.join(names)} cannot be read as a tokenizer: {error}") from None


def section_of(engine: Engine, vocab: int) -> dict[str, Any]:
    """Say by which section of a recipe an engine that was made elsewhere goes."""
    kind, parts = type(engine.model).__name__, json.loads(engine.to_str())
    section = {"name": KINDS[kind], "size": vocab}
    if kind == "BPE":
        section["bytes"] = '"ByteLevel"' in json.dumps(parts["pre_tokenizer"])
    prepared = json.dumps(parts["normalizer"])
    if '"Lowercase"' in prepared or '"lowercase": true' in prepared:
        section["lowercase"] = True
    return section


def settle_specials(engine: Engine, specials: list[str]) -> None:
    """Make these the special tokens, and see that no text that spells one is taken for it."""
    engine.add_special_tokens(specials)
    if type(engine.model).__name__ == "Unigram":  # which has whole words, these too; others cut at their signs
        before = [] if engine.pre_tokenizer is None else [engine.pre_tokenizer]
        engine.pre_tokenizer = pre_tokenizers.Sequence([*before, apart(specials)])


def _byte_bpe(folder: Path, told: Told) -> Engine:
    """GPT-2's (Radford et al. 2019, section 2.2)."""
    engine = byte_engine()
    engine.model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(told.get("add_prefix_space", False)))
    return engine


def _word_bpe(folder: Path, told: Told) -> Engine:
    """GPT's: lower case, cut at punctuation, and "</w>" at a word's end (Sennrich et al. 2016)."""
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    engine = Engine(models.BPE.from_file(*files, unk_token="<unk>", end_of_word_suffix="</w>"))
    engine.normalizer = normalizers.BertNormalizer(lowercase=True)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.BPEDecoder(suffix="</w>")
    return engine


def _wordpiece(folder: Path, told: Told) -> Engine:
    """BERT's, one token a line: in lower case and without accents, unless that is denied."""
    unknown = spelling(told.get("unk_token")) or "[UNK]"
    engine = Engine(models.WordPiece.from_file(str(folder / "vocab.txt"), unk_token=unknown))
    engine.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=bool(told.get("tokenize_chinese_chars", True)),
        strip_accents=told.get("strip_accents"),
        lowercase=bool(told.get("do_lower_case", True)),
    )
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece()
    return engine


def _sentencepiece(folder: Path, told: Told) -> Engine:
    """ALBERT's: a SentencePiece model of unigrams, on text with other quotes, no accents and no capitals."""
    given = read_spm(folder / "spiece.model")
    if given.kind != "unigram":
        raise ValueError("spiece.model holds byte-pair encoding, where a model of unigrams must be")
    engine = Engine(models.Unigram(list(zip(given.pieces, given.scores, strict=True)), given.unk, byte_fallback=False))
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    steps += [] if told.get("keep_accents", False) else [normalizers.NFKD(), normalizers.StripAccents()]
    steps += [normalizers.Lowercase()] if told.get("do_lower_case", True) else []
    steps += [normalizers.Precompiled(given.charsmap)] if given.charsmap else []
    engine.normalizer = normalizers.Sequence(steps)
    signs = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
    engine.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), signs])
    engine.decoder = decoders.Metaspace(SPACE)
    own = [piece for piece, kind in zip(given.pieces, given.types, strict=True) if kind == USER]
    engine.add_tokens([AddedToken(piece, normalized=False) for piece in own])
    return engine


def spelling(token: object) -> str | None:
    """Read a token as these files have it: its text, or an object with the text as `content`."""
    found = token.get("content") if isinstance(token, dict) else token
    return None if found is None else str(found)


READERS: dict[str, Callable[[Path, Told], Engine]] = {
    "byte-bpe": _byte_bpe,
    "word-bpe": _word_bpe,
    "wordpiece": _wordpiece,
    "sentencepiece": _sentencepiece,
}
FILES = {
    "byte-bpe": ["vocab.json", "merges.txt"],
    "word-bpe": ["vocab.json", "merges.txt"],
    "wordpiece": ["vocab.txt"],
    "sentencepiece": ["spiece.model"],
}
