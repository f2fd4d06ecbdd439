"""A batch as it came from one producer, in plain values; what the wire's messages become at the
edge.

decode() checks everything that can be said without the catalogue: a delta whose numbers contradict
each other is turned into a rejection and the others are taken; only a batch that cannot be named is
refused as a whole.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from headrace.v1 import metrics_pb2 as wire

from services.aggregator.reduce import Instrument
from services.aggregator.rows import NOT_A_RATIO, NOT_OBSERVED, StoredRow
from services.common.config import RUN_NAME

MAX_INTEGER = 2**62
"""Steps, attempts, sequences and counts above this are nonsense, and would not fit the database's
integers.
"""

MAX_AGE_S = 1e8
"""Three years; what was measured longer ago than this was not."""

MAX_NAME = 200
"""Longest producer, boot id, group id or key."""

SERVICES = ("generator", "scorer", "trainer", "aggregator")


class BadBatch(ValueError):
    """A batch that cannot be named or placed; nothing of it is taken."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A delta that is not taken: `reason` is one word for the metric, `detail` says what to do."""

    key: str
    reason: str
    detail: str


class Delta(NamedTuple):
    """One partial of one key within one step of one attempt. (A tuple: there are many.)"""

    key: str
    attempt: int
    step: int
    begin_s: float
    end_s: float
    """Producer's monotonic time of the first and the last value."""
    instrument: Instrument
    row: StoredRow
    """An observation's LAST_AT_S is still the producer's time here."""


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """What happened to one group."""

    group_id: str
    row_index: int
    state: int
    reason: str
    step: int | None
    worker: str
    at_s: float
    """Producer's monotonic time."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one producer sent at once."""

    run: str
    producer: str
    service: str
    boot_id: str
    sequence: int
    now_s: float
    """Producer's monotonic time at this send."""
    deltas: tuple[Delta, ...]
    events: tuple[GroupEvent, ...]
    rejected: tuple[Rejected, ...]


def decode(request: wire.PushDeltasRequest) -> Batch:
    """The batch of a request. Raises BadBatch."""
    _require(RUN_NAME.fullmatch(request.run) is not None, f"run {request.run[:80]!r} is no name")
    _require(0 < len(request.producer) <= MAX_NAME, "producer must be a name")
    _require(request.service in SERVICES, f"service must be one of {', '.join(SERVICES)}")
    _require(0 < len(request.boot_id) <= MAX_NAME, "boot_id must be given")
    _require(0 < request.sequence <= MAX_INTEGER, "sequence must count from 1")
    _require(math.isfinite(request.now_s), "now_s must be a time in seconds")
    deltas: list[Delta] = []
    events: list[GroupEvent] = []
    rejected: list[Rejected] = []
    now_s = request.now_s
    for message in request.deltas:
        delta = _delta(message, now_s)
        if type(delta) is Delta:
            deltas.append(delta)
        else:
            assert isinstance(delta, Rejected)
            rejected.append(delta)
    for event in (_event(message, request.now_s) for message in request.events):
        if isinstance(event, GroupEvent):
            events.append(event)
        else:
            rejected.append(event)
    return Batch(
        run=request.run,
        producer=request.producer,
        service=request.service,
        boot_id=request.boot_id,
        sequence=request.sequence,
        now_s=request.now_s,
        deltas=tuple(deltas),
        events=tuple(events),
        rejected=tuple(rejected),
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise BadBatch(message)


def _delta(message: wire.Delta, now_s: float) -> Delta | Rejected:
    key, attempt, step = message.key, message.attempt, message.step
    begin_s, end_s = message.begin_s, message.end_s
    if not 0 < len(key) <= MAX_NAME or not key.isprintable():
        return Rejected(key[:MAX_NAME], "bad_key", "a key is a printable text of 1 to 200")
    if attempt > MAX_INTEGER or step > MAX_INTEGER:
        return Rejected(key, "bad_clock", f"attempt {attempt}, step {step}")
    if not now_s - MAX_AGE_S <= begin_s <= end_s <= now_s:
        return Rejected(
            key,
            "bad_time",
            f"begin_s {begin_s} <= end_s {end_s} <= now_s {now_s} must hold, in recent years",
        )
    kind = message.WhichOneof("partial")
    row: StoredRow | str
    if kind == "count":
        row = _count(message.count)
    elif kind == "observation":
        row = _observation(message.observation, now_s)
    elif kind == "ratio":
        row = _ratio(message.ratio)
    else:
        return Rejected(key, "bad_value", "the delta holds no partial")
    if isinstance(row, str):
        return Rejected(key, "bad_value", row)
    return Delta(key, attempt, step, begin_s, end_s, kind, row)


def _event(message: wire.GroupEvent, now_s: float) -> GroupEvent | Rejected:
    state, group_id = int(message.state), message.group_id
    if not 0 < len(group_id) <= MAX_NAME:
        why = "a group event needs its group_id"
    elif state == 0 or state not in wire.GroupState.values():
        why = f"{state} is no state of a group"
    elif max(message.row_index, message.step) > MAX_INTEGER:
        why = f"row_index {message.row_index}, step {message.step}"
    elif not now_s - MAX_AGE_S <= message.at_s <= now_s:
        why = f"at_s {message.at_s} is after now_s {now_s}, or years before it"
    else:
        return GroupEvent(
            group_id=group_id,
            row_index=message.row_index,
            state=state,
            reason=message.reason[:MAX_NAME],
            step=message.step if message.HasField("step") else None,
            worker=message.worker[:MAX_NAME],
            at_s=message.at_s,
        )
    return Rejected(f"group {group_id[:MAX_NAME]}", "bad_event", why)


def _count(partial: wire.CountPartial) -> StoredRow | str:
    number = partial.sum
    if not 0 <= number < math.inf:
        return f"a count's sum must be finite and not negative, not {number}"
    return [number, 0.0, *NOT_A_RATIO, *NOT_OBSERVED]


def _ratio(partial: wire.RatioPartial) -> StoredRow | str:
    numerator, denominator = partial.numerator, partial.denominator
    if not (math.isfinite(numerator) and 0 <= denominator < math.inf):
        return (
            f"a ratio needs finite numbers and no negative denominator: {numerator}/{denominator}"
        )
    if denominator == 0 and numerator != 0:
        return f"numerator {numerator} without a denominator: events need their exposure"
    return [numerator, 0.0, denominator, 0.0, *NOT_OBSERVED]


def _observation(partial: wire.ObservationPartial, now_s: float) -> StoredRow | str:
    n, total, last_s = partial.n, partial.sum, partial.last_s
    bad = (partial.num_nan, partial.num_pos_inf, partial.num_neg_inf)
    if n > MAX_INTEGER or max(bad) > MAX_INTEGER:
        return "an observation of more values than can be"
    if n == 0:
        if total != 0:
            return f"a sum of {total} over no value"
        return [0.0, 0.0, *NOT_A_RATIO, 0, None, None, None, None, *bad, None]
    if not (partial.HasField("min") and partial.HasField("max") and partial.HasField("last")):
        return "min, max and last are needed where n > 0"
    low, high, last = partial.min, partial.max, partial.last
    if not (math.isfinite(total) and -math.inf < low and high < math.inf and last == last):
        return "sum, min, max and last must be finite; NaN and infinities are counted apart"
    if not low <= last <= high or not now_s - MAX_AGE_S <= last_s <= now_s:
        return "min <= last <= max and last_s <= now_s must hold"
    encoded = None
    if low != high:
        buckets = partial.histogram
        # Slices are lists: adding up the messages' own containers takes twice as long.
        positive, negative = buckets.positive_counts[:], buckets.negative_counts[:]
        held = sum(positive) + sum(negative) + sum(buckets.zeros)
        if held != n:
            return f"the histogram holds {held} values, n says {n}"
        if len(buckets.positive_buckets) != len(positive) or len(buckets.negative_buckets) != len(
            negative
        ):
            return "the histogram's buckets and counts must go in pairs"
        encoded = buckets.SerializeToString()
    return [total, 0.0, *NOT_A_RATIO, n, low, high, last, last_s, *bad, encoded]
