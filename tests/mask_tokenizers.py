"""Tokenizers with a mask token, one of each kind, for the tests of masked language models."""

from collections.abc import Iterable
from typing import Any

from weft.registry import resolve
from weft.tokenization.trainable import Tokenizer, train_tokenizer


def mask_tokenizer_sections(
    mask: str, wordpiece: int, byte_bpe: int, character_bpe: int, unigram: int
) -> dict[str, dict[str, Any]]:
    """Return a recipe's tokenizer section for each kind, with these vocabulary sizes; WordPiece has its own mask."""
    specials = {"mask": mask}
    return {
        "wordpiece": {"name": "wordpiece", "size": wordpiece},
        "byte bpe": {"name": "bpe", "size": byte_bpe, "specials": specials},
        "character bpe": {"name": "bpe", "size": character_bpe, "bytes": False, "specials": specials},
        "unigram": {"name": "unigram", "size": unigram, "specials": specials},
        **{name: {"name": name, "specials": specials} for name in ("words", "characters", "bytes")},
    }


def trained(section: dict[str, Any], texts: Iterable[str]) -> Tokenizer:
    """Return a tokenizer trained on texts."""
    config = resolve("tokenizer", section["name"]).Config.model_validate(section)
    return train_tokenizer(config, iter(texts))
