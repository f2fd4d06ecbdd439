"""Reads from the store what the rules of alerts look at."""

import statistics

from sqlalchemy import Connection

from services.aggregator import fleet, lineage, overview
from services.aggregator.alert_rules import (
    FRESH_S,
    LAST_S,
    LAST_STEPS,
    MIN_STEPS,
    UNKNOWN,
    Facts,
    Judgement,
    KeyRule,
)
from services.aggregator.history import Axis, Query, history
from services.aggregator.lengths import step_lengths
from services.aggregator.schema import BUCKET_S
from services.aggregator.series import RunRow, SeriesRow, all_series, find_series

STEPS_BACK = 8
"""Times the steps that a rule asks for: so far back values are looked for."""

LOST = ("ingest/rejected/", "recorder/dropped_total")
"""Counts of measurements that are in no other number."""


def read_facts(connection: Connection, run: RunRow, *, now_s: float, stuck_after_s: float) -> Facts:
    """What the built-in alerts look at; `now_s` by the store's clock."""
    end = open_step(run, connection)
    begin = max(0, end - LAST_STEPS)
    lengths = step_lengths(connection, run, line=run.line, begin=begin, end=end + 1)
    usual_s = statistics.median(lengths.values()) if len(lengths) >= MIN_STEPS else None
    begun_s = max(
        (each.first_s for each in overview.attempts(connection, run)), default=run.first_s
    )
    ended_s = fleet.ended_s(connection, run)
    account = lineage.account(connection, run, now_s=now_s, stuck_after_s=stuck_after_s)
    named = account.stuck[0] if account.stuck else None
    counts = [each for each in all_series(connection, run) if each.instrument == "count"]

    def counted(*prefixes: str, axis: Axis, since: float) -> float:
        query = Query(axis, "sum", since=since)
        return sum(
            _sum(connection, run, each, query) for each in counts if each.key.startswith(prefixes)
        )

    groups = find_series(connection, run, "batch/groups_per_step")
    taken = 0.0
    if groups is not None and groups.instrument == "observation":
        # One value a step, so that the mean of each is its number.
        taken = _sum(connection, run, groups, Query("step", "mean", since=begin, width=1))
    return Facts(
        usual_step_s=usual_s,
        quiet_s=max(0.0, now_s - max(begun_s, ended_s or begun_s)),
        num_stuck=account.num_stuck,
        oldest_stuck=None if named is None else f"{named.group_id} ({named.state})",
        stuck_after_s=stuck_after_s,
        dispatched=account.dispatched,
        counted=account.counts.total,
        dropped_groups=counted("group/dropped/", axis="step", since=begin),
        taken_groups=taken,
        not_finite=counted("nonfinite_total/", axis="step", since=begin),
        lost_partials=counted(*LOST, axis="time", since=now_s - LAST_S),
    )


def judge(connection: Connection, run: RunRow, by: KeyRule, *, now_s: float) -> Judgement:
    """What a rule about one metric says; unknown where the run has no such series."""
    series = find_series(connection, run, by.rule.key)
    if series is None or series.instrument != by.metric.instrument:
        return UNKNOWN
    if by.rule.for_steps is not None:
        end = open_step(run, connection)
        since = max(0, end - STEPS_BACK * by.rule.for_steps)
        query = Query("step", by.reduction, since=since, until=end, width=1)
        points = history(connection, run, series, query).points
        return by.judge_steps([each.value for each in points if each.value is not None])
    since_s = now_s - (by.rule.for_s or 0.0) - FRESH_S
    query = Query("time", by.reduction, since=since_s, width=BUCKET_S)
    points = history(connection, run, series, query).points
    # A bucket's value is known at its end.
    samples = [(each.x + BUCKET_S, each.value) for each in points if each.value is not None]
    return by.judge_time([(float(at_s), value) for at_s, value in samples], now_s=now_s)


def open_step(run: RunRow, connection: Connection) -> int:
    """The step that is under way: what is measured of it may still change."""
    latest = run.line[0].attempt if run.line else None
    attempts = overview.attempts(connection, run)
    return max((each.last_step for each in attempts if each.attempt == latest), default=0)


def _sum(connection: Connection, run: RunRow, series: SeriesRow, query: Query) -> float:
    """The points of a series, added up."""
    return sum(each.value or 0.0 for each in history(connection, run, series, query).points)
