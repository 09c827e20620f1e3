"""Readers of pretrained vocabulary files (vocab.json, merges.txt, vocab.txt, spiece.model) as `tokenizers` engines."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from weft.errors import CheckpointError
from weft.tokenization.backend import SPACE, byte_level_engine, isolate_special_tokens
from weft.tokenization.sentencepiece.model_file import USER, read_spm
from weft.tokenization.tokenizer_file import panics_as_errors, read_tokenizer_file

KINDS = {"BPE": "bpe", "WordPiece": "wordpiece", "WordLevel": "words", "Unigram": "unigram"}
HFTokenizerConfig = Mapping[str, Any]  # the content of tokenizer_config.json


def read_engine(folder: Path, style: str, tokenizer_config: HFTokenizerConfig | None = None) -> Engine:
    """Return the engine of a tokenizer.json or, where there is none, of the vocabulary files of a `style`.

    Vocabulary files do not contain the normalization, such as an added prefix space or lower-casing:
    `tokenizer_config` does.
    """
    names = ["tokenizer.json"] if (folder / "tokenizer.json").is_file() else FILES[style]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: has no tokenizer: looked for tokenizer.json, or {' and '.join(FILES[style])}")
    if names == ["tokenizer.json"]:
        return read_tokenizer_file(folder / names[0])
    try:
        with panics_as_errors():
            return VOCAB_READERS[style](folder, tokenizer_config or {})
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{folder}: {' and '.join(names)} cannot be read as a tokenizer: {error}") from None


def section_of(engine: Engine, vocab: int) -> dict[str, Any]:
    """Return the recipe's tokenizer section that describes an imported engine."""
    model_name, parts = type(engine.model).__name__, json.loads(engine.to_str())
    section = {"name": KINDS[model_name], "size": vocab}
    if model_name == "BPE":
        section["bytes"] = '"ByteLevel"' in json.dumps(parts["pre_tokenizer"])
    normalizer = json.dumps(parts["normalizer"])
    if '"Lowercase"' in normalizer or '"lowercase": true' in normalizer:
        section["lowercase"] = True
    return section


def register_special_tokens(engine: Engine, specials: list[str]) -> None:
    """Register the special tokens, and make sure that text containing their strings never gets their ids."""
    engine.add_special_tokens(specials)
    if type(engine.model).__name__ == "Unigram":  # its pieces may be these too; other models split at punctuation
        existing = [] if engine.pre_tokenizer is None else [engine.pre_tokenizer]
        engine.pre_tokenizer = pre_tokenizers.Sequence([*existing, isolate_special_tokens(specials)])


def _read_byte_bpe(folder: Path, tokenizer_config: HFTokenizerConfig) -> Engine:
    """Return GPT-2's byte-level BPE (Radford et al. 2019, section 2.2)."""
    engine = byte_level_engine()
    engine.model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(tokenizer_config.get("add_prefix_space", False))
    )
    return engine


def _read_word_bpe(folder: Path, tokenizer_config: HFTokenizerConfig) -> Engine:
    """Return GPT's BPE: lower case, split at punctuation, "</w>" at a word's end (Sennrich et al. 2016)."""
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    engine = Engine(models.BPE.from_file(*files, unk_token="<unk>", end_of_word_suffix="</w>"))
    engine.normalizer = normalizers.BertNormalizer(lowercase=True)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.BPEDecoder(suffix="</w>")
    return engine


def _read_wordpiece(folder: Path, tokenizer_config: HFTokenizerConfig) -> Engine:
    """Return BERT's WordPiece, one token per line: lower case without accents, unless the config disables it."""
    unknown = token_text(tokenizer_config.get("unk_token")) or "[UNK]"
    engine = Engine(models.WordPiece.from_file(str(folder / "vocab.txt"), unk_token=unknown))
    engine.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=bool(tokenizer_config.get("tokenize_chinese_chars", True)),
        strip_accents=tokenizer_config.get("strip_accents"),
        lowercase=bool(tokenizer_config.get("do_lower_case", True)),
    )
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece()
    return engine


def _read_sentencepiece(folder: Path, tokenizer_config: HFTokenizerConfig) -> Engine:
    """Return ALBERT's SentencePiece unigram model, with its normalization of quotes, accents and case."""
    spm = read_spm(folder / "spiece.model")
    if spm.kind != "unigram":
        raise ValueError("spiece.model holds byte-pair encoding, where a model of unigrams must be")
    engine = Engine(models.Unigram(list(zip(spm.pieces, spm.scores, strict=True)), spm.unk, byte_fallback=False))
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    steps += [] if tokenizer_config.get("keep_accents", False) else [normalizers.NFKD(), normalizers.StripAccents()]
    steps += [normalizers.Lowercase()] if tokenizer_config.get("do_lower_case", True) else []
    steps += [normalizers.Precompiled(spm.charsmap)] if spm.charsmap else []
    engine.normalizer = normalizers.Sequence(steps)
    metaspace = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
    engine.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    engine.decoder = decoders.Metaspace(SPACE)
    user_defined = [piece for piece, piece_type in zip(spm.pieces, spm.types, strict=True) if piece_type == USER]
    engine.add_tokens([AddedToken(piece, normalized=False) for piece in user_defined])
    return engine


def token_text(token: object) -> str | None:
    """Return the text of a token in these files: a string, or an object with the text as `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return None if text is None else str(text)


VOCAB_READERS: dict[str, Callable[[Path, HFTokenizerConfig], Engine]] = {
    "byte-bpe": _read_byte_bpe,
    "word-bpe": _read_word_bpe,
    "wordpiece": _read_wordpiece,
    "sentencepiece": _read_sentencepiece,
}
FILES = {
    "byte-bpe": ["vocab.json", "merges.txt"],
    "word-bpe": ["vocab.json", "merges.txt"],
    "wordpiece": ["vocab.txt"],
    "sentencepiece": ["spiece.model"],
}
