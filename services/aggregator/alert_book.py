"""The alerts of a run as the store keeps them, and what a webhook is still to be told of them.

Each change is one row changed in one transaction with the call that tells of it: what was committed
is told at least once, and fires once, whatever process ends in between.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, delete, func, insert, select, update

from services.aggregator import schema
from services.aggregator.statements import insert_new

KEPT = 1000
"""Alerts of a run that are kept, the latest."""

Event = Literal["fired", "ended"]
CallState = Literal["pending", "sent", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert, firing or past. Times are seconds since 1970 by the store's clock."""

    id: int
    name: str
    severity: str
    sentence: str
    value: float | None
    step: int
    fired_s: float
    ended_s: float | None
    ended_because: str | None
    calls: Mapping[str, CallState]
    """What became of telling a webhook, by event; empty where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a webhook is to be told."""

    alert: Alert
    event: Event
    tries: int
    """That have failed."""


def firing(connection: Connection, run_id: int) -> dict[str, Alert]:
    """The alerts that fire, by name."""
    found = _alerts(connection, run_id, schema.alerts.c.ended_s.is_(None))
    return {each.name: each for each in found}


def past(connection: Connection, run_id: int, *, limit: int) -> list[Alert]:
    """The alerts that have ended, the one that fired last first."""
    return _alerts(connection, run_id, schema.alerts.c.ended_s.is_not(None), limit=limit)


def num_calls(connection: Connection, run_id: int) -> dict[str, int]:
    """How many calls of a webhook are in each state."""
    table = schema.alert_calls
    rows = connection.execute(
        select(table.c.state, func.count()).where(table.c.run_id == run_id).group_by(table.c.state)
    )
    return {row[0]: row[1] for row in rows}


def stamp(connection: Connection, run_id: int) -> tuple[int, int]:
    """Something that differs whenever an alert has fired or ended; (0, 0) before the first."""
    table = schema.alerts
    row = connection.execute(
        select(func.max(table.c.id), func.count(table.c.ended_s)).where(table.c.run_id == run_id)
    ).one()
    return row[0] or 0, row[1]


def fire(
    connection: Connection,
    run_id: int,
    *,
    name: str,
    severity: str,
    sentence: str,
    value: float | None,
    step: int,
    now_s: float,
    tell: bool,
) -> int | None:
    """Let an alert fire, and (`tell`) a webhook be told; its id, None where it fires already."""
    table = schema.alerts
    if name in firing(connection, run_id):
        return None
    row = {
        "run_id": run_id,
        "name": name,
        "severity": severity,
        "sentence": sentence,
        "value": value,
        "step": step,
        "fired_s": now_s,
    }
    insert_new(connection, table, [row])
    fired = firing(connection, run_id)[name]
    if tell:
        _tell(connection, run_id, fired.id, "fired", now_s=now_s)
    _prune(connection, run_id)
    return fired.id


def end(
    connection: Connection, run_id: int, *, name: str, because: str, now_s: float, tell: bool
) -> bool:
    """End an alert that fires, and (`tell`) let a webhook be told; False where it does not."""
    fired = firing(connection, run_id).get(name)
    if fired is None:
        return False
    table = schema.alerts
    connection.execute(
        update(table).where(table.c.id == fired.id).values(ended_s=now_s, ended_because=because)
    )
    if tell:
        _tell(connection, run_id, fired.id, "ended", now_s=now_s)
    return True


def due(connection: Connection, run_id: int, *, now_s: float) -> list[Call]:
    """The calls whose time has come, the oldest alert first. That an alert has ended is told after
    that it fired."""
    table = schema.alert_calls
    rows = connection.execute(
        select(table)
        .where(table.c.run_id == run_id, table.c.state == "pending")
        .order_by(table.c.alert_id, table.c.event.desc())  # fired, then ended
    ).all()
    first: dict[int, Any] = {}
    for row in rows:
        first.setdefault(row.alert_id, row)
    ready = [row for row in first.values() if row.next_s <= now_s]
    found = _alerts(connection, run_id, schema.alerts.c.id.in_([row.alert_id for row in ready]))
    by_id = {each.id: each for each in found}
    return [
        Call(alert=by_id[row.alert_id], event=row.event, tries=row.tries)
        for row in ready
        if row.alert_id in by_id
    ]


def told(
    connection: Connection,
    call: Call,
    *,
    state: CallState,
    next_s: float = 0.0,
    error: str | None = None,
) -> None:
    """Note what became of a call: sent, failed for good, or to be tried again at `next_s`."""
    table = schema.alert_calls
    connection.execute(
        update(table)
        .where(table.c.alert_id == call.alert.id, table.c.event == call.event)
        .values(state=state, tries=call.tries + 1, next_s=next_s, error=error)
    )


def _tell(
    connection: Connection, run_id: int, alert_id: int, event: Event, *, now_s: float
) -> None:
    connection.execute(
        insert(schema.alert_calls).values(
            alert_id=alert_id, event=event, run_id=run_id, state="pending", tries=0, next_s=now_s
        )
    )


def _alerts(
    connection: Connection, run_id: int, condition: Any, *, limit: int = KEPT
) -> list[Alert]:
    table, calls = schema.alerts, schema.alert_calls
    rows: Sequence[Any] = connection.execute(
        select(table)
        .where(table.c.run_id == run_id, condition)
        .order_by(table.c.id.desc())
        .limit(limit)
    ).all()
    states: defaultdict[int, dict[str, CallState]] = defaultdict(dict)
    ids = [row.id for row in rows]
    for alert_id, event, state in connection.execute(
        select(calls.c.alert_id, calls.c.event, calls.c.state).where(calls.c.alert_id.in_(ids))
    ):
        states[alert_id][event] = state
    return [
        Alert(
            id=row.id,
            name=row.name,
            severity=row.severity,
            sentence=row.sentence,
            value=row.value,
            step=row.step,
            fired_s=row.fired_s,
            ended_s=row.ended_s,
            ended_because=row.ended_because,
            calls=states[row.id],
        )
        for row in rows
    ]


def _prune(connection: Connection, run_id: int) -> None:
    table, calls = schema.alerts, schema.alert_calls
    oldest = connection.scalar(
        select(table.c.id)
        .where(table.c.run_id == run_id, table.c.ended_s.is_not(None))
        .order_by(table.c.id.desc())
        .offset(KEPT)
        .limit(1)
    )
    if oldest is not None:
        gone = select(table.c.id).where(
            table.c.run_id == run_id, table.c.ended_s.is_not(None), table.c.id <= oldest
        )
        connection.execute(delete(calls).where(calls.c.alert_id.in_(gone)))
        connection.execute(delete(table).where(table.c.id.in_(gone)))
