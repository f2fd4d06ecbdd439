"""Reads from the store what scaling rests on: who is live, and what was measured lately."""

import math

from sqlalchemy import Connection, func, select

from services.aggregator import overview, schema
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.evidence import read_window
from services.aggregator.history import Query, history
from services.aggregator.latest import latest
from services.aggregator.lengths import STEP_KEY
from services.aggregator.lines import on_line
from services.aggregator.patterns import Pattern
from services.aggregator.reduce import Reduction
from services.aggregator.scale import Calm, Fleet
from services.aggregator.schema import BUCKET_S
from services.aggregator.series import RunRow, find_series
from services.aggregator.verdict import MIN_STEPS
from services.aggregator.window import Window

LIVE_S = 60.0
"""A replica that was not heard of for so long, beside the newest word of the run, is not live."""

MAX_STEPS = 4096
"""Most steps that are looked at."""

REPLICA_KEY = "perf/generator_paused_frac"
"""Its denominators are seconds of replicas that serve a version."""

QUEUE_KEY = "queue/waiting/groups"
"""The trainer samples it every second for as long as it works."""


def read_fleet(connection: Connection, run: RunRow, *, service: str, now_s: float) -> Fleet:
    """The replicas of a service, by what was heard of them; `now_s` by the store's clock.

    Lately is beside the newest word of the run, not beside the clock: after an aggregator has been
    away nobody has reported yet, and all are there.
    """
    found = [each for each in overview.producers(connection, run) if each.service == service]
    live = [each for each in found if each.last_s >= run.last_s - LIVE_S]
    changes_s = [each.first_s for each in live]
    changes_s += [each.last_s for each in found if each.last_s < run.last_s - LIVE_S]
    return Fleet(live=len(live), unchanged_s=max(0.0, now_s - max(changes_s, default=now_s)))


def recent_window(connection: Connection, run: RunRow, *, since_s: float) -> tuple[Window, float]:
    """The steps that ended since then, and at least the last MIN_STEPS; with the seconds of
    generators that served meanwhile."""
    number = max(MIN_STEPS, _steps_since(connection, run, since_s))
    window = read_window(connection, run, num_steps=number)
    if not window.steps:
        return window, 0.0
    first, last = window.steps[0].step, window.steps[-1].step
    return window, _total(connection, run, REPLICA_KEY, first, last, column="denominator_high")


def read_calm(connection: Connection, run: RunRow, *, calm_s: float, now_s: float) -> Calm:
    """What the last `calm_s` were like."""
    number = _steps_since(connection, run, now_s - calm_s)
    window = read_window(connection, run, num_steps=number) if number else Window(steps=())
    return Calm(
        wanted_s=calm_s,
        steps_s=math.fsum(step.step_s for step in window.steps),
        # A wait that is absent is taken for the whole step: nothing is then too many.
        wait_s=math.fsum(
            step.step_s if step.rollout_wait_s is None else step.rollout_wait_s
            for step in window.steps
        ),
        slots_starved_frac=window.slots_starved_frac,
    )


def ended_s(connection: Connection, run: RunRow) -> float | None:
    """About when the newest step ended (at the latest), in seconds since 1970; None before the
    first."""
    series = find_series(connection, run, STEP_KEY)
    if series is None:
        return None
    table = schema.partials
    for segment in run.line:  # the latest attempt first
        bucket = connection.scalar(
            select(table.c.bucket)
            .where(
                table.c.series_id == series.id,
                table.c.attempt == segment.attempt,
                table.c.step >= segment.first,
            )
            .order_by(table.c.step.desc())
            .limit(1)
        )
        if bucket is not None:
            return float((bucket + 1) * BUCKET_S)
    return None


def is_over(connection: Connection, run: RunRow, *, since_s: float) -> bool:
    """Whether nothing is under way, and no trainer has looked at the queue since then. While it
    evaluates it looks, though no group of training is under way."""
    counts = overview.group_counts(connection, run)
    if counts.total == 0 or counts.in_flight > 0:
        return False
    return _by_time(connection, run, QUEUE_KEY, "last", since_s=since_s) is None


def queue_now(connection: Connection, run: RunRow) -> tuple[float, float]:
    """Groups waiting for a scorer, and held by one, as the trainer saw them last; 0 before."""
    found = {
        each.key: each.point.value or 0.0
        for each in latest(
            connection,
            run,
            catalogue=CATALOGUE,
            match=Pattern("^queue/(waiting|held)/groups$"),
        )
        if each.point is not None
    }
    return found.get(QUEUE_KEY, 0.0), found.get("queue/held/groups", 0.0)


def queue_peak(connection: Connection, run: RunRow, *, since_s: float) -> float | None:
    """The most that waited since then, and the most that was held, added up; None where nobody
    looked."""
    found = [
        _by_time(connection, run, key, "max", since_s=since_s)
        for key in (QUEUE_KEY, "queue/held/groups")
    ]
    known = [each for each in found if each is not None]
    return sum(known) if known else None


def queue_fill(connection: Connection, run: RunRow, *, since_s: float) -> float | None:
    """How full the rollout queue was since then: 0 to 1; None where nobody looked."""
    return _by_time(connection, run, "queue/fill_frac/samples", "ratio", since_s=since_s)


def _by_time(
    connection: Connection, run: RunRow, key: str, reduction: Reduction, *, since_s: float
) -> float | None:
    """One value over all that was measured since then."""
    series = find_series(connection, run, key)
    if series is None:
        return None
    query = Query("time", reduction, since=since_s, max_points=1)
    points = history(connection, run, series, query).points
    return points[-1].value if points else None


def _steps_since(connection: Connection, run: RunRow, since_s: float) -> int:
    """How many steps of the line ended since then, MAX_STEPS at most."""
    series = find_series(connection, run, STEP_KEY)
    if series is None:
        return 0
    table = schema.partials
    number = 0
    for segment in run.line:  # the latest attempt first
        rows = connection.execute(
            select(table.c.step, func.max(table.c.bucket))
            .where(
                table.c.series_id == series.id,
                table.c.attempt == segment.attempt,
                table.c.step >= segment.first,
                *((table.c.step < segment.end,) if segment.end is not None else ()),
                table.c.n > 0,
            )
            .group_by(table.c.step)
            .order_by(table.c.step.desc())
            .limit(MAX_STEPS - number)
        ).all()
        recent = [step for step, bucket in rows if (bucket + 1) * BUCKET_S > since_s]
        number += len(recent)
        if len(recent) < len(rows) or number == MAX_STEPS:
            break
    return number


def _total(
    connection: Connection, run: RunRow, key: str, first: int, last: int, *, column: str
) -> float:
    """The sum of a column over first <= step <= last."""
    series, table = find_series(connection, run, key), schema.partials
    if series is None:
        return 0.0
    found = connection.scalar(
        select(func.sum(table.c[column])).where(
            table.c.series_id == series.id,
            on_line(run.line),
            table.c.step >= first,
            table.c.step <= last,
        )
    )
    return float(found or 0.0)
