"""Numbers for people: at most three significant digits, units, an em dash for what is not known."""

import math
from collections.abc import Sequence
from itertools import pairwise

ABSENT = "—"
BLOCKS = "▁▂▃▄▅▆▇█"

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


def sparkline(values: Sequence[float], *, width: int) -> str:
    """At most `width` blocks over the whole history, each the mean of its share; "" without values.

    Example: [0, 0, 1, 1] at width 2 -> "▁█".
    """
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [round(column * len(values) / columns) for column in range(columns + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[3] * columns
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((mean - low) / (high - low) * top)] for mean in means)
