"""What a recorder has measured, as plain values."""

from services.common.config import Recorder as Settings
from services.common.partials import Count, Observation
from services.common.recorder import Recorder

Measured = float | tuple[float, float]
"""A count's sum; (n, sum) of an observation; (numerator, denominator) of a ratio."""


def recorder() -> Recorder:
    """One that keeps what it measures."""
    return Recorder(run="r", producer="p", service="scorer", settings=Settings(), channel=None)


def values(measured: Recorder) -> dict[str, Measured]:
    """By key, of one step."""
    found: dict[str, Measured] = {}
    for (key, _, _), partial in measured.snapshot().items():
        assert key not in found
        if isinstance(partial, Count):
            found[key] = partial.sum
        elif isinstance(partial, Observation):
            found[key] = (partial.n, partial.sum)
        else:
            found[key] = (partial.numerator, partial.denominator)
    return found
