import base64
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from weft.analysis.render.heatmaps import alignment, alignments
from weft.errors import DataError

quick = settings(deadline=None, derandomize=True, max_examples=30)
TWELVE = [(layer, head) for layer in range(12) for head in range(12)]


def data_of(html: str) -> dict:
    return json.loads(re.search(r"<script[^>]*>(.*?)</script>", html, re.DOTALL)[1])


def carried(html: str) -> np.ndarray:
    """The weights of every map, as the page's script gets them."""
    data = data_of(html)
    shape = len(data["maps"]), len(data["target"]), len(data["source"])
    return np.frombuffer(base64.b64decode(data["weights"]), "<f2").reshape(shape)


def tiles(html: str) -> dict[tuple[int, int], float]:
    """The opacity of every drawn cell, by row and column."""
    data, shades = data_of(html), {}
    for opacity, path in re.findall(r'class="heat" fill-opacity="([^"]+)" d="([^"]+)"', html):
        for x, y in re.findall(r"M(\d+) (\d+)", path):
            shades[(int(y) - data["top"]) // data["cell"], (int(x) - data["left"]) // data["cell"]] = float(opacity)
    return shades


def test_the_darkest_cell_of_a_row_is_its_strongest_source() -> None:
    weights = np.array([[0.1, 0.8, 0.1], [0.7, 0.2, 0.1]])
    shades = tiles(alignment(weights, ["a", "b", "c"], ["x", "y"]))
    drawn = np.array([[shades[row, column] for column in range(3)] for row in range(2)])
    assert np.allclose(drawn, weights / 0.8, atol=0.011)
    assert not np.allclose(drawn, np.roll(weights, 1, axis=1) / 0.8, atol=0.011)


def test_a_map_reads_out_what_it_draws() -> None:
    html = alignment(np.array([[0.93, 0.07]]), ["house", " "], ["maison"])
    data = data_of(html)
    assert (data["target"], data["source"], data["maps"]) == (["maison"], ["house", "␣"], [[0, 0]])
    np.testing.assert_allclose(carried(html), [[[0.93, 0.07]]], rtol=1e-3)
    assert html.count("data-mark") == 3  # row, column and cell
    assert html.count("data-label") == 3


@pytest.mark.parametrize("shape", [(2, 3), (3,), (3, 2, 1)])
def test_weights_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"must be \(target, source\), here \(3, 2\): got"):
        alignment(np.zeros(shape), ["a", "b"], ["x", "y", "z"])


@pytest.mark.parametrize(("source", "target"), [([], []), (["a"], []), ([], ["x"])])
def test_no_tokens_is_said(source: list[str], target: list[str]) -> None:
    assert "Nothing to align" in alignment(np.zeros((len(target), len(source))), source, target)


def test_weights_that_are_no_weights_are_not_drawn() -> None:
    html = alignment(np.array([[math.nan, 0.5], [-3.0, math.inf]]), ["a", "b"], ["x", "y"])
    assert tiles(html) == {(0, 1): 1.0}
    np.testing.assert_array_equal(carried(html), [[[math.nan, 0.5], [-3.0, math.nan]]])
    assert tiles(alignment(np.zeros((1, 1)), ["a"], ["x"])) == {}


def test_a_small_map_is_a_table_to_a_screen_reader_and_a_large_one_a_list() -> None:
    small = alignment(np.eye(2), ["a", "b"], ["x", "y"])
    assert '<th scope="row">x</th><td class="weight">1.000</td><td class="weight">0.000</td>' in small
    large = alignment(np.eye(60), [f"s{i}" for i in range(60)], [f"t{i}" for i in range(60)])
    assert "<table>" not in large
    assert "<li>t7 ← s7 1.000</li>" in large


def test_cells_adapt_to_the_number_of_tokens() -> None:
    def cell(count: int) -> int:
        return data_of(alignment(np.eye(count), ["a"] * count, ["b"] * count))["cell"]

    assert cell(5) > cell(25) > cell(60) >= 13


def test_a_short_text_uses_the_pages_width_and_is_seen_whole() -> None:
    def size(rows: int, columns: int) -> tuple[int, int]:
        data = data_of(alignment(np.ones((rows, columns)), ["a"] * columns, ["b"] * rows))
        return data["cell"] * columns, data["cell"] * rows

    assert size(3, 5)[0] > 500
    for rows, columns in ((3, 5), (6, 5), (5, 2), (2, 2)):
        assert size(rows, columns)[1] <= 340
    assert size(12, 3)[1] == 12 * 42  # a tall map has cells as before, and scrolls


def test_labels_turn_only_where_they_are_wider_than_a_cell() -> None:
    assert "rotate(0)" in alignment(np.eye(3), list("abc"), list("abc"))
    assert "rotate(-45)" in alignment(np.eye(9), [*"abcdefgh", "agreement"], list("abcdefghi"))
    assert "rotate(-90)" in alignment(np.eye(60), ["agreement"] * 60, ["a"] * 60)


def test_a_large_map_is_a_small_file() -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(60), 60)
    assert len(alignment(weights, ["agreement"] * 60, ["accord"] * 60)) < 120_000


def test_a_long_token_is_clipped_in_the_drawing_only() -> None:
    html = alignment(np.eye(1), ["x" * 500], ["y"])
    assert f">{'x' * 17}…</text>" in html
    assert data_of(html)["source"] == ["x" * 500]


# --- several maps


def test_one_map_offers_no_choice_and_several_do() -> None:
    assert 'class="choice"' not in alignment(np.eye(2), ["a", "b"], ["x", "y"])
    html = alignments(np.stack([np.eye(2), np.ones((2, 2))]), [(0, 0), (0, 3)], ["a", "b"], ["x", "y"], "self")
    assert html.count('<div class="choice"></div>') == 1
    assert data_of(html)["maps"] == [[0, 0], [0, 3]]


def test_the_first_of_several_is_drawn_and_all_travel() -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(3), (4, 2))
    html = alignments(weights, [(0, 0), (0, 1), (1, 0), (1, 1)], ["a", "b", "c"], ["x", "y"], "cross")
    np.testing.assert_allclose(carried(html), weights, atol=3e-4)
    assert tiles(html) == tiles(alignment(weights[0], ["a", "b", "c"], ["x", "y"]))
    assert tiles(html) != tiles(alignment(weights[1], ["a", "b", "c"], ["x", "y"]))


def test_every_head_of_a_large_model_is_a_small_file() -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(60), (144, 60))
    html = alignments(weights, TWELVE, ["agreement"] * 60, ["accord"] * 60, "encoder")
    assert len(html) < 1_600_000
    assert len(json.dumps(weights.round(4).tolist())) > 2 * len(html)


@quick
@given(arrays.arrays(np.float64, (2, 2, 3), elements=st.floats(allow_nan=True, allow_infinity=True)))
def test_any_numbers_draw(weights: np.ndarray) -> None:
    html = alignments(weights, [(0, 0), (0, 1)], ["a", "b", "c"], ["x", "y"], "odd")
    assert all(0 < shade <= 1 for shade in tiles(html).values())
    assert not np.isinf(carried(html)).any()


def test_as_many_places_as_maps() -> None:
    with pytest.raises(DataError, match="alignment weights must be"):
        alignments(np.ones((2, 1, 1)), [(0, 0)], ["a"], ["x"], "t")


def test_words_stay_in_sight_on_the_ground_of_the_page() -> None:
    html = alignment(np.eye(2), ["a", "b"], ["x", "y"])
    assert re.findall(r'<g data-stick="(\w+)"><rect class="shade"', html) == ["y", "x", "xy"]
