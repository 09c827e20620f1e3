"""YAML 1.2: its scalars, what is written read back the same, and mistakes that name their line."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from weft.config.yaml import read_yaml, write_yaml
from weft.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-5", 3e-5),
        ("1e3", 1000.0),
        ("-1.5E+2", -150.0),
        (".5", 0.5),
        ("017", 17),
        ("0x1F", 31),
        ("0o17", 15),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("1_000", "1_000"),
        ("2001-01-01", "2001-01-01"),
        ("true", True),
        ("~", None),
        ("", None),
        ("'3e-5'", "3e-5"),
    ],
)
def test_yaml_scalars_are_those_of_yaml_1_2(text, value):
    read = read_yaml(f"key: {text}", "place")["key"]
    assert read == value
    assert type(read) is type(value)


def test_the_standard_loader_would_misread_them():
    assert yaml.safe_load("key: no")["key"] is False
    assert yaml.safe_load("key: 3e-5")["key"] == "3e-5"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), plain, max_size=4))
def test_what_is_written_is_read_back(raw):
    assert read_yaml(write_yaml(raw), "place") == raw


@given(st.sampled_from(["no", "3e-5", "12:30", "0o7", "null", "1.", "~", "<<", "=", "2001-01-01"]))
def test_strings_that_look_like_other_things_stay_strings(text):
    assert read_yaml(write_yaml({"key": text}), "place") == {"key": text}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "recipe.yaml:2: not valid YAML: the key 'a' is given twice"),
        ("a: [1\nb: 2", "recipe.yaml:2"),
        ("a: !!python/object/apply:os.system [ls]", "recipe.yaml:1: not valid YAML: could not determine a constructor"),
        ("\x01", "recipe.yaml: not valid YAML"),
    ],
)
def test_bad_yaml_names_its_line(text, message):
    with pytest.raises(ConfigError, match=".") as error:
        read_yaml(text, "recipe.yaml")
    assert message in str(error.value)


def test_yaml_merges_keys():
    text = "base: &base {width: 8, layers: 2}\nmodel: {<<: *base, layers: 3}"
    assert read_yaml(text, "place")["model"] == {"width": 8, "layers": 3}
