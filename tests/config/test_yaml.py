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


def doubled(levels, merge):
    """Return YAML in which each line names the one before twice: it stands for 2 ** levels values."""
    pair = "{{<<: [*a{0}, *a{0}]}}" if merge else "[*a{0}, *a{0}]"
    first = "{x: 1}" if merge else "[x]"
    lines = [f"a0: &a0 {first}"] + [f"a{n}: &a{n} {pair.format(n - 1)}" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize("merge", [False, True])
def test_what_aliases_stand_for_is_bounded(merge):
    assert len(read_yaml(doubled(10, merge), "place")) == 10
    with pytest.raises(ConfigError, match=r"^place:\d+: not valid YAML: its aliases stand for more than 10,000 values"):
        read_yaml(doubled(60, merge), "place")


def test_values_that_are_written_out_are_not_bounded_by_that():
    text = "labels: &all [" + ", ".join(map(str, range(20_000))) + "]"
    assert len(read_yaml(text, "place")["labels"]) == 20_000
    with pytest.raises(ConfigError, match="its aliases stand for more than"):
        read_yaml(f"{text}\nother: *all", "place")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [1, *a]", "the alias *a is inside its own anchor"),
        ("a: &a {b: [*a]}", "the alias *a is inside its own anchor"),
        ("a: *b", "found undefined alias"),
        ("[" * 65 + "]" * 65, "it is nested too deeply: more than 64 levels"),
        ("[" * 1_000_000, "it is nested too deeply: more than 64 levels"),
        ("{a: " * 65 + "1" + "}" * 65, "it is nested too deeply: more than 64 levels"),
        ("a: " + "9" * 5000, "an integer has at most 64 digits, but got 5,000"),
        ("a: 0x" + "f" * 5000, "an integer has at most 64 digits, but got 5,002"),
        ("a: !!bool x", "must be of type bool, but is 'x' instead"),
        ("a: !!int x", "must be of type int, but is 'x' instead"),
        ("a: !!float x", "must be of type float, but is 'x' instead"),
        ("a: !!null x", "must be of type null, but is 'x' instead"),
        ("a: !!int {a: 1}", "expected a scalar node, but found mapping"),
        ("a: !!map [1]", "expected a mapping node, but found sequence"),
        ("a: !!timestamp x", "could not determine a constructor"),
        ("a: !!binary x", "could not determine a constructor"),
        ("a: !!set {x}", "could not determine a constructor"),
        ("? [a]\n: 1", "found unhashable key"),
        ("a: '\ud800'", "surrogates not allowed"),
    ],
)
def test_what_is_too_large_or_of_a_wrong_type_is_an_error_of_one_line(text, message):
    with pytest.raises(ConfigError, match="^place:") as error:
        read_yaml(text, "place")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_just_within_the_bounds_is_read():
    assert read_yaml("[" * 64 + "]" * 64, "place")
    assert read_yaml("a: " + "9" * 64, "place") == {"a": int("9" * 64)}
    assert read_yaml("a: !!int 3\nb: !!str 3\nc: &c 1\nd: [*c, *c]", "p") == {"a": 3, "b": "3", "c": 1, "d": [1, 1]}
