"""The ARPA format against KenLM's estimates and scores, and on files of other tools, also damaged ones.

The figures of lmplz and of the kenlm module were recorded (KenLM 0.3.0); `make peers` runs them again.
"""

import math
import os
import random
import shutil
import subprocess

import numpy as np
import pytest
import torch

from weft.data.batching.packed_items import pack
from weft.errors import DataError
from weft.formats.arpa_text import BOS, EOS, SPECIALS, UNK, open_text, read_arpa, write_arpa
from weft.models.base import FitBudget
from weft.models.ngram.model import BUFFERS, NGram, NGramConfig
from weft.tokens import Tokens

LMPLZ = os.environ.get("LMPLZ") or shutil.which("lmplz")


def corpus() -> list[str]:
    """400 lines in which each order has its discounts; the last word to come is there once."""
    rng = random.Random(5)
    words, weights = [f"w{number}" for number in range(120)], [1 / (rank + 1) for rank in range(120)]
    return [*(" ".join(rng.choices(words, weights, k=rng.randrange(12))) for _ in range(400)), "w1 w0 last w2"]


def vocabulary(lines) -> list[str]:
    return [*SPECIALS, *dict.fromkeys(word for line in lines for word in line.split())]


def estimate(lines, words, **config) -> NGram:
    ids, model = {word: id for id, word in enumerate(words)}, NGram(NGramConfig(name="ngram", **config), len(words))
    data = pack((np.array([1, *(ids[word] for word in line.split())], np.int32),) for line in lines)
    list(model.fit(data, FitBudget(1, None, 1.0, 1, eos=2)))
    return model


def scores(model: NGram, words, text: str) -> list[float]:
    """Return log10 p of each word and of the end."""
    ids = {word: id for id, word in enumerate(words)}
    read = [1, *(ids.get(word, 0) for word in text.split())]
    log10_probs = model.log_prob(Tokens.pack([read]), torch.tensor([*read[1:], 2])).double() / math.log(10)
    return log10_probs.tolist()


WHOLE = {
    "w0 w1 w2": [-0.778159, -0.891623, -1.009703, -1.075959],
    "w5 w0 w0 nowhere w3": [-1.337274, -0.84698, -0.553527, -3.612896, -1.460646, -0.738447],
    "": [-1.084314],
    "w1 w0 last w2 w7 w110": [-1.052796, -0.529063, -2.524162, -0.391729, -1.750121, -2.748796, -0.611192],
}
PRUNED = {
    "w0 w1 w2": [-0.772708, -0.870475, -0.971358, -0.986669],
    "w5 w0 w0 nowhere w3": [-1.330167, -0.923405, -0.546485, -3.454928, -1.460646, -0.722039],
    "": [-1.074392],
    "w1 w0 last w2 w7 w110": [-1.046587, -0.486559, -3.311197, -1.384632, -1.678298, -2.64893, -0.59996],
}
DISCOUNTS = [[0.16129, 1.55335, 2.24731], [0.680321, 1.40515, 1.59244], [0.911043, 1.05754, 1.29939]]


@pytest.mark.parametrize(
    ("prune", "must", "sizes"), [((), WHOLE, [124, 1208, 1928]), ((0, 1, 2), PRUNED, [124, 368, 59])]
)
def test_it_estimates_what_lmplz_does(prune, must, sizes):
    lines = corpus()
    words = vocabulary(lines)
    model = estimate(lines, words, order=3, prune=prune)
    assert np.diff(model.orders.numpy()).tolist() == sizes
    np.testing.assert_allclose(model.discounts.numpy(), DISCOUNTS, rtol=1e-5)
    for text, wanted in must.items():
        np.testing.assert_allclose(scores(model, words, text), wanted, atol=1e-5)


def test_another_text_is_not_what_lmplz_had():
    lines = [*corpus(), "w0 w1"]
    model = estimate(lines, vocabulary(lines), order=3)
    assert not np.allclose(scores(model, vocabulary(lines), "w0 w1 w2"), WHOLE["w0 w1 w2"], atol=1e-5)


# Round trip.


@pytest.mark.parametrize("name", ["model.arpa", "model.arpa.gz"])
@pytest.mark.parametrize(("order", "smoothing"), [(1, "kneser-ney"), (3, "kneser-ney"), (3, "add-k"), (4, "mle")])
def test_what_is_written_is_read_again(tmp_path, name, order, smoothing):
    lines = corpus()[::8]
    words = vocabulary(lines)
    model = estimate(lines, words, order=order, smoothing=smoothing)
    write_arpa(model, words, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b" if name.endswith("gz") else b"\\data\\\nngram 1=")
    back, spelt = read_arpa(tmp_path / name)
    assert (spelt, back.config.order) == (words, order)
    for table in ("orders", "words", "first"):
        assert torch.equal(getattr(back, table), getattr(model, table))
    if smoothing != "mle":  # log 0 is written as -99
        for text in lines:
            np.testing.assert_allclose(scores(back, words, text), scores(model, words, text), atol=1e-5)
    write_arpa(back, words, tmp_path / "again.arpa")
    with open_text(tmp_path / name, "rt") as first:
        heads = [text.split("-grams:")[0] for text in (first.read(), (tmp_path / "again.arpa").read_text())]
    assert heads[0] == heads[1]


# SRILM drops prefixes and suffixes of n-grams: "b c" here, and the context "a b" of "a b c".
HOLES = f"""
\\data\\
ngram 1=6
ngram 2=2
ngram 3=1

\\1-grams:
-1.0\t{UNK}
-99\t{BOS}\t-0.5
-0.8\t{EOS}
-0.5\ta\t-0.25
-0.6\tb\t-0.125
-0.7\tc

\\2-grams:
-0.3\t{BOS} a\t-0.2
-0.4\ta b

\\3-grams:
-0.1\ta b c

\\end\\
"""


def test_n_grams_that_a_file_lacks_are_filled_in(tmp_path):
    (tmp_path / "holes.arpa").write_text(HOLES)
    model, words = read_arpa(tmp_path / "holes.arpa")
    assert words == [*SPECIALS, "a", "b", "c"]
    np.testing.assert_allclose(scores(model, words, "a b c"), [-0.3, -0.2 - 0.4, -0.1, -0.8], atol=1e-6)
    np.testing.assert_allclose(scores(model, words, "b c c"), [-0.5 - 0.6, -0.125 - 0.7, -0.7, -0.8], atol=1e-6)
    np.testing.assert_allclose(scores(model, words, "a x"), [-0.3, -0.2 - 0.25 - 1.0, -0.8], atol=1e-6)
    assert np.diff(model.orders.numpy()).tolist() == [6, 3, 1]
    assert model.is_consistent()
    assert model.logits(Tokens.pack([[1, 3]]))[:, 1].tolist() == [-math.inf, -math.inf]


def test_a_file_without_an_unknown_word_is_read_as_kenlm_does(tmp_path):
    (tmp_path / "closed.arpa").write_text(HOLES.replace("ngram 1=6", "ngram 1=5").replace(f"-1.0\t{UNK}\n", ""))
    model, words = read_arpa(tmp_path / "closed.arpa")
    assert scores(model, words, "x")[0] == pytest.approx(-0.5 - 100)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ngram 2=2", "ngram 3=2", "holes.arpa:4: must say how many 2-grams there are"),
        ("ngram 2=2", "ngram 2=3", "holes.arpa:18: must be a probability, 2 words and a back-off weight, but is ''"),
        ("ngram 2=2", "ngram 2=1", "holes.arpa:17: must begin the 3-grams"),
        ("-0.4\ta b", "-0.4\ta z", "holes.arpa:17: has a word that is not among the 1-grams: 'z'"),
        ("-0.4\ta b", "high\ta b", "holes.arpa:17: a probability and a back-off weight are numbers: .*'high'"),
        ("-0.4\ta b", "0.4\ta b", "log10 of a probability is at most 0, but that of one 2-gram is not"),
        ("-0.4\ta b", "nan\ta b", "log10 of a probability is at most 0"),
        (f"-0.3\t{BOS} a\t-0.2", "-0.3\ta b\t-0.2", "a 2-gram is there twice"),
        ("-0.7\tc", "-0.7\ta", "holes.arpa:13: is there twice among the 1-grams: 'a'"),
        (f"-99\t{BOS}\t-0.5", "-99\t<S>\t-0.5", "the 1-grams must have <s>"),
        ("\\end\\", "", r"ends too soon, before \\end\\"),
        ("\\data\\", "", r"ends too soon"),
        ("ngram 1=6\nngram 2=2\nngram 3=1\n", "", "must say how many n-grams there are"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, old, new, message):
    assert old in HOLES
    (tmp_path / "holes.arpa").write_text(HOLES.replace(old, new))
    with pytest.raises(DataError, match=message):
        read_arpa(tmp_path / "holes.arpa")


def test_what_is_no_file_of_that_kind_is_refused(tmp_path):
    (tmp_path / "not.arpa.gz").write_bytes(b"\\data\\")
    (tmp_path / "latin.arpa").write_bytes(b"\xe9\xff")
    for name in ("not.arpa.gz", "latin.arpa", "nowhere.arpa"):
        with pytest.raises(DataError, match=rf"{name}: cannot be read"):
            read_arpa(tmp_path / name)


def test_words_that_a_file_cannot_hold_are_refused(tmp_path):
    model = NGram(NGramConfig(name="ngram", order=1), 4)
    with pytest.raises(DataError, match="separates words by spaces, so it cannot have the token 'a b'"):
        write_arpa(model, [*SPECIALS, "a b"], tmp_path / "a.arpa")
    with pytest.raises(DataError, match="got one token for both"):
        write_arpa(model, [UNK, EOS, "a", "b"], tmp_path / "a.arpa")


# Compared live, where KenLM is installed.


@pytest.mark.peers
@pytest.mark.parametrize("prune", [(), (0, 1, 2)])
def test_kenlm_scores_what_we_write_as_we_do(tmp_path, prune):
    kenlm = pytest.importorskip("kenlm")
    lines = corpus()
    words = vocabulary(lines)
    model = estimate(lines, words, order=3, prune=prune)
    write_arpa(model, words, tmp_path / "ours.arpa")
    theirs = kenlm.Model(str(tmp_path / "ours.arpa"))
    for text in [*lines[:50], *WHOLE]:
        wanted = [score for score, *_ in theirs.full_scores(text)]
        np.testing.assert_allclose(scores(model, words, text), wanted, atol=1e-5)


@pytest.mark.peers
@pytest.mark.parametrize(("order", "prune"), [(3, ()), (5, ()), (3, (0, 1, 2)), (4, (0, 0, 1))])
def test_we_read_and_estimate_what_lmplz_does(tmp_path, order, prune):
    kenlm = pytest.importorskip("kenlm")
    if not LMPLZ:
        pytest.skip("lmplz is not there: put it on the PATH, or its place in LMPLZ")
    lines = corpus()
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in lines))
    options = ["-o", str(order), "-S", "100M", "--discount_fallback", *(["--prune", *map(str, prune)] if prune else [])]
    with (tmp_path / "text").open() as text, (tmp_path / "theirs.arpa").open("w") as arpa:
        subprocess.run([LMPLZ, *options], stdin=text, stdout=arpa, stderr=subprocess.DEVNULL, check=True)
    read, words = read_arpa(tmp_path / "theirs.arpa")
    own, theirs = estimate(lines, words, order=order, prune=prune), kenlm.Model(str(tmp_path / "theirs.arpa"))
    for name in ("orders", "words", "first"):
        assert torch.equal(getattr(own, name), getattr(read, name))
    for name in BUFFERS[3:4]:
        np.testing.assert_allclose(getattr(own, name), getattr(read, name), atol=2e-6)
    for text in [*lines[:50], *WHOLE]:
        wanted = [score for score, *_ in theirs.full_scores(text)]
        np.testing.assert_allclose(scores(read, words, text), wanted, atol=1e-5)
