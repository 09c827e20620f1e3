"""Reading of a tokenizer.json that others wrote: checked for what it may hold, then tried on a short text.

The `tokenizers` library believes what is in the file. A chain of replacements can double a text at every step, a
regular expression can backtrack for ever, a padding can be of a billion tokens, and some errors are panics, which are
no `Exception` in Python. So a file is checked before the library reads it:

- normalizers, pre-tokenizers and decoders are of known kinds, some dozens at most;
- a replacement makes a text a few times longer at most, with all others together;
- a regular expression repeats no group that repeats or chooses itself, and refers to nothing that it matched;
- sizes and strings of the model have bounds, and it does not draw at random (BPE dropout).

Truncation and padding of the file are not used: tasks see to them.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Engine

from weft.config.small_files import read_small_text
from weft.errors import CheckpointError
from weft.tokenization.sentencepiece.model_file import split_charsmap

MAX_PARTS = 32  # normalizers, pre-tokenizers and decoders, each inside a sequence counted
MAX_TEXT = 64  # characters of a prefix, a suffix or a replacement
MAX_PATTERN = 2000  # characters of a regular expression
MAX_GROWTH, MAX_UNICODE_GROWTH = 16, 1000  # of a text by all replacements; by these and by Unicode's normal forms
MAX_WORD = 10_000  # characters of a word that WordPiece cuts, in quadratic time
_COMPATIBILITY = 18  # characters that NFKC and NFKD make of U+FDFA, the most of all

_PARTS = {
    "normalizer": {"BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled"}
    | {"Prepend", "Replace", "Sequence", "Strip", "StripAccents"},
    "pre_tokenizer": {"BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace"}
    | {"Punctuation", "Sequence", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"},
    "decoder": {"BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace", "Sequence"}
    | {"Strip", "WordPiece"},
}  # the library's kinds; it also takes parts without a type, which are refused
_TRIAL = "The 2 naïve cafés — 東京 🙂, isn't it?\n\t" + "".join(char * 40 for char in "ax1 _-")

_TOKEN = re.compile(
    r"(?P<escape>\\[pPxuU]\{[^}]*\}|\\.)|(?P<class>\[(?:\\.|\[:\^?\w+:\]|[^\]\\])*\])"
    r"|(?P<open>\((?:\?(?:[:=!>]|<[=!]|[im-]+:|[im-]+\)))?)|(?P<close>\))"
    r"|(?P<repeat>(?:[*+]|\{\d*,\d*\}|\{\d+\})[?+]?)|(?P<optional>\?[?+]?)|(?P<choice>\|)|(?P<other>.)",
    re.DOTALL,
)


def read_tokenizer_file(path: Path) -> Engine:
    """Return the engine of a tokenizer.json; raise CheckpointError if it cannot be read, or not safely."""
    try:
        text = read_small_text(path)
        check_tokenizer_parts(json.loads(text, object_pairs_hook=_unique_keys))
        with panics_as_errors():
            engine = Engine.from_str(text)
            engine.no_padding()
            engine.no_truncation()
            _try(engine)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file") from None
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: cannot be read as a tokenizer: {error}") from None
    return engine


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn a panic of the tokenizers library, a `BaseException`, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizers library gives up: {error}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; a key that is given twice could be read differently by the library."""
    if len(keys := dict(pairs)) < len(pairs):
        raise ValueError("an object has a key twice")
    return keys


def _try(engine: Engine) -> None:
    """Encode and decode a short text; raise ValueError if it becomes much longer."""
    ids = engine.encode(_TRIAL, add_special_tokens=False).ids
    if len(ids) > MAX_GROWTH * len(_TRIAL.encode()):
        raise ValueError(f"a text of {len(_TRIAL)} characters has {len(ids):,} tokens")
    if ids and max(engine.get_vocab().values()) >= engine.get_vocab_size():
        raise ValueError(f"its ids must be those of {engine.get_vocab_size():,} tokens, but one is larger")
    engine.decode(ids)


def check_tokenizer_parts(file: Any) -> None:
    """Raise ValueError if the content of a tokenizer.json has parts that weft does not trust."""
    if not isinstance(file, Mapping):
        raise ValueError(f"it must be an object, but is {type(file).__name__} instead")
    for name, kinds in _PARTS.items():
        parts = list(_flatten(name, file.get(name), kinds))
        if len(parts) > MAX_PARTS:
            raise ValueError(f"{name} has {len(parts)} parts, and {MAX_PARTS} are read at most")
        for part in parts:
            _check_part(name, part)
        _check_growth(name, parts)
    _check_model(file.get("model"))


def _flatten(name: str, part: Any, kinds: set[str]) -> Iterator[Mapping[str, Any]]:
    """Yield a part and, of a sequence, those inside it."""
    if part is None:
        return
    if not isinstance(part, Mapping) or part.get("type") not in kinds:
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise ValueError(f"{name}: {str(kind)[:60]!r} is of no known kind")
    yield part
    inside = part.get({"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}.get(name, "decoders"))
    for inner in inside if part["type"] == "Sequence" and isinstance(inside, list) else ():
        yield from _flatten(name, inner, kinds)


def _check_part(name: str, part: Mapping[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, str) and len(value) > MAX_TEXT and key != "precompiled_charsmap":
            raise ValueError(f"{name}: {key} of {part['type']} has {len(value):,} characters; {MAX_TEXT} are allowed")
    pattern = part.get("pattern")
    if isinstance(pattern, Mapping) and isinstance(pattern.get("Regex"), str):
        _check_pattern(pattern["Regex"])
    if part["type"] == "Precompiled":
        try:
            split_charsmap(base64.b64decode(str(part.get("precompiled_charsmap")), validate=True))
        except binascii.Error:
            raise ValueError("precompiled_charsmap is no base64") from None


def _check_growth(name: str, parts: list[Mapping[str, Any]]) -> None:
    """Raise ValueError if parts, one after another, can make a text many times longer."""
    replaced, normalized = 1.0, 1.0
    for part in parts:
        if part["type"] == "Replace":
            replaced *= _growth(part)
        elif part["type"] in ("NFKC", "NFKD", "Precompiled"):
            normalized *= _COMPATIBILITY
    if replaced > MAX_GROWTH or replaced * normalized > MAX_UNICODE_GROWTH:
        raise ValueError(f"{name}: its parts together can make a text {replaced * normalized:,.0f} times longer")


def _growth(replace: Mapping[str, Any]) -> float:
    """Return how many times longer a replacement can make a text; an expression may match at each position."""
    pattern, content = replace.get("pattern"), str(replace.get("content", ""))
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    if isinstance(text, str) and text:
        return max(1.0, len(content.encode()) / len(text.encode()))
    return 1.0 + len(content.encode())


def _check_pattern(pattern: str) -> None:
    """Raise ValueError if matching a regular expression could take more than a low power of the text's length."""
    reason = "is too long" if len(pattern) > MAX_PATTERN else _backtracking(pattern)
    if reason:
        raise ValueError(f"the regular expression {pattern[:60]!r} {reason}, so it could take for ever")


def _backtracking(pattern: str) -> str:
    """Return why an expression may backtrack without end; "" if it does not.

    A group that is repeated must not choose or repeat inside, as (a|a)* and (a+)+ do. An alternative repeats three
    times at most, since each repetition multiplies the time by the length of the text.
    """
    nested = [False]  # of each open group, whether it chooses or repeats inside
    repeats, after_group = 0, False
    for match in _TOKEN.finditer(pattern):
        kind, text = str(match.lastgroup), match.group()
        if kind == "escape" and re.match(r"\\[1-9kgKR]", text):
            return "refers to what it matched"
        if kind == "open" and not text.endswith(")"):
            if pattern[match.end() : match.end() + 1] in ("?", "*"):
                return "has a group of an unknown kind"
            nested.append(False)
        elif kind == "close":
            inner = nested.pop() if len(nested) > 1 else False
            nested[-1] |= inner
            after_group = inner
            continue
        elif kind == "choice":
            nested[-1] = True
            repeats = repeats if len(nested) > 1 else 0
        elif kind in ("repeat", "optional"):
            if kind == "repeat" and after_group:
                return "repeats a group that repeats or chooses inside"
            counts = [int(count) for count in re.findall(r"\d+", text)]
            if max(counts, default=0) > 1000:
                return "repeats more than 1,000 times"
            repeats += kind == "repeat"
            nested[-1] = True
            if repeats > 3:
                return "repeats more than three times in a row"
        after_group = False
    return ""


def _check_model(model: Any) -> None:
    """Raise ValueError if the model's options ask for much, or draw at random."""
    if not isinstance(model, Mapping):
        raise ValueError("it has no model")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(str(model.get(key) or "")) > MAX_TEXT:
            raise ValueError(f"model.{key} has more than {MAX_TEXT} characters")
    prefix, merges = str(model.get("continuing_subword_prefix") or ""), model.get("merges")
    for merge in merges if prefix and isinstance(merges, list) else ():
        second = merge.split(" ")[-1] if isinstance(merge, str) else merge[-1] if isinstance(merge, list) else None
        # The library cuts the prefix's bytes off, whatever they are: in the midst of a character it aborts.
        if not (isinstance(second, str) and second.startswith(prefix)):
            raise ValueError(f"model.merges: {str(merge)[:60]} does not continue a word with {prefix!r}")
    longest = model.get("max_input_chars_per_word", 100)
    if not isinstance(longest, int) or longest > MAX_WORD:
        raise ValueError(f"model.max_input_chars_per_word must be at most {MAX_WORD:,}, but is {longest!r} instead")
    if model.get("dropout"):
        raise ValueError(f"model.dropout is {model['dropout']!r}, so it cuts texts at random; set it to null")
