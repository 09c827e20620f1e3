"""What the kinds of tokenizer share: engines of the `tokenizers` library, vocabularies from counts, signs of bytes."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from weft.errors import ConfigError
from weft.tokenization.base import Encoding, Settings
from weft.tokenization.word_counts import no_text

SPACE = "▁"  # SentencePiece's sign for a space


def byte_signs() -> dict[str, int]:
    """Return GPT-2's printable sign for each byte: the byte as Latin-1 where that prints, else the next above 255."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(256 + n): byte for n, byte in enumerate(rest)}


BYTES = byte_signs()


def byte_engine() -> Engine:
    """Make an engine that reads bytes."""
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    return engine


def character_engine(spelling: Mapping[str, str]) -> Engine:
    """Make an engine that reads characters, and spaces as signs."""
    engine = Engine(models.BPE(unk_token=spelling["unk"], fuse_unk=False))
    mark_spaces(engine, spelling, pre_tokenizers.Split(Regex(r"\s"), "isolated"))
    return engine


def mark_spaces(engine: Engine, spelling: Mapping[str, str], *cuts: Any) -> None:
    """Let an engine read spaces as signs, and cut where asked."""
    engine.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(SPACE), *cuts, apart(spelling.values())])
    engine.decoder = decoders.Metaspace(SPACE)


def apart(specials: Iterable[str]) -> Any:
    """Cut where a text spells a special: its first sign then stands alone, so that no piece can be the special."""
    openings = [f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in dict.fromkeys(specials)]
    return pre_tokenizers.Split(Regex("|".join(openings)), "isolated")


def lower(engine: Engine, config: Settings) -> None:
    """Let an engine read lower case, if that is asked for."""
    if config.lowercase:
        engine.normalizer = normalizers.Lowercase()


def normalize(engine: Engine, text: str) -> str:
    """Return a text as the engine reads it."""
    return text if engine.normalizer is None else str(engine.normalizer.normalize_str(text))


def count_words(engine: Engine, units: Counter[str]) -> Counter[str]:
    """Count what the engine's pre-tokenizer makes of the units."""
    counts: Counter[str] = Counter()
    for unit, count in units.items():
        for word, _ in engine.pre_tokenizer.pre_tokenize_str(normalize(engine, unit)):
            counts[word] += count
    if not counts:
        raise no_text()
    return counts


def letters(words: Iterable[str]) -> set[str]:
    """Return the characters of words."""
    return set(chain.from_iterable(words))


def numbered(tokens: Iterable[str]) -> dict[str, int]:
    """Give tokens ids, from 0 on."""
    return {token: id for id, token in enumerate(tokens)}


def most_frequent(counts: Counter[str], config: Any, specials: Sequence[str]) -> dict[str, int]:
    """Number the specials, then the most frequent entries; of equals, the first by code point."""
    order = sorted((-count, token) for token, count in counts.items() if count >= config.min_count)
    if not order:
        most = max(counts.values(), default=0)
        raise ConfigError(f"tokenizer.min_count: must be at most {most}, but is {config.min_count} instead; lower it")
    room = None if config.size is None else config.size - len(specials)
    return numbered([*specials, *(token for _, token in order[:room])])


def check_size(config: Any, least: int) -> None:
    """Refuse a size that the library would exceed without a word or (Unigram) never come down to."""
    if config.size < least:
        raise ConfigError(
            f"tokenizer.size: must be at least {least}, for the specials and the alphabet of the training text, "
            f"but is {config.size} instead; raise it, or use the tokenizer bytes"
        )


def scores(engine: Engine) -> list[tuple[str, float]]:
    """Return the pieces of a Unigram engine with their scores."""
    return [(piece, score) for piece, score in json.loads(engine.to_str())["model"]["vocab"]]


def settle(learnt: list[tuple[str, float]], room: int) -> list[tuple[str, float]]:
    """Take out of a Unigram vocabulary what changes from run to run, and what is more than there is room for.

    The library sums in the order of a hash table, whose noise rounding removes; and it scores the characters that the
    model had dropped by steps of 1e-4 up from the least score, in such an order too: these all get the least.
    """
    least = min(score for _, score in learnt)
    near = least + 1e-4 * sum(len(piece) == 1 for piece, _ in learnt)
    scores = {piece: round(least if len(piece) == 1 and score <= near else score, 4) for piece, score in learnt}
    kept = sorted(scores, key=lambda piece: (len(piece) > 1, -scores[piece], piece))[:room]  # the alphabet before all
    return [(piece, scores[piece]) for piece in sorted(kept, key=lambda piece: (-scores[piece], piece))]


def without_prefix(encoding: Encoding) -> Encoding:
    """Give the sign of a space that the text does not have an empty place: the library gives it the first character."""
    if len(encoding.ids) > 1 and encoding.tokens[0] == SPACE and encoding.offsets[1][0] == 0:
        encoding.offsets[0] = (0, 0)
    return encoding


def from_bytes(token: str) -> str:
    r"""Read a byte-level token; bytes that are no whole character show as \xe2, a special as itself."""
    if not all(sign in BYTES for sign in token):
        return token
    return bytes(BYTES[sign] for sign in token).decode("utf-8", "backslashreplace")
