"""A batch as it came from one producer, in plain values; what the wire's messages become at the
edge.

decode() checks everything that can be said without the catalogue: a delta whose numbers contradict
each other is turned into a rejection and the others are taken; only a batch that cannot be named is
refused as a whole.
"""

import math
from dataclasses import dataclass

import numpy as np
from headrace.v1 import metrics_pb2 as wire

from services.aggregator import group_ids, said, table
from services.aggregator.table import MAX_AGE_S, MAX_INTEGER, BadColumns, Table
from services.aggregator.traces import BadTrace, Trace
from services.aggregator.traces import decode as decode_trace
from services.common.config import RUN_NAME

MAX_NAME = 200
"""Longest producer, boot id, group id or key."""

SERVICES = ("generator", "scorer", "trainer", "aggregator")


class BadBatch(ValueError):
    """A batch that cannot be named or placed; nothing of it is taken."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """Partials of one key that are not taken: `reason` is one word for the metric, `detail` says
    what to do.
    """

    key: str
    reason: str
    detail: str
    number: int = 1


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
    keys: tuple[str, ...]
    tables: tuple[Table, ...]
    """Partials by instrument; their times are still the producer's."""
    events: tuple[GroupEvent, ...]
    traces: tuple[Trace, ...]
    rejected: tuple[Rejected, ...]

    @property
    def num_partials(self) -> int:
        """Partials that are not rejected."""
        return sum(map(len, self.tables))


def decode(request: wire.PushDeltasRequest) -> Batch:
    """The batch of a request. Raises BadBatch."""
    _require(RUN_NAME.fullmatch(request.run) is not None, f"run {request.run[:80]!r} is no name")
    _require(0 < len(request.producer) <= MAX_NAME, "producer must be a name")
    _require(request.service in SERVICES, f"service must be one of {', '.join(SERVICES)}")
    _require(0 < len(request.boot_id) <= MAX_NAME, "boot_id must be given")
    _require(0 < request.sequence <= MAX_INTEGER, "sequence must count from 1")
    _require(math.isfinite(request.now_s), "now_s must be a time in seconds")
    events: list[GroupEvent] = []
    rejected: list[Rejected] = []
    keys = tuple(request.keys)
    try:
        tables = _tables(request, keys, rejected)
    except BadColumns as error:
        raise BadBatch(str(error)) from None
    for message in request.events:
        event = _event(message, now_s=request.now_s, service=request.service)
        if isinstance(event, GroupEvent):
            events.append(event)
        else:
            rejected.append(event)
    traces: list[Trace] = []
    for trace in request.traces:
        try:
            traces.append(decode_trace(trace, now_s=request.now_s, service=request.service))
        except BadTrace as error:
            # Not named by the rollout: whoever logs a key once must not meet a new one each time.
            rejected.append(Rejected("traces", "bad_trace", str(error)))
    return Batch(
        run=request.run,
        producer=request.producer,
        service=request.service,
        boot_id=request.boot_id,
        sequence=request.sequence,
        now_s=request.now_s,
        keys=keys,
        tables=tables,
        events=tuple(events),
        traces=tuple(traces),
        rejected=tuple(rejected),
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise BadBatch(message)


def _tables(
    request: wire.PushDeltasRequest, keys: tuple[str, ...], rejected: list[Rejected]
) -> tuple[Table, ...]:
    """The partials that break no rule. Raises BadColumns."""
    bad_keys = np.array([not 0 < len(key) <= MAX_NAME or not key.isprintable() for key in keys])
    tables = []
    for name, read in (
        ("counts", table.counts),
        ("ratios", table.ratios),
        ("observations", table.observations),
    ):
        if not request.HasField(name):  # type: ignore[arg-type]
            continue
        found: Table = read(getattr(request, name))
        if len(found) and int(found.key.max()) >= len(keys):
            raise BadColumns(f"{name}: a partial of key {found.key.max()}, of {len(keys)}")
        keep = np.ones(len(found), bool)
        faults = table.faults(found, now_s=request.now_s)
        if bad_keys.any():
            faults.insert(0, table.Fault(bad_keys[found.key], "bad_key", _bad_key))
        for fault in faults:
            rejected.extend(
                Rejected(keys[found.key[index]][:MAX_NAME], fault.reason, fault.says(index))
                for index in np.flatnonzero(fault.broken & keep).tolist()
            )
            keep &= ~fault.broken
        tables.append(found.kept(keep))
    return tuple(tables)


def _bad_key(_index: int) -> str:
    return f"a key is a printable text of 1 to {MAX_NAME}"


def _event(message: wire.GroupEvent, *, now_s: float, service: str) -> GroupEvent | Rejected:
    state, group_id = int(message.state), message.group_id
    reason = "bad_event"
    if group_ids.parse(group_id) is None:
        why = "a group_id is epoch.ordinal.attempt.try, or eval.N.attempt.row"
    elif state == 0 or state not in wire.GroupState.values():
        why = f"{state} is no state of a group"
    elif max(message.row_index, message.step) > MAX_INTEGER:
        why = f"row_index {message.row_index}, step {message.step}"
    elif not now_s - MAX_AGE_S <= message.at_s <= now_s:
        why = f"at_s {message.at_s} is after now_s {now_s}, or years before it"
    elif state >= said.FIRST_TERMINAL and service != "trainer":
        reason = "not_the_trainer"
        why = f"only the trainer says that a group is {said.STATES[state]}, not a {service}"
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
    return Rejected(f"group {group_id[:MAX_NAME]}", reason, why)
