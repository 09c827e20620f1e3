"""Dotted overrides: they reach into a recipe, are typed, and leave what was given as it is."""

import pytest

from weft.config.overrides import apply_override
from weft.config.recipes import read_recipe
from weft.config.run import Run
from weft.errors import ConfigError

RECIPE = {
    "task": {"name": "translate"},
    "data": {"sample": "dates"},
    "tokenizer": {"name": "characters"},
    "model": {"name": "seq2seq", "width": 16},
    "train": {"steps": 10},
}


def test_overrides_reach_in_and_are_typed():
    run = Run.parse(
        read_recipe(RECIPE, ["train.lr=3e-5", "model.layers=3", "train.betas=[0.9, 0.98]", "task.decode.beam=4"])
    )
    assert (run.train.lr, run.model.layers, run.train.betas, run.task.decode.beam) == (3e-5, 3, (0.9, 0.98), 4)
    assert "layers" not in RECIPE["model"], "the recipe that was given must not change"


@pytest.mark.parametrize(
    "overrides",
    [
        "train.lr=3e-5",
        ["train.lr=3e-5"],
        {"train.lr": 3e-5},
        {"train": {"lr": 3e-5}},
    ],
)
def test_overrides_are_strings_or_a_mapping(overrides):
    raw = read_recipe(RECIPE, overrides)
    assert raw == {**RECIPE, "train": {"steps": 10, "lr": 3e-5}}
    assert "lr" not in RECIPE["train"]


def test_a_dotted_key_replaces_and_nested_mappings_merge():
    recipe = {**RECIPE, "data": {"train": "a.tsv", "columns": {"text": 0}}}
    merged = read_recipe(recipe, {"data": {"columns": {"target": 1}}, "task": {"decode": {"beam": 2}}})
    assert merged["data"] == {"train": "a.tsv", "columns": {"text": 0, "target": 1}}
    assert merged["task"] == {"name": "translate", "decode": {"beam": 2}}
    assert read_recipe(recipe, {"data.columns": {"target": 1}})["data"]["columns"] == {"target": 1}
    pruned = {"cross.3": [1, 5]}
    assert read_recipe(recipe, {"model": {"pruned_heads": pruned}})["model"]["pruned_heads"] == pruned
    assert recipe["data"]["columns"] == {"text": 0}


def test_a_path_is_a_value(tmp_path):
    assert read_recipe(RECIPE, {"data": {"train": tmp_path}})["data"]["train"] == str(tmp_path)


def test_apply_override_makes_sections():
    raw = {}
    apply_override(raw, "a.b.c=1")
    assert raw == {"a": {"b": {"c": 1}}}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (None, r"overrides: must be a list, such as \['train.lr=3e-5'\], or a mapping, .*but is None instead"),
        (3, "overrides: must be a list, .*but is 3 instead"),
        ("train.lr", "'train.lr': an override is key=value"),
        ({3: 1}, "overrides: 3: a key is dotted, such as 'train.lr'"),
        ({"train..lr": 1}, "overrides: 'train..lr': a key is dotted"),
        ({"train.steps.x": 1}, "'train.steps.x': train.steps is 10, which has no keys"),
        ([3], "3: an override is key=value"),
        ([None], "None: an override is key=value"),
    ],
)
def test_overrides_of_another_type_are_named(overrides, message):
    with pytest.raises(ConfigError, match=message):
        read_recipe(RECIPE, overrides)
