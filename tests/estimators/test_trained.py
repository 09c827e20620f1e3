"""The classifier and the tagger: training with a seed, from scratch or from weights, grid search and saving."""

import json
import warnings

import numpy as np
import pytest
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.utils.validation import check_is_fitted, validate_data
from tests.estimators.test_encoder import CHOSEN, LABELS, checked, numeric, spelt
from tests.test_text_embedding import made

import weft
from weft.config.starters import STARTERS
from weft.estimators import TextClassifier, TextTagger

TINY = {"name": "cnn", "width": 9, "embedding": 4}
WORDS = {"name": "words"}
QUICK = {"model": TINY, "tokenizer": WORDS, "steps": 20, "lr": 0.05, "overrides": ("train.report_every=100",)}
TEXTS = CHOSEN
SENTENCES = [text.split() for text in TEXTS]
TAGS = [["B-X" if word in ("play", "to") else "O" for word in words] for words in SENTENCES]


def few(**other):
    return TextClassifier(**{**QUICK, **other})


@pytest.fixture(scope="module")
def fitted():
    return few().fit(TEXTS, LABELS)


def test_it_learns(fitted):
    assert fitted.score(TEXTS, LABELS) == 1
    assert list(fitted.classes_) == ["noun", "other"]
    assert list(fitted.predict(["they were play", "to and"])) == ["noun", "other"]
    likely = fitted.predict_proba(TEXTS)
    assert likely.shape == (12, 2)
    np.testing.assert_allclose(likely.sum(1), 1)
    np.testing.assert_array_equal(fitted.classes_[likely.argmax(1)], fitted.predict(TEXTS))
    assert fitted.predict_proba([]).shape == (0, 2)
    assert is_classifier(fitted)


def test_a_text_that_looks_like_a_pair_is_a_text(fitted):
    odd = '{"text": "play", "pair": "play"}'
    (likely,) = fitted.predict_proba([odd])
    (text,), (pair,) = fitted.pipeline_({"text": odd}), fitted.pipeline_(odd)
    assert likely[0] == pytest.approx(text["scores"]["noun"], abs=1e-5)
    assert likely[0] != pytest.approx(pair["scores"]["noun"], abs=1e-5)  # the control


def test_long_texts_are_cut_when_asked_as_when_fitted():
    long = few(overrides=["data.max_length=4"]).fit(TEXTS, LABELS)
    likely = long.predict_proba(["play " * 4, "play " * 400])
    np.testing.assert_allclose(likely[0], likely[1], atol=1e-6)
    strict = few(overrides=["data.max_length=8", "data.truncation=error"]).fit(["play", "to"], ["noun", "other"])
    with pytest.raises(
        weft.WeftError, match="example 1: got 400 tokens, data.max_length is 8; shorten it"
    ):  # the control
        strict.predict(["play " * 400])


def test_what_is_not_there_is_not_learnt():
    shuffled = np.random.default_rng(3).permutation(LABELS)
    assert few(steps=1, lr=1e-6).fit(TEXTS, shuffled).score(TEXTS, shuffled) < 0.9


@pytest.mark.parametrize("classes", [(3, 7), (True, False), ("no", "yes"), (np.int8(-1), np.int8(1)), (0, 1)], ids=str)
def test_classes_keep_their_kind(classes, tmp_path):
    right = np.array([classes[label == "other"] for label in LABELS])
    model = few().fit(TEXTS, right)
    assert model.classes_.dtype == right.dtype
    assert model.predict(TEXTS).dtype == right.dtype
    assert (model.predict(TEXTS) == right).all()
    again = TextClassifier.load(model.save(tmp_path / "saved"))
    assert again.classes_.dtype == right.dtype
    assert (again.predict(TEXTS) == right).all()


def test_the_seed_alone_decides(fitted):
    again, other = few().fit(TEXTS, LABELS), few(seed=2).fit(TEXTS, LABELS)
    np.testing.assert_array_equal(again.predict_proba(TEXTS), fitted.predict_proba(TEXTS))
    assert np.abs(other.predict_proba(TEXTS) - fitted.predict_proba(TEXTS)).max() > 1e-4


def test_a_grid_goes_over_its_settings():
    grid = {"lr": [1e-6, 0.05], "model": [TINY, {"name": "word2vec", "width": 8}]}
    search = GridSearchCV(few(), grid, cv=2).fit(TEXTS, LABELS)
    assert search.best_params_["lr"] == 0.05
    assert search.best_score_ > 0.9


@pytest.mark.parametrize("by", ["path", "pipeline"])
def test_it_goes_on_from_weights(by, tmp_path):
    bert = made("bert")
    start = bert if by == "pipeline" else bert.save(tmp_path / "bert")
    model = TextClassifier(start, steps=1, lr=1e-9).fit(TEXTS, LABELS)
    assert model.pipeline_.run.model.name == "bert"
    np.testing.assert_allclose(model.pipeline_.embed(TEXTS), bert.embed(TEXTS), atol=1e-4)
    fresh = TextClassifier({**bert.run.model.model_dump(exclude_none=True)}, tokenizer=WORDS, steps=1, lr=1e-9)
    assert np.abs(fresh.fit(TEXTS, LABELS).pipeline_.embed(TEXTS) - bert.embed(TEXTS)).max() > 0.1


def test_the_default_is_a_bag_of_words_and_of_names_a_network_over_characters():
    sentences = [f"{text} once more" for text in TEXTS]
    run = TextClassifier(steps=2).fit(sentences, LABELS).pipeline_.run
    assert (run.model.name, run.tokenizer.name, run.train.lr, run.task.dropout) == ("fasttext", "words", 3e-3, 0.5)
    for names in (TEXTS, [text.replace(" ", "") * 9 for text in TEXTS]):  # few words, and no spaces
        run = TextClassifier(steps=1).fit(names, LABELS).pipeline_.run
        assert (run.model.name, run.tokenizer.name) == ("rnn", "characters")


def test_the_default_learns_from_few_texts():
    sentences = [f"{text} once more" for text in TEXTS]
    assert TextClassifier().fit(sentences, LABELS).score(sentences, LABELS) == 1
    assert TextClassifier(epochs=1).fit(sentences, LABELS).score(sentences, LABELS) < 1  # the control


MANY = [f"{text} {number}" for number in range(20) for text in TEXTS]


def test_training_stops_early_on_texts_that_are_held_out(tmp_path):
    model = few(steps=None, epochs=50, out=tmp_path / "run").fit(MANY, LABELS * 20)
    train = model.pipeline_.run.train
    assert (model.pipeline_.run.data.validation_fraction, train.patience, train.epochs) == (0.1, 3, 50)
    reports = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert reports[-1]["epoch"] < 40
    assert reports[-1]["valid"]["accuracy"] == 1
    assert weft.load(tmp_path / "run")(TEXTS[0])[0]["label"] == model.predict(TEXTS[:1])[0]
    with pytest.raises(weft.CheckpointError, match="holds a run already"):
        model.fit(MANY, LABELS * 20)


def test_no_text_is_held_out_where_there_are_few_or_it_is_not_asked_for():
    assert few().fit(TEXTS, LABELS).pipeline_.run.data.validation_fraction is None
    whole = few(early_stopping=False).fit(MANY, LABELS * 20).pipeline_.run
    assert (whole.data.validation_fraction, whole.train.patience) == (None, None)
    half = few(validation_fraction=0.5, n_iter_no_change=7).fit(MANY, LABELS * 20).pipeline_.run  # the control
    assert (half.data.validation_fraction, half.train.patience) == (0.5, 7)
    with pytest.raises(weft.ConfigError, match="data.validation_fraction: should be less than 1"):
        few(validation_fraction=1).fit(MANY, LABELS * 20)


def test_more_texts_have_larger_batches_and_weights_a_smaller_rate():
    few_rows, many_rows = (STARTERS["classify"].recipe(rows)["train"] for rows in (300, 30_000))
    assert few_rows["batch_size"] < many_rows["batch_size"]
    assert few_rows["epochs"] > many_rows["epochs"]
    tuned = TextClassifier(made("bert"), steps=1).fit(TEXTS, LABELS).pipeline_.run.train
    assert (tuned.lr, tuned.schedule, tuned.batch_size) == (5e-5, "warmup-linear", 16)
    given = few(batch_size=5, epochs=1, steps=None).fit(TEXTS, LABELS).pipeline_.run.train
    assert (given.batch_size, given.epochs, given.lr) == (5, 1, 0.05)


def test_saved_and_loaded_it_gives_the_same(fitted, tmp_path):
    path = fitted.save(tmp_path / "saved")
    again = TextClassifier.load(path)
    np.testing.assert_array_equal(again.predict_proba(TEXTS), fitted.predict_proba(TEXTS))
    assert again.get_params()["model"] == TINY
    assert again.score(TEXTS, LABELS) == 1
    assert weft.load(path)(TEXTS[0])[0]["label"] == "noun"
    assert not list(path.rglob("*.pkl"))
    assert clone(again).get_params() == again.get_params()
    assert TextClassifier.load(path, device="cpu").device == "cpu"
    elsewhere = clone(fitted).set_params(device="cuda:99")  # no such device is here
    elsewhere.pipeline_, elsewhere.classes_ = fitted.pipeline_, fitted.classes_
    assert TextClassifier.load(elsewhere.save(tmp_path / "elsewhere")).device == "auto"


@pytest.mark.parametrize(
    ("texts", "labels", "message"),
    [
        (TEXTS, LABELS[1:], "y: must have one for each of X, but there are 11 for 12"),
        (TEXTS, None, "the target y is None"),
        (TEXTS, ["a"] * 12, "the one class is"),
        (TEXTS, ["a", ""] * 6, "none blank"),
        (TEXTS, np.linspace(0, 1, 12), "Unknown label type: continuous"),
        (TEXTS, np.eye(12, dtype=int), "should be a 1d array"),
        ([], [], "found 0 samples"),
        ([1] * 12, LABELS, "X: text 1 must be a text"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused(texts, labels, message):
    with pytest.raises(ValueError, match=message):
        few().fit(texts, labels)


def test_a_wrong_recipe_is_refused_as_ever():
    with pytest.raises(weft.ConfigError, match="train.scheduel: unknown key; did you mean 'schedule'"):
        few(overrides=["train.scheduel=cosine"]).fit(TEXTS, LABELS)
    with pytest.raises(weft.CheckpointError, match="nowhere"):
        TextClassifier("nowhere/at/all").fit(TEXTS, LABELS)


def test_before_it_is_fitted_it_does_nothing(tmp_path):
    for ask in (few().predict, few().predict_proba, lambda _: few().save(tmp_path / "saved")):
        with pytest.raises(NotFittedError):
            ask(TEXTS)
    with pytest.raises(NotFittedError):
        TextTagger().predict(SENTENCES)


class OfNumbers(TextClassifier):
    """The classifier adapted to scikit-learn's checks: a row of numbers becomes a text."""

    def fit(self, X, y):
        X, y = validate_data(self, X, y)
        return super().fit(spelt(X), y)

    def predict_proba(self, X):
        check_is_fitted(self)
        return super().predict_proba(spelt(validate_data(self, X, reset=False)))

    def __sklearn_tags__(self):
        return numeric(super().__sklearn_tags__())


def test_scikit_learns_checks_pass():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn's own
        falling = (*QUICK["overrides"], "train.schedule=warmup-linear", "train.warmup=0.1")
        passed, failed = checked(OfNumbers(**{**QUICK, "steps": 12, "lr": 0.1, "overrides": falling}, batch_size=500))
    assert failed == {}
    assert len(passed) >= 45


def tagger(**other):
    return TextTagger(**{**QUICK, **other})


def test_a_tagger_learns_and_is_searched_over(tmp_path):
    model = tagger().fit(SENTENCES, TAGS)
    assert model.score(SENTENCES, TAGS) == 1
    assert model.predict([["a", "play", "and"], []]) == [["O", "B-X", "O"], []]
    assert list(model.classes_) == ["B-X", "O"]
    again = TextTagger.load(model.save(tmp_path / "saved"))
    assert again.predict(SENTENCES) == TAGS
    assert tagger().fit(SENTENCES, TAGS).predict(SENTENCES) == TAGS
    search = GridSearchCV(tagger(), {"lr": [1e-6, 0.05]}, cv=2).fit(SENTENCES, TAGS)
    assert search.best_params_ == {"lr": 0.05}
    wrong = [list(reversed(tags)) for tags in TAGS]
    assert model.score(SENTENCES, wrong) < 0.7


def test_the_taggers_default_reads_words_and_their_letters():
    model = TextTagger(steps=2).fit(SENTENCES, TAGS)
    assert model.pipeline_.run.model.chars == 50
    assert model.pipeline_.task.metric == "f1"


@pytest.mark.parametrize(
    ("sentences", "tags", "message"),
    [
        (["a text"], [["O"]], "X: sentence 1 must be a list of words, but is str 'a text'"),
        ([["a"]], [["O", "O"]], "y: sentence 1 has 1 words, but 2 tags"),
        ([["a"], ["b"]], [["O"]], "must have one for each of X"),
        ([["a", 3]], [["O", "O"]], "X: sentence 1 must be a list of words"),
        ("text", [], "X: must be a list of lists of words"),
        ([], [], "found 0 samples"),
        ([["a"]], None, "must have one for each of X"),
    ],
)
def test_what_a_tagger_cannot_learn_from_is_refused(sentences, tags, message):
    with pytest.raises(ValueError, match=message):
        tagger().fit(sentences, tags)
