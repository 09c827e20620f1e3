import itertools
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.analysis.render import charts, page
from weft.analysis.render.charts import line_chart
from weft.analysis.render.heatmaps import alignment

quick = settings(deadline=None, derandomize=True, max_examples=30)
BAD = [math.nan, math.inf, -math.inf, 1e300]
FALLING = [(float(step), 5 * math.exp(-step / 100) + 0.3) for step in range(0, 1000, 10)]


def data_of(html: str) -> dict:
    return json.loads(re.search(r"<script[^>]*>(.*?)</script>", html, re.DOTALL)[1])


def paths(html: str) -> list[list[tuple[float, float]]]:
    """The points of every drawn line."""
    found = re.findall(r'<title>[^<]*</title><path class="line" d="M([^"]*)"', html)
    return [[tuple(map(float, pair.split())) for pair in path.split("L")] for path in found]


# --- lines


def test_a_line_falls_where_its_values_fall() -> None:
    (path,) = paths(line_chart({"a": FALLING}, "step", "loss"))
    assert len(path) == len(FALLING)
    assert [x for x, _ in path] == sorted(x for x, _ in path)
    assert [y for _, y in path] == sorted(y for _, y in path)  # downwards in a drawing is a larger y
    (rising,) = paths(line_chart({"a": [(x, -y) for x, y in FALLING]}, "step", "loss"))
    assert [y for _, y in rising] != sorted(y for _, y in rising)


@quick
@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=30), st.booleans(), st.booleans())
def test_any_points_draw_inside_the_frame(points: list[tuple[float, float]], log_y: bool, percent: bool) -> None:
    html = line_chart({"a": points, "b": [(1.0, 1.0)]}, "x", "y", log_y=log_y, percent=percent)
    for path in paths(html):
        assert all(0 <= x <= 640.1 and 31.9 <= y <= 282.1 for x, y in path)
    assert "nan" not in html
    assert "inf" not in html


@pytest.mark.parametrize("bad", BAD)
def test_points_that_cannot_be_drawn_are_left_out(bad: float) -> None:
    clean = line_chart({"a": FALLING}, "step", "loss")
    assert line_chart({"a": [*FALLING, (5.0, bad), (bad, 1.0)]}, "step", "loss") == clean
    assert line_chart({"a": [*FALLING, (5.0, 1.0)]}, "step", "loss") != clean


def test_a_logarithmic_chart_leaves_out_what_has_no_logarithm() -> None:
    zeros = [*FALLING, (5.0, 0.0), (6.0, -1.0)]
    assert line_chart({"a": zeros}, "s", "l", log_y=True) == line_chart({"a": FALLING}, "s", "l", log_y=True)
    assert line_chart({"a": zeros}, "s", "l") != line_chart({"a": FALLING}, "s", "l")


@pytest.mark.parametrize("series", [{}, {"a": []}, {"a": [(math.nan, 1.0)]}])
def test_nothing_to_draw_is_said(series: dict) -> None:
    assert "Nothing to draw" in line_chart(series, "step", "loss")


def test_an_empty_series_beside_a_full_one_is_named() -> None:
    html = line_chart({"full": FALLING, "empty": []}, "step", "loss")
    assert "empty (no data)" in html
    assert "full (no data)" not in html
    assert len(paths(html)) == 1


def test_a_chart_of_many_points_is_small_and_keeps_the_spike() -> None:
    points = [(float(i), math.sin(i / 5000)) for i in range(100_000)]
    points[51_237] = (51_237.0, 9.0)
    html = line_chart({"a": points}, "step", "loss")
    values = [label for *_, label in data_of(html)["series"][0]["points"]]
    assert len(html) < 150_000
    assert "9" in values
    every = points[:: len(points) // len(values)]
    assert 9.0 not in [y for _, y in every]  # what taking every n-th point would have lost
    assert data_of(html)["stops"][-1][1] == "step 99,999"


def names_at_the_ends(html: str) -> list[float]:
    return sorted(float(y) for y in re.findall(r'<g class="end [^>]*>.*?<text x="658" y="([\d.]+)"', html))


@quick
@given(st.lists(st.floats(0, 1), min_size=1, max_size=15))
def test_names_at_the_ends_of_lines_never_touch(ends: list[float]) -> None:
    html = line_chart({f"run {i}": [(0.0, 0.5), (1.0, end)] for i, end in enumerate(ends)}, "x", "y")
    heights = names_at_the_ends(html)
    assert len(heights) == len(ends)
    assert all(after - before >= 15.9 for before, after in itertools.pairwise(heights))
    assert heights[-1] <= 282


def test_names_would_touch_if_they_stood_at_the_lines() -> None:
    html = line_chart({"a": [(0, 0), (1, 0.5)], "b": [(0, 1), (1, 0.501)]}, "x", "y")
    ends = [path[-1][1] for path in paths(html)]
    assert abs(ends[0] - ends[1]) < 15.9
    assert abs(np.subtract(*names_at_the_ends(html))) >= 15.9


def test_too_many_lines_get_a_key_instead_and_differ_by_dashes() -> None:
    html = line_chart({f"run {i}": [(0, i), (1, i)] for i in range(18)}, "x", "y")
    assert 'class="labelled"' not in html
    assert 'class="end' not in html
    styles = re.findall(r'<g class="(s\d)"><title>[^<]*</title><path class="line" d="[^"]*"([^/]*)/>', html)
    assert len(set(styles)) == 18


def test_hovering_reads_the_values() -> None:
    html = line_chart({"a": [(0, 0.5), (1200, 0.931)]}, "step", "exact match", percent=True)
    assert data_of(html)["stops"][-1][1] == "step 1,200"
    assert data_of(html)["series"][0]["points"][-1][2] == "93.1%"
    assert data_of(line_chart({"a": [(0, 0.931)]}, "step", "loss"))["series"][0]["points"][0][2] == "0.931"


def test_a_place_along_the_axis_may_have_a_name() -> None:
    html = line_chart({"a": [(0, 1.0), (1, 0.5)]}, "steps back", "gradient", stops={1: "␣the"})
    assert [label for _, label in data_of(html)["stops"]] == ["steps back 0", "steps back 1: ␣the"]


@pytest.mark.parametrize(
    "html",
    [
        line_chart({"a": FALLING}, "step", "loss", title="Loss & more"),
        alignment(np.eye(2), ["a", "b"], ["c", "d"], title="Loss & more"),
    ],
)
def test_a_chart_can_be_heard_and_reached(html: str) -> None:
    assert 'role="img" aria-label="Loss &amp; more"><title>Loss &amp; more</title><desc>' in html
    assert 'tabindex="0" role="group" aria-label="Loss &amp; more: arrow keys' in html
    assert '<div class="tip" role="status"></div>' in html


def test_a_chart_tells_in_words_where_each_line_goes() -> None:
    html = line_chart({"rnn": [(0, 5.0), (900, 1.25)]}, "step", "loss")
    assert "<desc>rnn: loss from 5 at step 0 to 1.25 at step 900</desc>" in html


# --- colours

# How one sees without the long, middle or short cones: Machado, Oliveira and Fernandes (2009), severity 1.
EYES = {
    "all cones": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str) -> np.ndarray:
    share = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ light.clip(0.0005, 1) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def apart(colours: list[str]) -> float:
    """The smallest difference between two of the colours, to any of the eyes."""
    seen = ([lab(np.array(eye) @ linear(colour)) for colour in colours] for eye in EYES.values())
    return min(float(np.linalg.norm(a - b)) for some in seen for a, b in itertools.combinations(some, 2))


def contrast(a: str, b: str) -> float:
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


def test_the_measures_of_colour_catch_poor_ones() -> None:
    assert apart(["#d62728", "#2ca02c"]) < 14  # the common red and green
    assert contrast("#e69f00", "#ffffff") < 3


@pytest.mark.parametrize("mode", [0, 1])
def test_colours_can_be_told_apart_by_all_and_seen_on_their_page(mode: int) -> None:
    style = page.STYLE.split("@media screen and (prefers-color-scheme: dark)")[mode]
    colour = dict(re.findall(r"(--[a-z0-9]+): (#[0-9a-f]{6})", style))
    series = [colour[f"--s{i}"] for i in range(5)]
    assert apart(series) >= 14
    assert min(contrast(one, colour["--paper"]) for one in series) >= 3
    assert contrast(colour["--ink"], colour["--paper"]) >= 7
    assert contrast(colour["--quiet"], colour["--paper"]) >= 4.5
    assert contrast(colour["--heat"], colour["--panel"]) >= 7


def test_the_style_has_as_many_colours_as_the_charts_use() -> None:
    assert re.findall(r"\.(s\d) \{ --hue", page.STYLE) == [f"s{i}" for i in range(charts.HUES)]


def test_a_series_keeps_its_look_whatever_is_beside_it() -> None:
    alone = line_chart({"b": [(0, 1), (1, 2)]}, "x", "y", numbers={"a": 0, "b": 6})
    assert '<g class="s1"><title>b</title>' in alone
    assert 'stroke-dasharray="7 5"' in alone


def test_a_band_is_shaded_between_the_lowest_and_the_highest() -> None:
    points, band = [(0, 2.0), (1, 3.0)], [(0, 1.0, 3.0), (1, 2.0, 4.0), (2, math.nan, 9.0)]
    made = line_chart({"a": points}, "x", "y", bands={"a": band, "other": [(0, -900.0, 900.0)]})
    path = re.search(r'class="spread s0" d="M([^"]+)z"', made)[1]
    corners = [tuple(map(float, corner.split())) for corner in path.split("L")]
    assert [x for x, _ in corners] == [corners[0][0], 640, 640, corners[0][0]]
    heights = [y for _, y in corners]
    assert heights[1] < heights[0] < heights[3]
    assert heights[1] < heights[2]
    assert "900" not in made


def test_groups_name_the_ticks_and_every_point_is_marked() -> None:
    made = line_chart({"a": [(0, 1.0), (1, 2.0), (2, 1.5)]}, "words", "y", groups=["1–5", "6–9", "10–48"])
    assert [label for label in re.findall(r">([^<]+)</text>", made) if "–" in label] == ["1–5", "6–9", "10–48"]
    assert made.count('class="dot"') == 3 + 1  # and the cursor's
    assert '"words 6\\u20139"' in made


def test_a_logarithmic_x_axis_leaves_out_zero() -> None:
    (path,) = paths(line_chart({"a": [(0, 1.0), (1, 1.0), (10, 2.0), (100, 3.0)]}, "x", "y", log_x=True))
    xs = [x for x, _ in path]
    assert len(xs) == 3
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
