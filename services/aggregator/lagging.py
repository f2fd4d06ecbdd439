"""Which replica lags behind the others of its service, from what each of them did meanwhile.

A replica is compared with the median of the others, never with a number of its own making, so that
a fleet which is slow as a whole has none that lags. What was not measured of a replica accuses
nobody.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

SLOW_FRAC = 0.5
"""Below this share of the others' pace a replica is slow."""

MIN_BUSY_FRAC = 0.1
"""A replica that was busy for less than this share of the others' time has no pace yet."""

BEHIND_VERSIONS = 3
"""Replicas change to a version one after another: to be one or two behind is a moment's view."""

PAUSED_FRAC = 0.10
"""Paused for less than this share of the time, it hardly matters to whom."""

PAUSED_TIMES = 2.0
"""So many times as long as the others, a replica is paused more than they are."""

Why = Literal["pace", "version", "paused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What one process did in a window. Raises ValueError for a number that is not finite."""

    name: str
    """Such as generator-1."""
    work: float | None = None
    """Of a generator: tokens; of a scorer: groups."""
    busy_s: float | None = None
    """Of a generator: slot-seconds in use; of a scorer: seconds, added up over groups."""
    paused_frac: float | None = None
    """Share of the time in which its engine was paused for new weights."""
    version: float | None = None
    """The newest policy version that it has served."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{self.name}: {each.name}: {value} is no measurement")

    @property
    def pace(self) -> float | None:
        """Work in a second of its busy time."""
        if self.work is None or not self.busy_s or self.busy_s < 0:
            return None
        return self.work / self.busy_s


@dataclass(frozen=True, slots=True)
class Lag:
    """One replica, and in what it lags."""

    replica: str
    why: Why
    value: float
    """Its pace, its version, or the share of the time in which it was paused."""
    others: float
    """The median of the others; of versions the newest."""
    threshold: float
    """Beyond which it lags: `value` is below it, of "paused" at or above it."""


def lagging(replicas: Sequence[Replica]) -> tuple[Lag, ...]:
    """The replicas that lag, one reason each, in the order of `replicas`; none of fewer than two.

    Example: generator-0 makes 900 tokens in 30 slot-seconds, generator-1 300 in 25: 12 tokens a
    second of a slot against 30, below half of it, so generator-1 lags by its pace.
    """
    found: list[Lag] = []
    for replica in replicas:
        others = [other for other in replicas if other is not replica]
        lag = _version(replica, others) or _paused(replica, others) or _pace(replica, others)
        if lag is not None:
            found.append(lag)
    return tuple(found)


def _version(replica: Replica, others: Sequence[Replica]) -> Lag | None:
    newest = max((each.version for each in others if each.version is not None), default=None)
    if replica.version is None or newest is None:
        return None
    threshold = newest - BEHIND_VERSIONS + 1
    if replica.version >= threshold:
        return None
    return Lag(replica.name, "version", replica.version, newest, threshold)


def _paused(replica: Replica, others: Sequence[Replica]) -> Lag | None:
    usual = _median(others, lambda each: each.paused_frac)
    if replica.paused_frac is None or usual is None:
        return None
    threshold = max(PAUSED_FRAC, PAUSED_TIMES * usual)
    if replica.paused_frac < threshold:
        return None
    return Lag(replica.name, "paused", replica.paused_frac, usual, threshold)


def _pace(replica: Replica, others: Sequence[Replica]) -> Lag | None:
    usual = _median(others, lambda each: each.pace)
    work = _median(others, lambda each: each.work)
    busy_s = _median(others, lambda each: each.busy_s)
    if replica.pace is None or usual is None or work is None or busy_s is None:
        return None
    assert replica.busy_s is not None
    assert replica.work is not None  # else it had no pace
    if replica.busy_s < MIN_BUSY_FRAC * busy_s:
        return None
    # An engine with many conversations at a time takes longer for each and makes more of them: only
    # who makes no more than the others is slow.
    threshold = SLOW_FRAC * usual
    if replica.pace >= threshold or replica.work > work:
        return None
    return Lag(replica.name, "pace", replica.pace, usual, threshold)


def _median(replicas: Sequence[Replica], read: Callable[[Replica], float | None]) -> float | None:
    found = [value for value in map(read, replicas) if value is not None]
    return statistics.median(found) if found else None
