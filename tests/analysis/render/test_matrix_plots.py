"""Numbers of either sign as heat maps: what the page's script is given, and where the colours end."""

import base64
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from weft.analysis.render.matrix_plots import MatrixPlot

quick = settings(deadline=None, derandomize=True, max_examples=30)


def grid(values):
    return MatrixPlot("numbers", np.asarray(values, dtype=np.float64), "row", "column")


def data_of(html):
    return json.loads(re.search(r"<script[^>]*>(.*?)</script>", html, re.DOTALL)[1])


def carried(html):
    data = data_of(html)
    return np.frombuffer(base64.b64decode(data["values"]), "<f2").reshape(data["shape"])


def test_the_numbers_travel_beside_a_canvas_of_as_many_cells():
    html = grid([[1.0, -0.5, 0.25], [0.0, 2.0, -4.0]]).html()
    np.testing.assert_array_equal(carried(html), [[1.0, -0.5, 0.25], [0.0, 2.0, -4.0]])
    assert '<canvas width="3" height="2">' in html
    assert html.count("data-mark") == 2
    assert "2 rows, each a row, by 3 columns, each a column, from −4 to 4" in html


@pytest.mark.parametrize(
    ("values", "ends", "signed"),
    [
        ([[1, -0.5]], (-1, 1), True),
        ([[-3, -2]], (-3, 3), True),
        ([[3, 2]], (2, 3), False),
        ([[0, 2]], (0, 2), False),
        ([[2, 2]], (-2, 2), True),
        ([[0, 0]], (-1, 1), True),
        ([[np.nan, 2, 1]], (1, 2), False),
        ([[np.nan, np.inf]], (-1, 1), True),
    ],
)
def test_where_the_colours_end(values, ends, signed):
    assert grid(values).limits == ends
    assert ('<figure class="signed">' in grid(values).html()) == signed


def test_it_is_neither_flat_nor_tall():
    assert grid(np.zeros((100, 100))).aspect == 1
    assert 0.4 < grid(np.zeros((3, 500))).aspect < 0.5
    assert grid(np.zeros((500, 3))).aspect == 1
    assert data_of(grid(np.zeros((500, 3))).html())["cell"] == [200, 1.2]


def test_rows_and_columns_are_numbered_from_nought():
    html = grid(np.zeros((11, 31))).html()
    assert re.findall(r'text-anchor="end">(\d+)<', html) == ["0", "2", "4", "6", "8", "10"]
    assert re.findall(r'text-anchor="middle">(\d+)<', html) == ["0", "10", "20", "30"]
    assert re.findall(r'text-anchor="\w+">([\d.]+)<', grid(np.zeros((1, 3))).html()) == ["0", "0", "1", "2"]


@quick
@given(arrays.arrays(np.float64, (2, 3), elements=st.floats(allow_nan=True, allow_infinity=True)))
def test_any_numbers_draw(values):
    assert carried(grid(values).html()).shape == (2, 3)
    low, high = grid(values).limits
    assert low < high
    assert np.isfinite([low, high]).all()
