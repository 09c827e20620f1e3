import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine
from tokenizers import models, pre_tokenizers, trainers
from tokenizers.implementations import BertWordPieceTokenizer

from weft.config.schema import read_section
from weft.errors import CheckpointError, ConfigError, DataError
from weft.registry import names, resolve
from weft.tokenization import backend
from weft.tokenization import trainable as module
from weft.tokenization.trainable import (
    BPE,
    Bytes,
    Characters,
    Tokenizer,
    Unigram,
    WordPiece,
    Words,
    load_tokenizer,
    train_tokenizer,
)

SECTIONS = {
    "words": {"name": "words"},
    "characters": {"name": "characters"},
    "bytes": {"name": "bytes"},
    "bpe": {"name": "bpe", "size": 600},
    "bpe over characters": {"name": "bpe", "size": 600, "bytes": False},
    "wordpiece": {"name": "wordpiece", "size": 600},
    "unigram": {"name": "unigram", "size": 600},
}
KINDS = list(SECTIONS)
LOSSLESS = ["bytes", "bpe"]
PLAIN = ["words", "characters", "bytes", "bpe", "bpe over characters"]  # those without a normaliser
MERGED = ["bpe", "bpe over characters", "wordpiece", "unigram"]
SPELT = ["<s>", "</s>", "<unk>", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LINES = topics["assignment"].split("\n") + topics["lambda"].split("\n")
MORE = [
    "Ünïcode: Straße, naïve façade.",
    "Привет, мир!",
    "日本語のテキスト。",
    "a\tb\r\nc",
    "🙂👩‍👩‍👧",
    " leading",
    "x  y",
]
CORPUS = LINES + MORE + [f"the {' '.join(SPELT)} is spelt" for _ in range(30)]

quick = settings(derandomize=True, deadline=None, max_examples=20, database=None)
texts = st.text(max_size=60)
likely = st.lists(
    st.sampled_from([*SPELT, "the ", "THE", " ", "\n", "[", "<", "é", "🙂", "ａ", "½", "▁"]), max_size=12
).map("".join)


def config(kind: str, **changes: object):
    section = {**SECTIONS.get(kind, {"name": kind}), **changes}
    return read_section(resolve("tokenizer", section["name"]).Config, section, "tokenizer")


@cache
def trained(kind: str, lowercase: bool = False) -> Tokenizer:
    return train_tokenizer(config(kind, lowercase=lowercase), iter(CORPUS))


def hidden(tokenizer: Tokenizer) -> set[int]:
    special = tokenizer.specials
    return {special.bos, special.eos, special.mask, special.pad} - {None}


def test_every_registered_name_is_here():
    learnt = set(names("tokenizer")) - {"sentencepiece"}  # which comes with a model
    assert {resolve("tokenizer", name) for name in learnt} == {
        Words,
        Characters,
        Bytes,
        BPE,
        WordPiece,
        Unigram,
    }


# --- there and back


@pytest.mark.parametrize("kind", LOSSLESS)
@quick
@given(text=texts | likely)
@example(text="\0 a\r\n\u0301e\u0301 🙂 </s>")
@example(text="  ▁Ġ\n\n ")
def test_lossless_kinds_give_every_text_back(kind, text):
    tokenizer = trained(kind)
    assert tokenizer.lossless
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LOSSLESS])
def test_the_others_do_not_and_say_so(kind):
    tokenizer = trained(kind)
    text = " a  b ✈ ﬁ"
    assert not tokenizer.lossless
    assert tokenizer.decode(tokenizer.encode(text).ids) != text


@pytest.mark.parametrize("kind", LOSSLESS)
def test_lower_case_loses(kind):
    tokenizer = trained(kind, lowercase=True)
    assert not tokenizer.lossless
    assert tokenizer.decode(tokenizer.encode("The END").ids) == "the end"


def test_bytes_are_numbered_by_value():
    tokenizer = trained("bytes")
    assert len(tokenizer) == 258
    assert tokenizer.encode("aé\0").ids == [byte + 2 for byte in "aé\0".encode()]


def test_words_stand_apart_from_punctuation_in_any_script():
    tokenizer = trained("words")
    encoding = tokenizer.encode("«Straße»,\tпривет…don't e\u0301t\u00e9 日本語?!")
    text = "«Straße»,\tпривет…don't e\u0301t\u00e9 日本語?!"
    surfaces = [text[a:b] for a, b in encoding.offsets]
    assert surfaces == ["«", "Straße", "»", ",", "привет", "…", "don", "'", "t", "e\u0301t\u00e9", "日本語", "?", "!"]
    assert tokenizer.decode(tokenizer.encode("the  variable,\nthen").ids) == "the variable , then"


def test_characters_keep_spaces_and_line_ends():
    tokenizer = trained("characters")
    assert tokenizer.decode(tokenizer.encode(" the\n  value\t").ids) == " the\n  value\t"


def test_bpe_over_characters_keeps_line_ends():
    tokenizer = trained("bpe over characters")
    assert tokenizer.decode(tokenizer.encode("the value\n\tthe value").ids) == "the value\n\tthe value"


@pytest.mark.parametrize("kind", ["words", "characters", "bpe over characters", "wordpiece", "unigram"])
def test_the_unknown_is_shown(kind):
    tokenizer = trained(kind)
    ids = tokenizer.encode("the ✈").ids
    assert tokenizer.specials.unk in ids
    assert type(tokenizer).default_special_tokens["unk"] in tokenizer.decode(ids)
    assert "✈" not in tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_leaves_specials_out(kind):
    tokenizer = trained(kind)
    ids = tokenizer.encode("the value").ids
    assert tokenizer.decode([tokenizer.specials.bos, *ids, *hidden(tokenizer)]) == tokenizer.decode(ids) == "the value"
    assert tokenizer.decode([]) == ""


# --- specials


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lowercase", [False, True])
@quick
@given(text=likely | texts)
@example(text="".join(SPELT))
@example(text=" ".join(SPELT))
@example(text="</S> ＜s＞ <UNK>")
def test_no_text_gets_the_id_of_a_special(kind, lowercase, text):
    tokenizer = trained(kind, lowercase)
    assert not hidden(tokenizer) & set(tokenizer.encode(text).ids)


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_spells_the_unknown_is_known(kind):
    tokenizer = trained(kind)
    assert tokenizer.specials.unk not in tokenizer.encode("<unk> </s>").ids  # the corpus has these characters


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_by_itself_would_give_it(kind):
    tokenizer = pickle.loads(pickle.dumps(trained(kind)))
    text = type(tokenizer).default_special_tokens["eos"]
    assert tokenizer.specials.eos not in tokenizer.encode(text).ids
    tokenizer.engine.encode_special_tokens = False
    assert tokenizer.specials.eos in tokenizer.encode(text).ids


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_texts_are_read_where_the_recipe_says_so(kind):
    tokenizer = trained(kind)
    other = pickle.loads(
        pickle.dumps(
            type(tokenizer)(
                tokenizer.config.model_copy(update={"split_special_tokens": False}),
                Engine.from_str(tokenizer.engine.to_str()),
            )
        )
    )
    text = f"a {type(tokenizer).default_special_tokens['eos']} b"
    for read in (lambda one: one.encode(text).ids, lambda one: one.ids([text])[0]):
        assert tokenizer.specials.eos not in read(tokenizer)
        assert read(other).count(tokenizer.specials.eos) == 1
    assert other.identity != tokenizer.identity


def test_a_unigram_model_would_give_it_even_so():
    engine = Engine.from_str(trained("unigram").engine.to_str())
    engine.encode_special_tokens = True
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    assert trained("unigram").specials.eos in engine.encode("a</s>").ids


@pytest.mark.parametrize("kind", KINDS)
def test_specials_come_first(kind):
    special = trained(kind).specials
    ids = [id for id in (special.pad, special.unk, special.bos, special.eos, special.mask) if id is not None]
    assert ids == list(range(len(ids)))
    assert (special.unk is None) == (kind in LOSSLESS)
    assert len(ids) == {"wordpiece": 5, "bytes": 2, "bpe": 2}.get(kind, 3)


# --- offsets and tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lowercase", [False, True])
@quick
@given(text=likely | texts)
@example(text="½ ﬁn İ e\u0301\u0327")
def test_offsets_are_in_the_text_and_in_order(kind, lowercase, text):
    tokenizer = trained(kind, lowercase)
    offsets = tokenizer.encode(text).offsets
    starts = [a for a, _ in offsets]
    assert starts == sorted(starts)
    assert all(0 <= a <= b <= len(text) for a, b in offsets)


def wrong_offsets(kind: str, text: str, shift: int = 0) -> list[str]:
    """Return the tokens that `text[a:b]` does not reproduce."""
    tokenizer = trained(kind)
    encoding = tokenizer.encode(text)
    wrong = []
    for id, token, (a, b) in zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True):
        there = text[a + shift : b + shift]
        if kind in LOSSLESS:
            data = bytes(backend.BYTES[sign] for sign in token)
            right = data in there.encode() and (
                data == there.encode() or len(data.decode("utf-8", "ignore")) < len(there)
            )
        elif id == tokenizer.specials.unk:
            right = len(there) > 0
        elif kind == "bpe over characters":
            right = there.replace(" ", "▁") in (token, token.removeprefix("▁") if a == 0 else token)
        else:
            right = there == token
        wrong += [] if right else [token]
    return wrong


@pytest.mark.parametrize("kind", PLAIN)
@quick
@given(text=likely | texts)
@example(text="✈the 🙂é value")
def test_offsets_reproduce_the_token(kind, text):
    assert wrong_offsets(kind, text) == []


@pytest.mark.parametrize("kind", PLAIN)
def test_offsets_that_are_off_by_one_are_caught(kind):
    assert wrong_offsets(kind, "✈the 🙂é value", shift=1)


@pytest.mark.parametrize("kind", LOSSLESS)
def test_offsets_of_bytes_are_in_characters(kind):
    offsets = trained(kind).encode("🙃é").offsets
    assert set(offsets) == {(0, 1), (1, 2)}
    assert offsets.count((0, 1)) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_lower_case_leaves_offsets_in_the_original(kind):
    text = "İ THE Value"
    encoding = trained(kind, lowercase=True).encode(text)
    assert encoding.ids[-1:] == trained(kind, lowercase=True).encode("İ the value").ids[-1:]
    a, b = encoding.offsets[-1]
    assert text[a:b].strip()
    assert text.endswith(text[a:b])


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(batch=st.lists(likely | texts, max_size=5))
def test_the_fast_path_gives_the_same_ids(kind, batch):
    tokenizer = trained(kind)
    assert tokenizer.ids(batch) == [tokenizer.encode(text).ids for text in batch]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_in_print(kind):
    tokenizer = trained(kind)
    printed = [tokenizer.token(id) for id in tokenizer.encode("the the").ids]
    assert "".join(printed).replace(" ", "") == "thethe"
    assert tokenizer.token(tokenizer.specials.eos) == type(tokenizer).default_special_tokens["eos"]
    assert all(tokenizer.token(id).isprintable() for id in range(len(tokenizer)))


def test_byte_tokens_in_print():
    tokenizer = trained("bpe")
    assert [tokenizer.token(id) for id in tokenizer.encode("the the\n").ids] == ["the", " the", "\\n"]
    assert [trained("bytes").token(id) for id in trained("bytes").encode("é").ids] == ["\\xc3", "\\xa9"]


def test_the_signs_of_bytes_are_the_library_s():
    assert set(backend.BYTES) == set(pre_tokenizers.ByteLevel.alphabet())
    for char in [*map(chr, range(128)), "é", "🙂"]:
        signs = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(char)[0][0]
        assert bytes(backend.BYTES[sign] for sign in signs) == char.encode()


@pytest.mark.parametrize("id", [-1, 258])
def test_an_id_of_another_vocabulary(id):
    tokenizer = trained("bytes")
    for call in (lambda: tokenizer.token(id), lambda: tokenizer.decode([5, id, 5])):
        with pytest.raises(DataError, match=f"token id {id} is not in this vocabulary of 258"):
            call()


@pytest.mark.parametrize("kind", KINDS)
def test_a_lone_surrogate_is_no_text(kind):
    tokenizer = trained(kind)
    for call in (lambda: tokenizer.encode("ab\ud800"), lambda: tokenizer.ids(["fine", "ab\ud800"])):
        with pytest.raises(DataError, match=r"character 2, in 'ab\\ud800', is a lone surrogate"):
            call()
    if kind != "bytes":
        with pytest.raises(DataError, match="lone surrogate"):
            train_tokenizer(config(kind), ["fine", "ab\ud800"])


# --- parity


@pytest.mark.parametrize("lowercase", [False, True])
@quick
@given(text=likely | texts | st.sampled_from(LINES))
def test_wordpiece_is_bert_s(lowercase, text):
    ours = trained("wordpiece", lowercase)
    theirs = bert(lowercase)
    assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False).ids


@cache
def bert(lowercase: bool) -> BertWordPieceTokenizer:
    tokenizer = BertWordPieceTokenizer(trained("wordpiece", lowercase).engine.get_vocab(), lowercase=lowercase)
    tokenizer._tokenizer.encode_special_tokens = True
    return tokenizer


def test_bert_s_lower_case_would_be_caught():
    assert trained("wordpiece").encode("Thé").ids != bert(True).encode("Thé", add_special_tokens=False).ids


@quick
@given(text=likely | texts)
def test_bpe_cuts_as_gpt2(text):
    theirs = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert trained("bpe").engine.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_bpe_learns_what_the_library_learns_from_the_text_itself():
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, min_frequency=2, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    engine.train_from_iterator(CORPUS, trainer)
    assert engine.get_vocab() == trained("bpe").engine.get_vocab()
    engine.train_from_iterator(CORPUS[1:-5], trainer)
    assert engine.get_vocab() != trained("bpe").engine.get_vocab()


# --- training


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_repeatable_to_the_byte(kind, tmp_path):
    saved = []
    for run in ("a", "b", "c"):
        (tmp_path / run).mkdir()
        train_tokenizer(config(kind), iter(CORPUS)).save(tmp_path / run)
        saved.append((tmp_path / run / "tokenizer.json").read_bytes())
    assert saved[0] == saved[1] == saved[2]


def test_what_the_unigram_trainer_leaves_to_chance_is_settled():
    learnt = [("▁the", -3.0), ("q", -9.0), ("x", -8.9999), ("e", -4.0), ("he", -5.25)]
    again = [("▁the", -3.0 + 1e-9), ("x", -9.0), ("q", -8.9999), ("he", -5.25 - 1e-9), ("e", -4.0)]
    assert learnt != again
    assert backend.stabilize_unigram(learnt, 5) == backend.stabilize_unigram(again, 5)
    assert backend.stabilize_unigram(learnt, 5) == [
        ("▁the", -3.0),
        ("e", -4.0),
        ("he", -5.25),
        ("q", -9.0),
        ("x", -9.0),
    ]
    assert [piece for piece, _ in backend.stabilize_unigram(learnt, 4)] == ["▁the", "e", "q", "x"]  # the alphabet stays


class Line(str):
    """A string that can be watched."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_stream_is_never_kept(kind):
    watched: list[weakref.ref[Line]] = []

    def stream() -> Iterator[str]:
        for n in range(200):
            line = Line(f"{LINES[n % len(LINES)]} number {n}")
            watched.append(weakref.ref(line))
            yield line
            del line
            assert sum(ref() is not None for ref in watched) <= 1

    train_tokenizer(config(kind), stream())
    assert watched


def test_a_stream_that_is_kept_is_caught():
    lines = [Line("a"), Line("b")]
    assert sum(ref() is not None for ref in map(weakref.ref, lines)) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_without_spaces_is_no_burden(kind):
    line = "".join(chr(0x4E00 + (n * n * 7919) % 97) for n in range(200_000))
    tokenizer = train_tokenizer(config(kind, **({"size": 400} if kind in MERGED else {})), [line])
    assert tokenizer.encode(line[:100]).ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [[], [""], [" ", "\n\t", ""]])
def test_nothing_to_learn_from(kind, stream):
    with pytest.raises(DataError, match="there is no text to learn a vocabulary from; check"):
        train_tokenizer(config(kind), stream)


def test_nothing_left_to_learn_from_once_cleaned():
    with pytest.raises(DataError, match="there is no text"):
        train_tokenizer(config("wordpiece"), ["\x01\x02"])


@pytest.mark.parametrize(
    ("kind", "least"), [("bpe", 258), ("bpe over characters", 11), ("unigram", 11), ("wordpiece", 18)]
)
def test_the_least_size(kind, least):
    stream = ["hello world", "hollow"]  # 7 letters, 6 of them also inside a word; and "▁"
    with pytest.raises(ConfigError, match=f"tokenizer.size: must be at least {least}, .* but is {least - 1} instead"):
        train_tokenizer(config(kind, size=least - 1), stream)
    assert len(train_tokenizer(config(kind, size=least), stream)) == least


@pytest.mark.parametrize("kind", ["words", "characters", "bpe", "bpe over characters", "wordpiece", "unigram"])
def test_size_is_never_exceeded(kind):
    size = 300 if kind in MERGED else 20
    assert len(train_tokenizer(config(kind, size=size), CORPUS)) == size


def test_the_most_frequent_are_kept_and_the_rarest_dropped():
    stream = ["b a c a b", "d"]
    assert list(vocabulary("words", stream)) == ["<unk>", "<s>", "</s>", "a", "b", "c", "d"]
    assert list(vocabulary("words", stream, size=4)) == ["<unk>", "<s>", "</s>", "a"]
    assert list(vocabulary("words", stream, min_count=2)) == ["<unk>", "<s>", "</s>", "a", "b"]
    assert list(vocabulary("characters", stream, min_count=2)) == ["<unk>", "<s>", "</s>", " ", "a", "b"]
    assert list(vocabulary("characters", ["A a"], lowercase=True)) == ["<unk>", "<s>", "</s>", "a", " "]
    with pytest.raises(ConfigError, match=r"tokenizer\.min_count: must be at most 2, but is 3 instead"):
        vocabulary("words", stream, min_count=3)


@pytest.mark.parametrize("lowercase", [False, True])
def test_any_digit_can_be_read_as_0(lowercase, tmp_path):
    tokenizer = train_tokenizer(config("words", zeros=True, lowercase=lowercase), ["in 1987 or 12", "A4 ٣"])
    tokenizer.save(tmp_path)
    for words in (tokenizer, Words.load(tmp_path, tokenizer.config)):
        assert words.decode(words.ids(["in 2012 or 99 A5 7"])[0]) == f"in 0000 or 00 {'a' if lowercase else 'A'}0 0"
        assert words.encode("in 2012").offsets == [(0, 2), (3, 7)]
    assert "1987" in vocabulary("words", ["in 1987"])  # unless asked for, a year is a year


def test_words_can_be_added_as_far_as_there_is_room(tmp_path):
    tokenizer = train_tokenizer(config("words", size=6), ["one two"])
    before = tokenizer.ids(["one two </s>"])
    tokenizer.extend(["two", "e-mail", "", "three", "four"])
    assert (len(tokenizer), tokenizer.token(5)) == (6, "three")
    tokenizer.save(tmp_path)
    for known in (tokenizer, Words.load(tmp_path, tokenizer.config)):
        assert known.ids(["three four"]) == [[5, known.specials.unk]]
        assert known.ids(["one two </s>"]) == before
        assert known.decode([5]) == "three"


def vocabulary(kind: str, stream: list[str], **changes: object) -> dict[str, int]:
    tokens = train_tokenizer(config(kind, **changes), stream).engine.get_vocab()
    return dict(sorted(tokens.items(), key=lambda item: item[1]))


# --- the target side


def test_one_vocabulary_for_both_sides():
    tokenizer = train_tokenizer(config("words"), ["one"], ["deux"])
    assert tokenizer.target is tokenizer
    assert tokenizer.decode(tokenizer.encode("one deux").ids) == "one deux"


def test_a_vocabulary_for_each_side():
    tokenizer = train_tokenizer(config("words", target={"name": "characters", "min_count": 2}), ["one"], ["deux deux"])
    assert isinstance(tokenizer.target, Characters)
    assert tokenizer.target.target is tokenizer.target
    assert tokenizer.decode(tokenizer.encode("deux").ids) == "<unk>"
    assert tokenizer.target.decode(tokenizer.target.encode("deux n").ids) == "deux<unk><unk>"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"name": "word"}, "tokenizer.target.name: .* is 'word' instead; did you mean 'words'?"),
        ({}, "tokenizer.target.name: .* is None instead"),
        ({"name": "os:system"}, "tokenizer.target.name: must be a tokenizer of weft's, but is 'os:system' instead"),
        ({"name": "words", "siz": 3}, "tokenizer.target.siz: unknown key; did you mean 'size'?"),
        ({"name": "words", "target": {"name": "words"}}, "tokenizer.target.target: a target has no target"),
    ],
)
def test_a_wrong_target_is_refused_before_any_data(target, message):
    with pytest.raises(ConfigError, match=message):
        config("words", target=target)


def test_a_target_with_nothing_to_learn_from():
    with pytest.raises(ConfigError, match=r"tokenizer\.target: there is no target side"):
        train_tokenizer(config("words", target={"name": "words"}), ["one"])
    with pytest.raises(ConfigError, match=r"^tokenizer\.target\.size: must be at least 258"):
        train_tokenizer(config("words", target={"name": "bpe", "size": 9}), ["one"], ["deux"])
    with pytest.raises(DataError, match=r"^tokenizer\.target: there is no text"):
        train_tokenizer(config("words", target={"name": "words"}), ["one"], iter([]))


# --- saved


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lowercase", [False, True])
def test_saved_and_loaded_it_is_the_same(kind, lowercase, tmp_path):
    tokenizer = trained(kind, lowercase)
    tokenizer.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    for again in (load_tokenizer(tokenizer.config, tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert type(again) is type(tokenizer)
        assert (again.specials, len(again), again.lossless) == (tokenizer.specials, len(tokenizer), tokenizer.lossless)
        assert again.target is again
        same_ids(tokenizer, again)


def same_ids(first: Tokenizer, second: Tokenizer) -> None:
    @quick
    @given(text=likely | texts)
    def check(text: str) -> None:
        assert first.encode(text) == second.encode(text)
        assert first.decode(first.encode(text).ids) == second.decode(second.encode(text).ids)

    check()


def test_another_tokenizer_would_be_caught():
    other = train_tokenizer(config("bpe"), CORPUS[::2])
    with pytest.raises(AssertionError):
        same_ids(trained("bpe"), other)


def test_saved_and_loaded_with_its_target(tmp_path):
    tokenizer = train_tokenizer(config("bpe", target={"name": "wordpiece", "size": 300}), CORPUS, LINES)
    tokenizer.save(tmp_path)
    for again in (load_tokenizer(tokenizer.config, tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert isinstance(again.target, WordPiece)
        same_ids(tokenizer, again)
        same_ids(tokenizer.target, again.target)
    (tmp_path / "tokenizer.target.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.target\.json: there is no such file"):
        load_tokenizer(tokenizer.config, tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: None, "there is no such file; copy the file from the run that made it, or train again"),
        (lambda text: text[:-100], "cannot be read as a tokenizer"),
        (lambda text: "", "cannot be read as a tokenizer"),
        (lambda text: text.replace("</s>", "</x>"), "lacks the special tokens </s>"),
        (lambda text: trained("unigram").engine.to_str(), "must hold a BPE model, but holds Unigram instead"),
    ],
)
def test_a_damaged_file(damage, message, tmp_path):
    tokenizer = trained("bpe")
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    text = damage(path.read_text(encoding="utf-8"))
    path.unlink() if text is None else path.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tokenizer.config, tmp_path)


# --- processes

WORKER = """
import os, signal
from weft.tokenization.trainable import Bytes

def status_of_a_fork(parallel=None):
    child = os.fork()
    if child == 0:
        signal.alarm(2)
        os.environ.update(parallel or {})
        os._exit(0 if len(tokenizer.ids(batch)) == 1000 else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

tokenizer = Bytes.train(["a"], Bytes.Config(name="bytes"))
batch = ["a text"] * 1000
tokenizer.ids(batch)  # starts the library's threads
print(status_of_a_fork(), status_of_a_fork({"TOKENIZERS_PARALLELISM": "true"}) == -signal.SIGALRM)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_worker_neither_hangs_nor_warns():
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WORKER],
        env={**environment, "PYTHONPATH": str(Path(module.__file__).parents[2]), "RAYON_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("0 True\n", "")  # with its threads it would have hung


# Special tokens with other strings.

END = "<|endoftext|>"


@pytest.mark.parametrize("kind", KINDS)
def test_specials_may_be_spelt_otherwise(kind, tmp_path):
    unknown = {"unk": "<|unknown|>"} if kind not in LOSSLESS else {}
    section = config(kind, specials={"bos": END, "eos": END, **unknown})
    tokenizer = train_tokenizer(section, iter([*CORPUS, *[f"a text spells {END} and <|unknown|>"] * 30]))
    special = tokenizer.specials
    assert special.bos == special.eos == tokenizer.engine.token_to_id(END)
    ids = tokenizer.encode(f"the {END} <|unknown|>").ids
    assert not {special.bos, special.unk if kind in ("words", "wordpiece") else special.bos} & set(ids)
    assert "<s>" not in tokenizer.engine.get_vocab()
    if unknown:
        assert tokenizer.engine.token_to_id("<unk>") is None
        assert special.unk == tokenizer.engine.token_to_id("<|unknown|>")
        if kind != "unigram":
            assert special.unk in tokenizer.encode("\u1234").ids
    tokenizer.save(tmp_path)
    again = load_tokenizer(section, tmp_path)
    assert again.specials == special
    assert again.encode("the text").ids == tokenizer.encode("the text").ids
    assert tokenizer.decode([special.bos, *tokenizer.encode("the").ids, special.eos]) == tokenizer.decode(
        tokenizer.encode("the").ids
    )


def test_without_it_the_kinds_own_spelling_holds(tmp_path):
    """The negative control, and how earlier runs are read."""
    plain = config("bpe")
    assert "specials" not in plain.model_dump(exclude_none=True)
    assert BPE.special_tokens_map(plain) == {"bos": "<s>", "eos": "</s>"}
    trained("bpe").save(tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks the special tokens <\|endoftext\|>"):
        load_tokenizer(config("bpe", specials={"bos": END, "eos": END}), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_of_its_own_may_stand_between_two_texts(kind, tmp_path):
    section = config(kind, specials={"sep": "<|sep|>"})
    tokenizer = train_tokenizer(section, iter([*CORPUS, *["it spells <|sep|>"] * 30]))
    sep = tokenizer.specials.sep
    assert tokenizer.pair_separator == [sep] == [tokenizer.engine.token_to_id("<|sep|>")]
    assert sep not in tokenizer.encode("the <|sep|>").ids
    assert tokenizer.decode([*tokenizer.encode("the").ids, sep]) == tokenizer.decode(tokenizer.encode("the").ids)
    tokenizer.save(tmp_path)
    assert load_tokenizer(section, tmp_path).specials.sep == sep
    plain = trained(kind)
    assert plain.specials.sep is None
    assert plain.pair_separator == [plain.specials.eos]


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_is_spelt_as_it_stands_in_a_text(kind):
    tokenizer = trained(kind)
    spaced = [tokenizer.with_leading_space(tokenizer.config, word) for word in ("the", " the", "")]
    assert spaced == ([" the", " the", ""] if kind == "bpe" else ["the", " the", ""])


@pytest.mark.parametrize(
    ("specials", "message"),
    [
        ({"begin": "<b>"}, "'begin' is none; known: bos, eos, mask, pad, sep, unk"),
        ({"boss": "<b>"}, "did you mean 'bos'"),
        ({"bos": "START"}, "must have letters and signs, as <.end.> has, and no space: got 'START'"),
        ({"bos": "<>"}, "got '<>'"),
        ({"bos": "<a b>"}, "and no space"),
    ],
)
def test_specials_that_a_text_could_be_are_refused(specials, message):
    with pytest.raises(ConfigError, match=message):
        config("bpe", specials=specials)
