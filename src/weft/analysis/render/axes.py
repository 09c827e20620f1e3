"""Axes with round ticks, even or logarithmic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
LIMIT = 1e100  # values must be smaller, and on a logarithmic axis larger than 1 / LIMIT, or the arithmetic overflows


@dataclass(frozen=True)
class Axis:
    """The values that an axis shows, from the first to the last, and its ticks."""

    low: float
    high: float
    ticks: Sequence[float]
    step: float = 0.0  # from tick to tick; 0 where they are not evenly spaced
    log: bool = False

    def at(self, value: float, start: float, stop: float) -> float:
        """Place a value between two drawn positions."""
        value, low, high = (math.log(v) if self.log else v for v in (value, self.low, self.high))
        return round(start + (value - low) / (high - low) * (stop - start), 1)

    def cut(self, low: float, high: float) -> "Axis":
        """End at two values rather than at round numbers, unless they are one."""
        slack = self.step * 1e-6
        inside = [tick for tick in self.ticks if low - slack <= tick <= high + slack]
        return Axis(low, high, inside, self.step) if high - low > slack else self

    def written(self, tick: float, percent: bool = False) -> str:
        """Write a tick with as many digits as tell it from the next; on a long logarithmic axis, as powers of ten."""
        if self.log and not self.step and not (self.low >= 1e-4 and self.high < 1e6):
            power = math.floor(math.log10(tick) + 1e-9)
            lead = round(tick / 10.0**power)
            return f"{lead}×" * (lead > 1) + "10" + str(power).translate(_RAISED)
        tick, step = (100 * v if percent else v for v in (tick, self.step or tick))
        size = math.floor(math.log10(step) + 1e-9)
        if -5 <= size < 5 and abs(tick) < 1e12:
            text = f"{tick:,.{max(0, -size)}f}"
        elif size > 0 and 1e5 <= abs(tick) < 1e9:
            text = f"{tick / 1e6:g}M"
        else:
            text = f"{tick:.{2 + math.floor(math.log10(max(abs(tick) / step, 1)))}g}"
        return text.replace("-", "−") + "%" * percent


def even(values: Sequence[float]) -> Axis:
    """Span `values` with about five even steps of 1, 2 or 5; one value is shown against zero."""
    low, high = min(values), max(values)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1 / LIMIT):
        low, high = (min(low, 0.0), max(high, 0.0)) if abs(high) > 2 / LIMIT else (0.0, 1.0)
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(times * power for times in (1, 2, 5, 10, 20) if times * power >= rough * 0.999)
    ticks = [k * step for k in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]
    return Axis(ticks[0], ticks[-1], ticks, step)


def logarithmic(values: Sequence[float]) -> Axis:
    """Span positive `values` with powers of ten, and 2 and 5 between them where there is room."""
    low, high = min(values), max(values)
    if 1.001 < high / low < 3 and (linear := even(values)).low > 0:
        return Axis(linear.low, linear.high, linear.ticks, linear.step, log=True)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1
    stride, within = max(1, (last - first) // 6), (1, 2, 5) if last - first <= 4 else (1,)
    ticks = [times * 10.0**k for k in range(first, last + stride, stride) for times in within]
    start = max(tick for tick in ticks if tick <= low or tick == ticks[0])
    stop = min(tick for tick in ticks if tick >= high and tick > start)
    return Axis(start, stop, [tick for tick in ticks if start <= tick <= stop], log=True)
