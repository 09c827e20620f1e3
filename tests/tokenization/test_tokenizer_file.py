"""A tokenizer.json of others is read if it is harmless; what would take all memory or time is refused by name.

The hostile files are read in one process with a memory limit, each under a time limit: without the checks they take
gigabytes, or never end.
"""

import base64
import json
import struct

import pytest
from tests.limits import run_limited
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from weft.errors import CheckpointError, DataError
from weft.tokenization.tokenizer_file import read_tokenizer_file
from weft.tokenization.trainable import Words

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
PADDING = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None}
PADDING |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(key, *parts):
    return {"type": "Sequence", key: list(parts)}


def charsmap(replacement):
    return base64.b64encode(struct.pack("<II", 4, 0) + replacement + b"\0").decode()


def content(**changes):
    engine = Engine(models.WordLevel({"<unk>": 0, "a": 1, "<s>": 2, "</s>": 3}, unk_token="<unk>"))
    return {**json.loads(engine.to_str()), **changes}


def write(folder, **changes):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content(**changes)), encoding="utf-8")
    return path


@pytest.mark.parametrize("pattern", [GPT2, LLAMA, " {2,}", r"\s", r"[^\w\s]", r"\[(?=MASK\])|<(?=s>)", r"(?:abc)+"])
def test_the_patterns_of_published_tokenizers_are_read(tmp_path, pattern):
    engine = Engine(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    engine.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    engine.save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer_file(tmp_path / "tokenizer.json").to_str() == engine.to_str()


HARMFUL = {
    "doubling": ({"normalizer": sequence("normalizers", *[DOUBLE] * 30)}, "can make a text 1,073,741,824 times longer"),
    "nested doubling": (
        {"normalizer": sequence("normalizers", *[sequence("normalizers", DOUBLE)] * 5)},
        "can make a text 32 times longer",
    ),
    "decoder": ({"decoder": sequence("decoders", *[DOUBLE] * 30)}, "decoder: its parts together can make a text"),
    "forms": (
        {"normalizer": sequence("normalizers", *[{"type": "NFKD"}, {**DOUBLE, "content": "b"}] * 9)},
        "normalizer: its parts together can make",
    ),
    "untagged": ({"normalizer": {"pattern": {"String": "a"}, "content": "a" * 9}}, "None' is of no known kind"),
    "many": ({"pre_tokenizer": sequence("pretokenizers", *[{"type": "Digits"}] * 40)}, "has 41 parts, and 32 are read"),
    "long": (
        {"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}},
        "of Prepend has 1,000,000 characters",
    ),
    "rules": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(b"a" * 999)}}, "than 64 bytes"),
    "no rules": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "for characters are damaged",
    ),
    "padding": ({"padding": PADDING}, None),  # is not used
    "backtracking": ({"pre_tokenizer": split("(x+x+)+y")}, "repeats a group that repeats or chooses inside"),
    "choices": ({"pre_tokenizer": split("(a|aa)+$")}, "repeats a group that repeats or chooses inside"),
    "optional": ({"pre_tokenizer": split("(a?){30}a{30}")}, "repeats a group that repeats or chooses inside"),
    "count": ({"pre_tokenizer": split("a{1,100000}")}, "repeats more than 1,000 times"),
    "in a row": ({"pre_tokenizer": split(".*.*.*.*x")}, "repeats more than three times in a row"),
    "back": ({"pre_tokenizer": split(r"(.*)\1")}, "refers to what it matched"),
    "group": ({"pre_tokenizer": split("(?<n>a+)+")}, "has a group of an unknown kind"),
    "spaces": ({"pre_tokenizer": split("(?x) ( a+ ) +")}, "has a group of an unknown kind"),
    "length": ({"pre_tokenizer": split("a" * 10**6)}, "is too long"),
    "panic": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "the tokenizers library gives up: chunk size"),
    "merges": (
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]]}},
        "the tokenizers library gives up: range end index",
    ),
    "continued": (
        {"model": {"type": "BPE", "vocab": {"Ã": 0, "©": 1}, "merges": [["Ã", "©"]], "continuing_subword_prefix": "~"}},
        "model.merges: ['Ã', '©'] does not continue a word with '~'",
    ),
    "random": ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 0.5}}, "cuts texts at random"),
    "words": (
        {"model": {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}},
        "max_input_chars_per_word must be at most 10,000",
    ),
    "prefix": (
        {"model": {"type": "WordPiece", "vocab": {"a": 0}, "continuing_subword_prefix": "#" * 10**6}},
        "continuing_subword_prefix has more than 64 characters",
    ),
    "ids": ({"model": {"type": "WordLevel", "vocab": {"a": 2**31, "u": 1}, "unk_token": "u"}}, "but one is larger"),
    "nothing": ({"model": None}, "it has no model"),
    "kinds": ({"normalizer": ["Lowercase"]}, "is of no known kind"),
}


def test_harmful_files_are_refused_in_little_memory_and_time(tmp_path):
    for name, (changes, _) in HARMFUL.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content(**changes)), encoding="utf-8")
    messages = run_limited(
        """
        from pathlib import Path
        from weft.errors import WeftError
        from weft.tokenization.tokenizer_file import read_tokenizer_file

        for path in sorted(Path(argument).glob("*.json")):
            try:
                read_tokenizer_file(path).encode("aaaa")
                results[path.stem] = None
            except WeftError as error:
                results[path.stem] = str(error)
        """,
        tmp_path,
    )
    assert messages.keys() == HARMFUL.keys()
    for name, (_, expected) in HARMFUL.items():
        assert (messages[name] is None) == (expected is None), name
        assert (expected or "") in (messages[name] or ""), name


def test_a_key_that_is_given_twice_is_refused(tmp_path):
    path = write(tmp_path)
    path.write_text(path.read_text().replace('"normalizer": null', '"normalizer": null, "normalizer": null'))
    with pytest.raises(CheckpointError, match="an object has a key twice"):
        read_tokenizer_file(path)


def test_an_error_of_the_library_on_a_text_is_an_error_of_the_data():
    engine = Engine(models.Unigram([("<unk>", -1.0), ("<s>", -1.0), ("</s>", -1.0), ("a", -1.0)], None, False))
    tokenizer = Words(Words.Config(name="words"), engine)
    assert tokenizer.ids(["aa"]) == [[3, 3]]
    for read in (tokenizer.encode, lambda text: tokenizer.ids([text])):
        with pytest.raises(DataError, match="the tokenizer cannot read the text: .*unk_id"):
            read("ab")
