import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weft.analysis.render.axes import LIMIT, Axis, linear_axis, log_axis

quick = settings(deadline=None, derandomize=True)
reals = st.floats(-LIMIT, LIMIT, exclude_min=True, exclude_max=True)
positives = st.floats(1 / LIMIT, LIMIT, exclude_min=True, exclude_max=True)


def fault(axis: Axis, values: list[float]) -> str:
    """Name what is wrong with an even axis over `values`, if anything."""
    slack = 1e-6 * axis.step
    if not axis.low - slack <= min(values) <= max(values) <= axis.high + slack:
        return "does not cover the values"
    if not 2 <= len(axis.ticks) <= 12:
        return f"{len(axis.ticks)} ticks"
    if f"{axis.step:.6e}"[0] not in "125" or not f"{axis.step:.6e}".startswith(f"{axis.step:.0e}"[0] + ".000000"):
        return f"a step of {axis.step}"
    if len({axis.tick_label(tick) for tick in axis.ticks}) < len(axis.ticks):
        return "two ticks read alike"
    return ""


@quick
@given(st.lists(reals, min_size=1, max_size=5))
def test_even_ticks_are_few_round_distinct_and_cover(values: list[float]) -> None:
    assert fault(linear_axis(values), values) == ""


@quick
@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_even_ticks_suit_a_short_range_far_from_zero(low: float, span: float) -> None:
    assume(span > 1e-8 * abs(low))
    assert fault(linear_axis([low, low + span]), [low, low + span]) == ""


def test_a_poor_axis_is_caught() -> None:
    values = [0.0, 0.93]
    fifths = [k * 0.93 / 5 for k in range(6)]
    assert "step" in fault(Axis(0.0, 0.93, fifths, 0.93 / 5), values)
    assert "cover" in fault(Axis(0.0, 0.9, [0.0, 0.5], 0.5), values)
    assert "ticks" in fault(Axis(0.0, 1.0, [k / 100 for k in range(101)], 0.01), values)


@quick
@given(st.lists(positives, min_size=1, max_size=5))
def test_logarithmic_ticks_are_few_positive_distinct_and_cover(values: list[float]) -> None:
    axis = log_axis(values)
    assert 0 < axis.low <= min(values) * 1.000001
    assert axis.high >= max(values) * 0.999999
    assert axis.low < axis.high
    assert 2 <= len(axis.ticks) <= 13
    assert len({axis.tick_label(tick) for tick in axis.ticks}) == len(axis.ticks)


@pytest.mark.parametrize("build", [linear_axis, log_axis])
@quick
@given(values=st.lists(st.floats(0.001, 1e6), min_size=2, max_size=20))
def test_values_are_placed_in_order_within_the_axis(build, values: list[float]) -> None:
    axis = build(values)
    places = [axis.at(value, 10.0, 500.0) for value in sorted(values)]
    assert places == sorted(places)
    assert places[0] >= 9.9
    assert places[-1] <= 500.1


def test_a_logarithmic_axis_gives_equal_ratios_equal_room() -> None:
    axis = log_axis([1.0, 100.0])
    assert axis.at(10.0, 0.0, 100.0) == pytest.approx(50.0)
    assert linear_axis([1.0, 100.0]).at(10.0, 0.0, 100.0) < 15


def test_cut_ends_at_the_values_but_not_for_one_value() -> None:
    axis = linear_axis([0.0, 2980.0]).clipped(0.0, 2980.0)
    assert (axis.low, axis.high) == (0.0, 2980.0)
    assert max(axis.ticks) == 2000.0
    alone = linear_axis([7.0]).clipped(7.0, 7.0)
    assert math.isfinite(alone.at(7.0, 0.0, 1.0))


@pytest.mark.parametrize(
    ("values", "percent", "labels"),
    [
        ([0.0, 1.0], False, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([0.0, 1.0], True, ["0%", "20%", "40%", "60%", "80%", "100%"]),
        ([0.0, 10_000.0], False, ["0", "2,000", "4,000", "6,000", "8,000", "10,000"]),
        ([0.0, 2e6], False, ["0", "0.5M", "1M", "1.5M", "2M"]),
        ([-1.0, 1.0], False, ["−1.0", "−0.5", "0.0", "0.5", "1.0"]),
        ([3.0], False, ["0", "1", "2", "3"]),
        ([0.0], False, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_ticks_read_as_a_person_would_write_them(values: list[float], percent: bool, labels: list[str]) -> None:
    axis = linear_axis(values)
    assert [axis.tick_label(tick, percent) for tick in axis.ticks] == labels


def test_logarithmic_ticks_read_well() -> None:
    wide, narrow = log_axis([0.3, 4.8]), log_axis([1.2, 1.4])
    assert [wide.tick_label(tick) for tick in wide.ticks] == ["0.2", "0.5", "1", "2", "5"]
    assert narrow.tick_label(narrow.ticks[0]) == "1.20"
