"""`weft.vectors`: what a file or a run gives, and queries beside gensim's KeyedVectors."""

from itertools import combinations

import numpy as np
import pytest
from gensim.models import KeyedVectors

import weft
from weft.data.word_vectors.write import write_vectors

WORDS = [*"abcdefghijklmnop", "Paris", "paris"]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "v.txt"
    write_vectors(str(path), WORDS, np.random.default_rng(3).normal(0, 2, (len(WORDS), 5)).astype(np.float32))
    return path


@pytest.fixture
def vectors(path):
    return weft.vectors.load(path)


@pytest.fixture
def peer(path):
    return KeyedVectors.load_word2vec_format(str(path))


def assert_same(ours, theirs):
    assert [word for word, _ in ours] == [word for word, _ in theirs]
    np.testing.assert_allclose([cosine for _, cosine in ours], [cosine for _, cosine in theirs], atol=1e-6)


@pytest.mark.parametrize(
    "query",
    [
        {"positive": "a"},
        {"positive": ["a", "b"], "negative": ["c"]},
        {"positive": ["a", "a", "b"], "negative": ["Paris", "d"]},
        {"negative": ["c"]},
        {"positive": ["a", "p"], "negative": ["c"], "restrict_vocab": 7},
        {"positive": ["a"], "topn": 3},
        {"positive": ["a"], "topn": 1000},
    ],
    ids=str,
)
def test_the_most_similar_words_are_gensims(vectors, peer, query):
    ours = vectors.most_similar(**query)
    assert_same(ours, peer.most_similar(**query))
    assert not {word for word, _ in ours} & {*query.get("positive", ()), *query.get("negative", ())}


def test_vectors_count_by_their_direction_and_not_their_length(vectors, peer):
    """The negative control: the sum of the vectors as they are is another query."""
    unit = [word for word, _ in vectors.most_similar(["a", "b"], ["c"])]
    plain = peer["a"] + peer["b"] - peer["c"]
    assert unit != [word for word, _ in peer.similar_by_vector(plain, topn=13) if word not in "abc"][:10]


def test_similarity_is_gensims(vectors, peer):
    for a, b in combinations(WORDS, 2):
        assert vectors.similarity(a, b) == pytest.approx(float(peer.similarity(a, b)), abs=1e-6)


def test_the_word_that_does_not_match_is_gensims(vectors, peer):
    found = set()
    for words in combinations(WORDS[:9], 4):
        assert vectors.doesnt_match(words) == peer.doesnt_match(words)
        found.add(words.index(vectors.doesnt_match(words)))
    assert found == {0, 1, 2, 3}


def test_words_are_looked_up_as_in_a_mapping(vectors, peer):
    assert "Paris" in vectors
    assert "PARIS" not in vectors
    np.testing.assert_array_equal(vectors["Paris"], peer["Paris"])
    assert (len(vectors), list(vectors)) == (len(WORDS), WORDS)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda vectors: vectors["pariss"], "'pariss' is not among the 18 words; did you mean 'paris'"),
        (lambda vectors: vectors.similarity("a", "pariss"), "did you mean 'paris'"),
        (lambda vectors: vectors.doesnt_match(["a", "b", "pariss"]), "did you mean 'paris'"),
        (lambda vectors: vectors.most_similar(negative=["pariss"]), "did you mean 'paris'"),
        (lambda vectors: vectors.most_similar(), "most_similar: needs a word to start from, but has none; give"),
        (lambda vectors: vectors.doesnt_match([]), "doesnt_match: needs words to choose from, but has none; give"),
    ],
)
def test_an_unknown_word_or_none_is_refused(vectors, ask, message):
    with pytest.raises(weft.DataError, match=message):
        ask(vectors)


def test_a_run_gives_its_embeddings(tmp_path):
    recipe = {
        "task": {"name": "skipgram"},
        "data": {"train": str(tmp_path / "text.txt")},
        "tokenizer": {"name": "words"},
        "model": {"name": "word2vec", "width": 4},
        "train": {"steps": 1},
    }
    (tmp_path / "text.txt").write_text("a cat and a dog\nthe cat sat\n" * 20)
    pipeline = weft.train(recipe, out=tmp_path / "run")
    vectors = weft.vectors.load(tmp_path / "run")
    assert set(vectors) == {"a", "cat", "and", "dog", "the", "sat"}
    (id,) = pipeline.tokenizer.ids(["cat"])[0]
    np.testing.assert_array_equal(vectors["cat"], pipeline.head.body.embed.weight[id].detach().cpu())


@pytest.mark.parametrize("name", ["seq2seq", "transformer"])
def test_a_translation_gives_those_of_its_source(tmp_path, name):
    (tmp_path / "pairs.tsv").write_text("a cat\tun chat\na dog\tun chien\n")
    sizes = {"heads": 2, "layers": 1, "ffn_width": 4} if name == "transformer" else {}
    recipe = {
        "task": {"name": "translate"},
        "data": {"train": str(tmp_path / "pairs.tsv")},
        "tokenizer": {"name": "words", "target": {"name": "words"}},
        "model": {"name": name, "width": 8, "embedding": 4, "tie": False, **sizes},
        "train": {"steps": 1},
    }
    weft.train(recipe, out=tmp_path / "run")
    vectors = weft.vectors.load(tmp_path / "run")
    assert (set(vectors), vectors["cat"].shape) == ({"a", "cat", "dog"}, (4,))


def test_a_model_without_embeddings_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("a cat and a dog\n" * 5)
    recipe = {
        "task": {"name": "lm"},
        "data": {"train": str(tmp_path / "text.txt")},
        "tokenizer": {"name": "words"},
        "model": {"name": "ngram", "order": 2},
        "train": {"steps": 1},
    }
    weft.train(recipe, out=tmp_path / "run")
    with pytest.raises(weft.ConfigError, match="the model 'ngram' has no word vectors; give a word2vec run, or a file"):
        weft.vectors.load(tmp_path / "run")
