"""Recipes by name or path: what ships with weft, and a suggestion where there is none."""

import pytest

from weft.config.recipes import read_recipe, recipe_names
from weft.config.run import Run
from weft.errors import ConfigError


def standing_alone(raw):
    """Say of a recipe that starts from other weights what it would take from them."""
    if "weights" in raw["model"]:
        raw |= {"model": {"preset": "bert-tiny"}, "tokenizer": {"name": "wordpiece"}}
    return raw


def test_every_shipped_recipe_parses():
    assert "dates" in recipe_names()
    for name in recipe_names():
        raw = read_recipe(name)
        assert ("compare" in raw) == name.startswith("compare-")
        raw.pop("compare", None)
        Run.parse(standing_alone(raw))


def test_variants_are_for_a_comparison():
    with pytest.raises(ConfigError, match="compare: lists variants of a recipe, which weft compare trains"):
        Run.parse(read_recipe("compare-dates"))


def test_a_missing_recipe_gets_a_suggestion(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'dates'"):
        read_recipe("datse")
    (tmp_path / "mine.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"did you mean '.*/mine\.yaml'\?"):
        read_recipe(tmp_path / "mien.yaml")
    with pytest.raises(ConfigError, match=r"did you mean 'dates'\?"):
        read_recipe("dates.yaml")
    for far in (tmp_path / "zzz.yaml", tmp_path / "gone" / "zzz.yaml", "zzzz"):
        with pytest.raises(ConfigError, match="neither a file nor a recipe that ships with weft; weft models lists"):
            read_recipe(far)
    with pytest.raises(ConfigError, match="cannot be read as a recipe"):
        read_recipe(tmp_path)
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="must be a mapping"):
        read_recipe(tmp_path / "list.yaml")


@pytest.mark.parametrize("name", ["a\0b", "n" * 5000])
def test_what_is_no_path_is_no_recipe(name):
    with pytest.raises(ConfigError, match="cannot be read as a recipe"):
        read_recipe(name)
