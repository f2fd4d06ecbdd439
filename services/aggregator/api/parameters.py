"""Positions on an axis, as queries write them."""

import math
from datetime import UTC, datetime

from fastapi import HTTPException

from services.aggregator.history import Axis

MAX_POSITION = 2**53
"""Steps and seconds beyond this are nobody's; a double still holds them exactly."""


def position(name: str, text: str | None, *, axis: Axis) -> float | None:
    """`since` or `until`: a step, or a time as seconds since 1970 or ISO 8601 (without a zone:
    UTC).

    Raises HTTPException 422 for what is neither.
    """
    if text is None:
        return None
    if axis == "step":
        try:
            value: float = int(text)
        except ValueError:
            raise _refused(name, text, "a step, such as 40") from None
    else:
        value = _seconds(name, text)
    if not math.isfinite(value) or abs(value) > MAX_POSITION:
        raise _refused(name, text, "a position that a run can have")
    return value


def check_range(since: float | None, until: float | None) -> None:
    """Raises HTTPException 422 when `since` is after `until`."""
    if since is not None and until is not None and since > until:
        raise HTTPException(422, "since: is after until; the range is since <= x < until")


def _seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise _refused(
            name,
            text,
            "a time: seconds since 1970, or 2026-01-01T12:00:00Z (write the + of a zone as %2B)",
        ) from None


def _refused(name: str, text: str, wanted: str) -> HTTPException:
    return HTTPException(422, f"{name}: {text[:80]!r} is not {wanted}")
