"""Vocabularies that were made elsewhere: files that list tokens and merges, to engines of the `tokenizers` library."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, normalizers, pre_tokenizers

from weft.errors import CheckpointError
from weft.text.engines import byte_engine

KINDS = {"BPE": "bpe", "WordPiece": "wordpiece", "WordLevel": "words", "Unigram": "unigram"}


def read_engine(folder: Path, style: str, widened: bool = False) -> Engine:
    """Read a tokenizer.json or, where there is none, the vocabulary's own files, in their `style`.

    A vocabulary does not say whether a space is to be put before a text; `widened` does.
    """
    names = ["tokenizer.json"] if (folder / "tokenizer.json").is_file() else FILES[style]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: has no tokenizer: looked for tokenizer.json, or {' and '.join(FILES[style])}")
    try:
        if names == ["tokenizer.json"]:
            return Engine.from_file(str(folder / names[0]))
        return READERS[style](folder, widened)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{folder}: {' and '.join(names)} cannot be read as a tokenizer: {error}") from None


def section_of(engine: Engine, vocab: int) -> dict[str, Any]:
    """Say by which section of a recipe an engine that was made elsewhere goes."""
    kind = type(engine.model).__name__
    section = {"name": KINDS[kind], "size": vocab}
    if kind == "BPE":
        section["bytes"] = '"ByteLevel"' in json.dumps(json.loads(engine.to_str())["pre_tokenizer"])
    return section


def _byte_bpe(folder: Path, widened: bool) -> Engine:
    """GPT-2's (Radford et al. 2019, section 2.2)."""
    engine = byte_engine()
    engine.model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=widened)
    return engine


def _word_bpe(folder: Path, widened: bool) -> Engine:
    """GPT's: lower case, cut at punctuation, and "</w>" at a word's end (Sennrich et al. 2016)."""
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    engine = Engine(models.BPE.from_file(*files, unk_token="<unk>", end_of_word_suffix="</w>"))
    engine.normalizer = normalizers.BertNormalizer(lowercase=True)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.BPEDecoder(suffix="</w>")
    return engine


READERS: dict[str, Callable[[Path, bool], Engine]] = {"byte-bpe": _byte_bpe, "word-bpe": _word_bpe}
FILES = {"byte-bpe": ["vocab.json", "merges.txt"], "word-bpe": ["vocab.json", "merges.txt"]}
