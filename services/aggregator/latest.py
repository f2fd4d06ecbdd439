"""The latest value of every series: of the highest step of the surviving line, not the last to
arrive.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, func, select, tuple_

from services.aggregator import schema
from services.aggregator.history import Point, Query, history, point
from services.aggregator.lengths import StepLengths, step_lengths
from services.aggregator.lines import on_line
from services.aggregator.metric import Catalogue, Metric
from services.aggregator.reduce import Partial, merge, reduce
from services.aggregator.rows import SCALARS, from_row
from services.aggregator.series import RunRow, SeriesRow
from services.aggregator.transaction import KEYS_PER_SELECT

STEPS_BACK = 64
"""How far a replica's last value (sum_last) and a step that has ended (rate) are looked for."""


@dataclass(frozen=True, slots=True)
class Latest:
    """A series and its newest value, by its default reduction."""

    key: str
    metric: Metric
    point: Point | None
    """None when the surviving line holds nothing of it."""


@dataclass(frozen=True, slots=True)
class _Head:
    """The highest step of a series on the surviving line."""

    series: SeriesRow
    attempt: int
    step: int


def latest(
    connection: Connection,
    run: RunRow,
    *,
    catalogue: Catalogue,
    match: re.Pattern[str] | None = None,
) -> list[Latest]:
    """Every series of a run whose key `match` finds, by key."""
    found = _series(connection, run, match)
    metrics = {s.id: catalogue.metric(s.key, instrument=s.instrument) for s in found}
    heads = {s.id: _head(connection, run, s, steps) for s, steps in found.items()}
    newest = max((head.step for head in heads.values() if head is not None), default=0)
    lengths = StepLengths({})
    for series in found:
        head = heads[series.id]
        if metrics[series.id].default != "rate" or head is None:
            continue
        if lengths.newest is None:
            lengths = step_lengths(connection, run, since=newest - STEPS_BACK)
        if lengths.newest is not None and head.step > lengths.newest:
            # The open step has no length yet: the rate is that of the last one that has ended.
            heads[series.id] = _highest(connection, run, series, below=lengths.newest + 1)
    partials = _at(connection, [head for head in heads.values() if head is not None])
    answer = []
    for series in sorted(found, key=lambda each: each.key):
        metric, head = metrics[series.id], heads[series.id]
        newest_point = None
        if head is not None and metric.default == "sum_last":
            query = Query("step", "sum_last", since=head.step - STEPS_BACK)
            newest_point = history(connection, run, series, query).points[-1]
        elif head is not None:
            pooled = partials[series.id]
            length_s = lengths.between(head.step, head.step + 1)
            value = reduce(pooled, metric.default, seconds=length_s)
            newest_point = point(head.step, value, pooled)
        answer.append(Latest(series.key, metric, newest_point))
    return answer


def _series(
    connection: Connection, run: RunRow, match: re.Pattern[str] | None
) -> dict[SeriesRow, dict[int, int]]:
    """Matching series, each with its highest step by attempt."""
    series, heads = schema.series, schema.heads
    rows = connection.execute(
        select(series.c.id, series.c.key, series.c.instrument, heads.c.attempt, heads.c.step)
        .join(heads, heads.c.series_id == series.c.id)
        .where(series.c.run_id == run.id)
    )
    found: defaultdict[SeriesRow, dict[int, int]] = defaultdict(dict)
    for series_id, key, instrument, attempt, step in rows:
        if match is None or match.search(key):
            found[SeriesRow(series_id, key, instrument)][attempt] = step
    return dict(found)


def _head(
    connection: Connection, run: RunRow, series: SeriesRow, steps: dict[int, int]
) -> _Head | None:
    attempt = max(steps)
    if any(segment.holds(attempt, steps[attempt]) for segment in run.line):
        return _Head(series, attempt, steps[attempt])
    # Its newest steps were made again by a later attempt that has not recorded this key yet.
    return _highest(connection, run, series, below=None)


def _highest(
    connection: Connection, run: RunRow, series: SeriesRow, *, below: int | None
) -> _Head | None:
    """The highest step of a series on the line, and its attempt."""
    table = schema.partials
    condition = (table.c.series_id == series.id) & on_line(run.line)
    if below is not None:
        condition &= table.c.step < below
    step = connection.scalar(select(func.max(table.c.step)).where(condition))
    if step is None:
        return None
    owner = next(s for s in run.line if s.holds(s.attempt, step))
    return _Head(series, owner.attempt, step)


def _at(connection: Connection, heads: Iterable[_Head]) -> dict[int, Partial]:
    """The pooled partials of each head's step, by series."""
    table = schema.partials
    where = (table.c.series_id, table.c.attempt, table.c.step)
    keys = [(head.series.id, head.attempt, head.step) for head in heads]
    instruments = {head.series.id: head.series.instrument for head in heads}
    pooled: dict[int, Partial] = {}
    for start in range(0, len(keys), KEYS_PER_SELECT):
        rows = connection.execute(
            select(table.c.series_id, *SCALARS).where(
                tuple_(*where).in_(keys[start : start + KEYS_PER_SELECT])
            )
        )
        for row in rows.mappings():
            series_id = row["series_id"]
            partial = from_row(instruments[series_id], row)
            held = pooled.get(series_id)
            pooled[series_id] = partial if held is None else merge(held, partial)
    return pooled
