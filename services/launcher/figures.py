"""Numbers for people: at most three significant digits, units, an em dash for what is not known."""

import math
from collections.abc import Sequence
from itertools import pairwise

ABSENT = "—"
BLOCKS = "▁▂▃▄▅▆▇█"

FLAT = 1e-12
"""A sparkline whose relative range is below this is flat: means of equal values differ by their
rounding.
"""

SPANS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
"""Seconds of the units of time that people count in."""

SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float | None) -> str:
    """Three significant digits at most: 4912 -> 4.91k, 0.4712 -> 0.471, 2 -> 2, None -> —."""
    if value is None or not math.isfinite(value):
        return ABSENT
    for size, suffix in SUFFIXES:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{suffix}"
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.3g}"


def whole(value: int | None) -> str:
    """All digits of a count: 2560 -> 2,560."""
    return ABSENT if value is None else f"{value:,}"


def fraction(value: float | None) -> str:
    """Two decimals, for rewards and accuracies: 0.4712 -> 0.47."""
    return ABSENT if value is None or not math.isfinite(value) else f"{value:.2f}"


def percent(value: float | None) -> str:
    """0.0912 -> 9 %."""
    return ABSENT if value is None or not math.isfinite(value) else f"{value * 100:.0f} %"


def clock(seconds: float | None) -> str:
    """130 -> 2:10, 3700 -> 1:01:40."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def ago(seconds: float | None) -> str:
    """4.2 -> 4 s ago, 130 -> 2 min ago, 9000 -> 2 h ago, 1e6 -> 11 d ago; a negative one is to
    come: -9000 -> in 2 h.
    """
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    size, unit = next((each for each in SPANS if abs(seconds) >= each[0]), SPANS[-1])
    amount = f"{int(abs(seconds) / size)} {unit}"
    return f"{amount} ago" if seconds > -1 else f"in {amount}"


def sparkline(values: Sequence[float | None], *, width: int) -> str:
    """At most `width` blocks over the whole history, each the mean of its share, or a space where
    all of its share is absent; "" without values.

    Example: [0, 0, 1, 1] at width 2 -> "▁█".
    """
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [round(column * len(values) / columns) for column in range(columns + 1)]
    means = [_mean(values[start:end]) for start, end in pairwise(edges)]
    found = [mean for mean in means if mean is not None]
    # Scaled to at most 1: a difference of large numbers would overflow.
    scale = max(map(abs, found), default=0.0) or 1.0
    low, high = min(found, default=0.0) / scale, max(found, default=0.0) / scale
    return "".join(" " if mean is None else _block(mean / scale, low, high) for mean in means)


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    # Divided first: the sum of large numbers would overflow.
    return sum(value / len(found) for value in found) if found else None


def _block(mean: float, low: float, high: float) -> str:
    if high - low < FLAT:
        return BLOCKS[3]
    return BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))]
