"""TextEncoder in scikit-learn: pipelines, grid search, clones, data frames, saving and loading."""

import pickle
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import validate_data
from tests.test_text_embedding import TEXTS, made

import weft
from weft.estimators import TextClassifier, TextEncoder

FRAMES = ["a {} and", "the {} one", "they were {}", "it was {}", "{} and {}", "{} the"]
CHOSEN = [frame.replace("{}", word) for word in ("play", "to") for frame in FRAMES]
LABELS = ["noun"] * 6 + ["other"] * 6


@pytest.fixture(scope="module")
def bert():
    return made("bert")


@pytest.fixture(scope="module")
def folder(bert, tmp_path_factory):
    return bert.save(tmp_path_factory.mktemp("models") / "bert")


def test_vectors_are_those_of_embed(bert, folder):
    for model in (bert, folder, str(folder)):
        for options in ({}, {"pool": "cls"}, {"layers": "-2:", "combine": "concat"}, {"normalize": True}):
            vectors = TextEncoder(model, **options).fit_transform(TEXTS)
            np.testing.assert_allclose(vectors, bert.embed(TEXTS, **options), atol=1e-5)
            assert vectors.dtype == np.float32


def test_long_texts_are_cut_where_the_recipe_says_so_as_in_embed(bert):
    data = bert.run.data.model_copy(update={"truncation": "cut"})
    cutting = replace(bert, run=bert.run.model_copy(update={"data": data}))
    long = ["play " * 99]
    np.testing.assert_array_equal(TextEncoder(cutting).transform(long), cutting.embed(long))
    np.testing.assert_array_equal(TextEncoder(bert, truncate=True).transform(long), cutting.embed(long))
    for encoder in (TextEncoder(bert), TextEncoder(cutting, truncate=False)):
        with pytest.raises(weft.DataError, match="truncate=True"):
            encoder.transform(long)


def test_texts_come_in_lists_arrays_and_columns(bert):
    expected = bert.embed(TEXTS)
    for texts in (tuple(TEXTS), np.array(TEXTS), np.array(TEXTS, object), pd.Series(TEXTS), iter(TEXTS)):
        np.testing.assert_array_equal(TextEncoder(bert).transform(texts), expected)
    assert TextEncoder(bert).transform([]).shape == (0, 16)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("a text", r"X: must be texts.*str 'a text'"),
        (np.zeros((3, 2)), r"ndarray of shape \(3, 2\)"),
        ([["a"], ["b"]], "X: text 1 must be a text, but is list"),
        (["a", None], "X: text 2 must be a text, but is NoneType None"),
        (3, "X: must be texts"),
        (pd.DataFrame({"text": TEXTS}), r"DataFrame of shape \(7, 1\)"),
        ([], "found 0 samples"),
    ],
)
def test_what_is_no_text_is_refused(bert, texts, message):
    for error in (weft.DataError, ValueError):
        with pytest.raises(error, match=message):
            TextEncoder(bert).fit(texts)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (None, {}, "model: must be a path, a name on the hub or a weft.Pipeline, but is None"),
        ("bert", {"pool": "men"}, "pool: there is no 'men'"),
        ("bert", {"pool": "tokens"}, "pool: 'tokens' gives several vectors a text"),
        ("bert", {"layers": "x"}, "layers: must be a layer"),
        ("bert", {"layers": 9}, "layers: a bert has 0"),
    ],
)
def test_what_cannot_be_done_is_said_when_it_is_fitted(bert, model, options, message):
    with pytest.raises(weft.ConfigError, match=message):
        TextEncoder(bert if model else None, **options).fit(TEXTS)


def test_a_pipeline_learns_and_a_grid_goes_over_layers(bert):
    pipeline = Pipeline([("encode", TextEncoder(bert)), ("classify", LogisticRegression(C=100, max_iter=500))])
    assert pipeline.fit(CHOSEN, LABELS).score(["the play", "a to the"], ["noun", "other"]) == 1
    grid = {"encode__layers": [-1, 0, "-4:", [1, 2]], "encode__pool": ["mean", "cls"]}
    search = GridSearchCV(pipeline, grid, cv=3).fit(CHOSEN, LABELS)
    assert search.best_score_ > 0.8
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    # [CLS] of the embeddings has seen no word: by it nothing can be told apart.
    scores = dict(zip(map(str, search.cv_results_["params"]), search.cv_results_["mean_test_score"], strict=True))
    assert scores[str({"encode__layers": 0, "encode__pool": "cls"})] == 0.5
    shuffled = np.random.default_rng(0).permutation(LABELS)
    assert cross_val_score(pipeline, CHOSEN, shuffled, cv=3).mean() < 0.8


def test_a_column_of_a_table_beside_numbers(bert):
    table = pd.DataFrame({"text": TEXTS, "size": np.arange(7.0)})
    both = ColumnTransformer([("vectors", TextEncoder(bert), "text")], remainder="passthrough")
    np.testing.assert_allclose(both.fit_transform(table)[:, :-1], bert.embed(TEXTS), atol=1e-5)
    named = both.set_output(transform="pandas").fit_transform(table)
    assert list(named.columns[[0, 15, 16]]) == ["vectors__textencoder0", "vectors__textencoder15", "remainder__size"]


def test_outputs_may_be_frames(bert):
    encoder = TextEncoder(bert, layers="-2:", combine="concat").set_output(transform="pandas")
    frame = encoder.fit_transform(pd.Series(TEXTS, index=list("abcdefg")))
    assert frame.shape == (7, 32)
    assert list(encoder.get_feature_names_out()) == list(frame.columns) == [f"textencoder{dim}" for dim in range(32)]


def test_clones_share_a_pipeline_and_have_the_same_settings(bert, folder):
    encoder = TextEncoder(bert, pool="last", layers=[1, 2])
    assert clone(encoder).model is bert
    assert clone(encoder).get_params() == encoder.get_params()
    assert "model=<weft.Pipeline: bert for classify, " in repr(encoder)
    fitted = TextEncoder(folder).fit(TEXTS)
    held = fitted._pipeline()
    assert fitted._pipeline() is held
    fitted.set_params(precision="bf16")
    assert fitted._pipeline() is not held
    assert fitted._pipeline().precision == "bf16"


def test_saved_and_loaded_it_gives_the_same(bert, folder, tmp_path):
    encoder = TextEncoder(bert, pool="max", layers=np.array([1, 3]), combine="concat")
    path = encoder.save(tmp_path / "saved")
    again = TextEncoder.load(path)
    np.testing.assert_array_equal(again.transform(TEXTS), encoder.transform(TEXTS))
    assert again.layers == [1, 3]
    assert weft.load(path).embed(TEXTS).shape == (7, 16)
    lower = TextEncoder(folder, precision="bf16").save(tmp_path / "lower")
    assert TextEncoder.load(lower).precision == "bf16"
    np.testing.assert_allclose(weft.load(lower).embed(TEXTS), bert.embed(TEXTS), atol=1e-5)


def test_the_device_that_it_was_saved_on_need_not_be_there(bert, tmp_path):
    path = TextEncoder(bert, device="cuda:99").save(tmp_path / "saved")
    assert TextEncoder.load(path).device == "auto"
    assert TextEncoder.load(path).transform(TEXTS).shape == (7, 16)
    assert TextEncoder.load(path, device="cpu").device == "cpu"
    with pytest.raises(weft.ConfigError, match="device: "):
        TextEncoder.load(path, device="cuda:99").transform(TEXTS)


def test_what_save_did_not_write_is_refused(bert, folder, tmp_path):
    with pytest.raises(weft.CheckpointError, match="estimator.json: cannot be read"):
        TextEncoder.load(folder)
    path = TextEncoder(bert).save(tmp_path / "saved")
    with pytest.raises(weft.CheckpointError, match="holds a TextEncoder, but is read as a TextClassifier"):
        TextClassifier.load(path)
    with pytest.raises(weft.CheckpointError, match="exists already"):
        TextEncoder(bert).save(path)
    (path / "estimator.json").write_text('{"kind": "TextEncoder", "parameters": {"pol": "mean"}}')
    with pytest.raises(weft.CheckpointError, match="TextEncoder has no 'pol'"):
        TextEncoder.load(path)
    (path / "estimator.json").write_text("[]")
    with pytest.raises(weft.CheckpointError, match="is not what `save` writes"):
        TextEncoder.load(path)


def test_a_pickle_of_it_holds_no_model_that_it_can_load_again(folder):
    encoder = TextEncoder(folder).fit(TEXTS)
    small = pickle.dumps(encoder)
    assert len(small) < 5000
    np.testing.assert_array_equal(pickle.loads(small).transform(TEXTS), encoder.transform(TEXTS))


def spelt(rows):
    """Write numbers as a text, for checks that only have numeric data."""
    return [" ".join(f"{place}:{round(2 * float(value))}" for place, value in enumerate(row)) for row in rows]


def numeric(tags):
    tags.input_tags.two_d_array, tags.input_tags.one_d_array, tags.input_tags.string = True, False, False
    return tags


class OfNumbers(TextEncoder):
    """The encoder adapted to scikit-learn's checks: a row of numbers becomes a text."""

    def fit(self, X, y=None):
        return super().fit(spelt(validate_data(self, X)), y)

    def transform(self, X):
        return super().transform(spelt(validate_data(self, X, reset=False)))

    def __sklearn_tags__(self):
        return numeric(super().__sklearn_tags__())


def checked(estimator):
    """Return the names of scikit-learn's checks that pass, and of those that do not, with the reason."""
    results = check_estimator(estimator, on_skip=None, on_fail=None)
    failed = {result["check_name"]: str(result["exception"]) for result in results if result["status"] == "failed"}
    return {result["check_name"] for result in results if result["status"] == "passed"}, failed


def test_scikit_learns_checks_pass(tmp_path):
    path = made("cnn", longest=200).save(tmp_path / "cnn")
    passed, failed = checked(OfNumbers(path))
    assert failed == {}
    assert len(passed) >= 35


def test_scikit_learns_checks_catch_what_is_wrong(tmp_path):
    class Forgetful(OfNumbers):
        """Changes its own settings."""

        def fit(self, X, y=None):
            self.pool = "cls"
            return super().fit(X, y)

    _, failed = checked(Forgetful(made("cnn", longest=200).save(tmp_path / "cnn")))
    assert "check_estimators_overwrite_params" in failed


def test_its_tags_say_that_it_takes_texts(bert):
    tags = TextEncoder(bert).__sklearn_tags__()
    assert tags.input_tags.string
    assert not tags.input_tags.two_d_array
    assert not tags.requires_fit
