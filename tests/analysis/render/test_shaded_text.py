import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.analysis.render import page, shaded_text
from weft.analysis.render.shaded_text import SHADES


def shades(pieces, top=4.0):
    html = shaded_text.shaded_text(pieces, "t", "", top)
    return [int(shade or 0) for shade in re.findall(r'<span(?: class="b(\d)")? data-value', html)]


def test_a_shade_is_the_value_per_character():
    assert shades([("a", 4.0), ("abcd", 16.0), ("abcd", 4.0), ("a", 0.0), ("a", 400.0)]) == [9, 9, 2, 0, 9]


def test_the_end_of_a_text_is_seen():
    html = shaded_text.shaded_text([("", 1.0)], "t", "", 2.0)
    assert ">∎</span>" in html


@pytest.mark.parametrize(("value", "written"), [(1.234, "1.23 bits"), (math.inf, "∞ bits"), (1e9, "1e+09 bits")])
def test_values_are_beside_the_pieces(value, written):
    assert f'data-value="{written}"' in shaded_text.shaded_text([("a", value)], "t", "", 1.0)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.floats(), min_size=2, max_size=8))
def test_more_surprise_is_never_paler(values):
    ordered = sorted(value for value in values if not math.isnan(value))
    found = shades([("a", value) for value in ordered])
    assert found == sorted(found)
    assert all(0 <= shade <= SHADES for shade in found)


def test_every_shade_has_a_style():
    assert re.findall(r"\.b(\d) \{", page.STYLE) == [str(shade) for shade in range(1, SHADES + 1)]
    assert shaded_text.scale(2.0).count("<span class=") == SHADES + 1
