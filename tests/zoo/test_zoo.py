"""The models that ship with weft: found by name, whole, small, and good for what their cards say, with no network."""

import re
import socket

import numpy as np
import pytest
import torch

import weft
from weft.checkpoint.manifest import check_files, verify_checkpoint
from weft.errors import CheckpointError
from weft.zoo import ROOT, bundled_models, find_bundled, read_card, summary

NAMES = ["dates", "encoder-en", "sentences-en", "translator-en-fr", "writer-en"]
SECTIONS = ["Text and licences", "How it was trained", "What it is not good for"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a model that ships needs no network")

    monkeypatch.setattr(socket, "socket", refuse)


@pytest.fixture(scope="module")
def load():
    loaded = {}
    return lambda name: loaded.setdefault(name, weft.load(name, device="cpu"))


def test_these_ship():
    assert bundled_models() == NAMES
    assert find_bundled("encoder-en") == ROOT / "encoder-en"
    assert find_bundled("../zoo/encoder-en") is None
    assert find_bundled("encoder") is None


def test_they_are_small():
    sizes = [sum(path.stat().st_size for path in (ROOT / name).iterdir()) for name in NAMES]
    assert max(sizes) <= 20e6
    assert sum(sizes) <= 50e6


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_whole_and_in_float32(name, load):
    verify_checkpoint(ROOT / name)
    assert "README.md" in check_files(ROOT / name).files
    assert {value.dtype for value in load(name).head.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", NAMES)
def test_a_card_says_what_the_model_is(name):
    card = read_card(name)
    assert card.startswith(f"# {name}\n\n{summary(name)}\n\n")
    assert re.findall("^## (.*)", card, re.M)[:2] == SECTIONS[:2]
    assert f"## {SECTIONS[2]}" in card


def test_the_encoder_fills_masks(load):
    answers = load("encoder-en").predict(["Paris is the [MASK] of France.", "He has two sons and a [MASK]."])
    assert [answer["text"] for answer in answers] == [
        "Paris is the capital of France.",
        "He has two sons and a daughter.",
    ]


def test_sentences_that_mean_the_same_are_near(load):
    texts = ["A man is playing a guitar.", "Someone plays an instrument.", "The stock market fell sharply on Monday."]
    vectors = load("sentences-en").embed(texts, normalize=True)
    same, other = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert same > 0.4 > other + 0.1


def test_what_the_sentences_share_with_the_encoder_is_stored_once(load):
    mine, theirs = load("sentences-en").head.state_dict(), load("encoder-en").head.state_dict()
    shared = {name for name in mine if name in theirs and torch.equal(mine[name], theirs[name])}
    assert "body.embed.weight" in shared
    assert set(mine) - shared, "the negative control: other weights differ"


def test_the_translator_translates(load):
    answers = load("translator-en-fr").predict(["Where is the station?", "I love you."])
    assert [answer["text"] for answer in answers] == ["Où est la gare ?", "Je t'aime."]


def test_the_date_translator_knows_dates(load):
    assert load("dates").predict("Thursday, January 12, 2023")[0]["text"] == "jeudi 12 janvier 2023"


def test_the_writer_writes_words(load):
    options = {"max_length": 30, "seed": 1}
    text = load("writer-en").predict("The city is located in the", options)[0]["text"]
    assert text == load("writer-en").predict("The city is located in the", options)[0]["text"]
    assert len(re.findall(r"[a-z]{3,}", text)) >= 8


def test_a_training_starts_from_one_of_them(tmp_path):
    rows = tmp_path / "rows.tsv"
    rows.write_text("a fine film\tgood\nno fun at all\tbad\n" * 3, encoding="utf-8")
    recipe = {
        "task": {"name": "classify"},
        "data": {"train": str(rows)},
        "model": {"weights": "encoder-en"},
        "train": {"steps": 1, "batch_tokens": 64, "freeze": "body", "device": "cpu"},
    }
    pipeline = weft.train(recipe, out=tmp_path / "run")
    saved = pipeline.save(tmp_path / "small", base="encoder-en")
    assert (saved / "model.safetensors").stat().st_size < 1e6, "the head alone"
    scores = [list(model.predict("a film")[0]["scores"].values()) for model in (pipeline, weft.load(saved))]
    np.testing.assert_array_equal(*scores)
    with pytest.raises(CheckpointError, match="'encoder-fr' does not ship with weft; did you mean 'encoder-en'"):
        pipeline.save(tmp_path / "other", base="encoder-fr")
