import json
import math
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.analysis.render.scatter import ScatterPoint, _Mark, _names, _overlap, scatter_chart

quick = settings(deadline=None, derandomize=True, max_examples=60)
THREE = {"a": ScatterPoint(1, 0.5), "b": ScatterPoint(10, 0.9, 0.05, 1), "c": ScatterPoint(100, 0.7, None, 5)}


def marks(chart):
    return re.findall(r'class="mark( hollow)?" d="([^"]+)" transform="translate\(([\d.]+) ([\d.]+)\)', chart)


def test_points_of_the_frontier_are_filled_and_joined():
    chart = scatter_chart(THREE, "cost", "quality", frontier=["a", "b"])
    hollow, _, x, y = zip(*marks(chart), strict=True)
    assert hollow == (" hollow", "", ""), "the frontier is drawn over the others"
    assert f'class="frontier" d="M{x[1]} {y[1]}H{x[2]}V{y[2]}H640"' in chart
    assert "On the frontier: a, b" in chart
    assert 'class="frontier"' not in scatter_chart(THREE, "cost", "quality")


def test_the_axis_of_cost_is_logarithmic():
    xs = [float(mark[2]) for mark in marks(scatter_chart(THREE, "cost", "quality"))]
    assert math.isclose(xs[1] - xs[0], xs[2] - xs[1], abs_tol=0.2)


def test_after_all_hues_the_next_shape():
    shapes = [mark[1] for mark in marks(scatter_chart(THREE, "cost", "quality"))]
    assert shapes[0] == shapes[1] != shapes[2]


def test_the_bar_is_as_high_as_twice_the_deviation():
    chart = scatter_chart(THREE, "cost", "quality")
    (low, high) = map(float, re.search(r'class="error" d="M[\d.]+ ([\d.]+)V([\d.]+)"', chart).groups())
    ys = [float(mark[3]) for mark in marks(chart)]
    assert math.isclose((low - high) / (ys[0] - ys[1]), 2 * 0.05 / 0.4, rel_tol=0.02)


def test_the_pointer_reads_value_and_cost():
    chart = scatter_chart(THREE, "cost", "quality", percent=True, write_x=lambda value: f"{value:g} s")
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', chart)[1])
    assert [series["points"][0][2] for series in data["series"]] == ["50.0% at 1 s", "90.0% at 10 s", "70.0% at 100 s"]
    assert [label for _, label in data["stops"]] == ["cost"] * 3


def test_what_cannot_be_drawn_is_left_out():
    chart = scatter_chart({"a": ScatterPoint(0, 1), "b": ScatterPoint(1, math.nan), "c": ScatterPoint(1, 1)}, "x", "y")
    assert len(marks(chart)) == 1
    assert "Nothing to draw." in scatter_chart({"a": ScatterPoint(-1, 1)}, "x", "y")


def boxes(points):
    """Where the names stand, from the drawing."""
    chart = scatter_chart(points, "x", "y")
    found = re.findall(r'<text x="([-\d.]+)" y="([-\d.]+)" dy=".35em" class="end" text-anchor="(\w+)">(\w+)<', chart)
    widths = [7.0 * len(name) for *_, name in found]
    starts = {"start": 0.0, "end": 1.0, "middle": 0.5}
    return [
        (float(x) - starts[anchor] * width, float(y) - 6, float(x) + (1 - starts[anchor]) * width, float(y) + 6)
        for (x, y, anchor, _), width in zip(found, widths, strict=True)
    ]


def covered(boxes):
    return any(_overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i])


@quick
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5))
def test_few_names_do_not_cover_each_other(places):
    assert not covered(boxes({f"n{i}": ScatterPoint(x, y) for i, (x, y) in enumerate(places)}))


def test_a_name_that_finds_no_place_beside_its_point_is_joined_to_it():
    crowd = {f"name{i}": ScatterPoint(5.1 + 0.02 * i, 9 + 0.1 * i, None, i) for i in range(7)}
    crowd |= {"small": ScatterPoint(4, 0), "large": ScatterPoint(9, 8)}
    assert not covered(boxes(crowd))
    assert 'class="lead"' in scatter_chart(crowd, "x", "y")
    assert 'class="lead"' not in scatter_chart(THREE, "x", "y")


def test_names_that_cover_each_other_are_caught():
    same = [(0.0, 0.0, 20.0, 12.0), (10.0, 6.0, 30.0, 18.0)]
    assert covered(same)
    assert not covered(same[:1])


def test_a_name_stays_off_the_frontier():
    mark = _Mark("name", ScatterPoint(1, 1), 100.0, 100.0, None, True)
    assert 'text-anchor="start"' in _names([mark], 40, [])
    assert 'text-anchor="end"' in _names([mark], 40, [(100.0, 100.0)])
