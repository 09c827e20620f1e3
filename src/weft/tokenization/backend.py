"""Parts shared by the tokenizers: `tokenizers` engines, vocabularies from counts, byte-level characters."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from weft.errors import ConfigError
from weft.tokenization.base import Encoding, TokenizerConfig
from weft.tokenization.word_counts import no_text

SPACE = "▁"  # SentencePiece's symbol for a space (U+2581)


def byte_level_characters() -> dict[str, int]:
    """Return the byte of each byte-level character of GPT-2: Latin-1 where printable, else code points from 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTES = byte_level_characters()


def byte_level_engine() -> Engine:
    """Return an untrained byte-level BPE engine."""
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    return engine


def character_engine(special_tokens: Mapping[str, str]) -> Engine:
    """Return an untrained character-level BPE engine that reads spaces as "▁"."""
    engine = Engine(models.BPE(unk_token=special_tokens["unk"], fuse_unk=False))
    set_metaspace(engine, special_tokens, pre_tokenizers.Split(Regex(r"\s"), "isolated"))
    return engine


def set_metaspace(engine: Engine, special_tokens: Mapping[str, str], *splits: Any) -> None:
    """Set a Metaspace pre-tokenizer and decoder ("▁" for a space), followed by further splits."""
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(SPACE), *splits, isolate_special_tokens(special_tokens.values())]
    )
    engine.decoder = decoders.Metaspace(SPACE)


def isolate_special_tokens(specials: Iterable[str]) -> Any:
    """Return a pre-tokenizer that isolates the first character of a special token's string: no token can equal it."""
    patterns = [f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in dict.fromkeys(specials)]
    return pre_tokenizers.Split(Regex("|".join(patterns)), "isolated")


def set_lowercase(engine: Engine, config: TokenizerConfig) -> None:
    """Set a lower-casing normalizer, if the config asks for it."""
    if config.lowercase:
        engine.normalizer = normalizers.Lowercase()


def apply_normalizer(engine: Engine, text: str) -> str:
    """Return a text after the engine's normalizer."""
    return text if engine.normalizer is None else str(engine.normalizer.normalize_str(text))


def count_words(engine: Engine, units: Counter[str]) -> Counter[str]:
    """Return the counts of the pre-tokenized words of the units."""
    counts: Counter[str] = Counter()
    for unit, count in units.items():
        for word, _ in engine.pre_tokenizer.pre_tokenize_str(apply_normalizer(engine, unit)):
            counts[word] += count
    if not counts:
        raise no_text()
    return counts


def alphabet_of(words: Iterable[str]) -> set[str]:
    """Return the set of characters in words."""
    return set(chain.from_iterable(words))


def assign_ids(tokens: Iterable[str]) -> dict[str, int]:
    """Return the id of each token, numbered from 0."""
    return {token: id for id, token in enumerate(tokens)}


def most_frequent(counts: Counter[str], config: Any, specials: Sequence[str]) -> dict[str, int]:
    """Return a vocabulary: the special tokens, then the most frequent tokens; ties are broken by code point."""
    ranked = sorted((-count, token) for token, count in counts.items() if count >= config.min_count)
    if not ranked:
        most = max(counts.values(), default=0)
        raise ConfigError(f"tokenizer.min_count: must be at most {most}, but is {config.min_count} instead; lower it")
    room = None if config.size is None else config.size - len(specials)
    return assign_ids([*specials, *(token for _, token in ranked[:room])])


def check_size(config: Any, minimum: int) -> None:
    """Raise for a size that the library would silently exceed or (Unigram) never shrink to."""
    if config.size < minimum:
        raise ConfigError(
            f"tokenizer.size: must be at least {minimum}, for the specials and the alphabet of the training text, "
            f"but is {config.size} instead; raise it, or use the tokenizer bytes"
        )


def unigram_scores(engine: Engine) -> list[tuple[str, float]]:
    """Return the pieces of a Unigram engine with their log-probabilities."""
    return [(piece, score) for piece, score in json.loads(engine.to_str())["model"]["vocab"]]


def stabilize_unigram(pieces: list[tuple[str, float]], room: int) -> list[tuple[str, float]]:
    """Return a Unigram vocabulary without run-to-run differences, truncated to `room` pieces.

    The library sums in the order of a hash table: rounding removes that noise. It also gives the characters that the
    model had pruned scores in steps of 1e-4 up from the lowest score, in such an order too: all get the lowest score.
    """
    lowest = min(score for _, score in pieces)
    threshold = lowest + 1e-4 * sum(len(piece) == 1 for piece, _ in pieces)
    rounded = {piece: round(lowest if len(piece) == 1 and score <= threshold else score, 4) for piece, score in pieces}
    vocabulary = sorted(rounded, key=lambda piece: (len(piece) > 1, -rounded[piece], piece))[:room]  # alphabet first
    return [(piece, rounded[piece]) for piece in sorted(vocabulary, key=lambda piece: (-rounded[piece], piece))]


def fix_prefix_offsets(encoding: Encoding) -> Encoding:
    """Set the offsets of an added leading "▁" to (0, 0): the library gives it the span of the first character."""
    if len(encoding.ids) > 1 and encoding.tokens[0] == SPACE and encoding.offsets[1][0] == 0:
        encoding.offsets[0] = (0, 0)
    return encoding


def decode_byte_level(token: str) -> str:
    r"""Decode a byte-level token; an incomplete UTF-8 sequence shows as \xe2, a special token as itself."""
    if not all(char in BYTES for char in token):
        return token
    return bytes(BYTES[char] for char in token).decode("utf-8", "backslashreplace")
