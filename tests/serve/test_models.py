"""Models under the names by which requests call them, and what the list says of each."""

import pytest

import weft
from tiny_runs import RECIPES, write_data
from weft.errors import ConfigError, DataError, RoleError
from weft.serve.models import EXAMPLES, ServedModel, load_models, renumbered


def test_names_are_those_of_folders_or_given(trained_run, tmp_path, monkeypatch):
    served = load_models([str(trained_run), f"mine={trained_run / 'best'}"], "cpu", False, "fp32")
    assert list(served) == ["run", "mine"]
    with pytest.raises(ConfigError, match="two models are called 'run'"):
        load_models([str(trained_run), str(trained_run / "last")], "cpu", False, "fp32")
    odd = tmp_path / "a=b c"
    odd.symlink_to(trained_run)
    assert list(load_models([str(odd)], "cpu", False, "fp32")) == ["run"]  # a path that exists is no NAME=PATH


def test_an_error_has_the_number_of_its_own_request():
    assert str(renumbered(DataError("example 7: too long"), 2)) == "example 2: too long"
    assert str(renumbered(DataError("too long"), 2, "text")) == "text 2: too long"
    error = RoleError("model: no")
    assert renumbered(error, 2) is error


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Return a function that trains a recipe for a step and returns it as a served model."""
    folder = tmp_path_factory.mktemp("models")
    write_data(folder)

    def train(name, *changes):
        data = folder / RECIPES[name]["data"]["train"]
        changes = [f"data.train={data}", f"data.valid={data}", "train.steps=1", *changes]
        return ServedModel(name, weft.train(RECIPES[name], changes, folder / name.replace(" ", "-")))

    return train


def test_attention_is_offered_where_there_is_some(classifier, reverser, train):
    assert "attention" in ServedModel("classify", classifier).methods
    assert "attention" in ServedModel("reverse", reverser).methods
    assert train("cnn classify").methods == ["predict", "embed"]


def test_fields_that_an_example_needs(classifier, train):
    assert ServedModel("classify", classifier).required_fields == ["text"]  # no pair, as it was trained
    assert train("bert span").required_fields == ["question", "passage"]
    assert train("rnn (lstm) tag").required_fields == []  # words or a text


def test_inputs_to_try_are_those_of_the_name_or_else_of_the_task(reverser):
    assert ServedModel("translator-en-fr", reverser).describe()["examples"] == EXAMPLES["translator-en-fr"]
    assert ServedModel("mine", reverser).describe()["examples"] == EXAMPLES["translate"]
