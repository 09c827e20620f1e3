"""Linear and logarithmic axes with round ticks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
LIMIT = 1e100  # values must be smaller, and on a logarithmic axis larger than 1 / LIMIT, or the arithmetic overflows


@dataclass(frozen=True)
class Axis:
    """The range of an axis and its ticks."""

    low: float
    high: float
    ticks: Sequence[float]
    step: float = 0.0  # between ticks; 0 if they are not evenly spaced
    log: bool = False

    def at(self, value: float, start: float, stop: float) -> float:
        """Return the coordinate of a value on an axis drawn from `start` to `stop`."""
        value, low, high = (math.log(v) if self.log else v for v in (value, self.low, self.high))
        return round(start + (value - low) / (high - low) * (stop - start), 1)

    def clipped(self, low: float, high: float) -> "Axis":
        """Return the axis with the ends `low` and `high` instead of round numbers, unless they are equal."""
        slack = self.step * 1e-6
        inside = [tick for tick in self.ticks if low - slack <= tick <= high + slack]
        return Axis(low, high, inside, self.step) if high - low > slack else self

    def tick_label(self, tick: float, percent: bool = False) -> str:
        """Return a tick with enough digits to tell it from the next; on a long logarithmic axis, as a power of ten."""
        if self.log and not self.step and not (self.low >= 1e-4 and self.high < 1e6):
            power = math.floor(math.log10(tick) + 1e-9)
            mantissa = round(tick / 10.0**power)
            return f"{mantissa}×" * (mantissa > 1) + "10" + str(power).translate(_SUPERSCRIPTS)
        tick, step = (100 * v if percent else v for v in (tick, self.step or tick))
        exponent = math.floor(math.log10(step) + 1e-9)
        if -5 <= exponent < 5 and abs(tick) < 1e12:
            text = f"{tick:,.{max(0, -exponent)}f}"
        elif exponent > 0 and 1e5 <= abs(tick) < 1e9:
            text = f"{tick / 1e6:g}M"
        else:
            text = f"{tick:.{2 + math.floor(math.log10(max(abs(tick) / step, 1)))}g}"
        return text.replace("-", "−") + "%" * percent


def linear_axis(values: Sequence[float]) -> Axis:
    """Return a linear axis over `values` with about five steps of 1, 2 or 5 times a power of ten.

    A single value is shown against zero.
    """
    low, high = min(values), max(values)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1 / LIMIT):
        low, high = (min(low, 0.0), max(high, 0.0)) if abs(high) > 2 / LIMIT else (0.0, 1.0)
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(times * power for times in (1, 2, 5, 10, 20) if times * power >= rough * 0.999)
    ticks = [k * step for k in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]
    return Axis(ticks[0], ticks[-1], ticks, step)


def log_axis(values: Sequence[float]) -> Axis:
    """Return a logarithmic axis over positive `values`: powers of ten, and 2 and 5 times them if there is room."""
    low, high = min(values), max(values)
    if 1.001 < high / low < 3 and (narrow := linear_axis(values)).low > 0:
        return Axis(narrow.low, narrow.high, narrow.ticks, narrow.step, log=True)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1
    stride, multiples = max(1, (last - first) // 6), (1, 2, 5) if last - first <= 4 else (1,)
    ticks = [times * 10.0**k for k in range(first, last + stride, stride) for times in multiples]
    start = max(tick for tick in ticks if tick <= low or tick == ticks[0])
    stop = min(tick for tick in ticks if tick >= high and tick > start)
    return Axis(start, stop, [tick for tick in ticks if start <= tick <= stop], log=True)
