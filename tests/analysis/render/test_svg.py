import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.analysis.render.svg import encode_data, symbols_note, visible

quick = settings(deadline=None, derandomize=True, max_examples=30)


@pytest.mark.parametrize(
    ("token", "shown"),
    [(" ", "␣"), ("\n", "⏎"), ("\t", "⇥"), (" the", "␣the"), ("", "∅"), ("\u00a0", "␣"), ("\u202e", "‹202E›")],
)
def test_what_has_no_shape_gets_a_mark(token: str, shown: str) -> None:
    assert visible(token) == shown


@quick
@given(st.text())
def test_every_token_shows(token: str) -> None:
    shown = visible(token)
    assert shown
    assert not any(char.isspace() or unicodedata.category(char) in ("Cc", "Cs") for char in shown)


def test_joined_letters_stay_joined() -> None:
    assert visible("می‌خواهم") == "می‌خواهم"


@quick
@given(st.dictionaries(st.text(), st.text("</>!-&script\u2028\u2029") | st.floats(-1e6, 1e6)))
def test_data_comes_back_and_cannot_end_its_script(value: dict) -> None:
    text = encode_data(value)
    assert json.loads(text) == value
    assert text.isascii()
    assert not set("<>&") & set(text)


def test_plain_json_could_end_its_script() -> None:
    assert "</script>" in json.dumps("</script>")
    assert "\u2028" in json.dumps("\u2028", ensure_ascii=False)


def test_the_symbols_that_are_shown_are_explained():
    assert symbols_note(["the", " cat", "\n"]) == " In the tokens, ␣ is a space, ⏎ is the end of a line."
    assert symbols_note(["", "\t"]) == " In the tokens, ⇥ is a tab, ∅ is an empty token."
    assert symbols_note(["the", "cat"]) == ""
