"""Reads steps as mirrors get them: when they have settled, with each key's reduced value."""

from collections import defaultdict
from collections.abc import Mapping

from sqlalchemy import Connection, func, select

from services.aggregator import schema
from services.aggregator.history import Query, history
from services.aggregator.lengths import STEP_KEY
from services.aggregator.lines import on_line
from services.aggregator.metric import Catalogue
from services.aggregator.mirrors.types import StepValues
from services.aggregator.schema import BUCKET_S
from services.aggregator.series import RunRow, all_series, find_series

TRAINED_KEY = "batch/groups_per_step"
"""Reported of every step."""


def settled(
    connection: Connection, run: RunRow, *, now_s: float, settle_s: float, over: bool
) -> int:
    """The step before which all have settled: ended `settle_s` ago, by the trainer's own report of
    their length. Where the run is over, all that were trained."""
    if not over:
        return _newest(connection, run, STEP_KEY, until_s=now_s - settle_s)
    # Of the first step after a start no length is known.
    return max(_newest(connection, run, key, until_s=None) for key in (STEP_KEY, TRAINED_KEY))


def _newest(connection: Connection, run: RunRow, key: str, *, until_s: float | None) -> int:
    """The step after the last one of which this was reported, by then where a time is given."""
    series, table = find_series(connection, run, key), schema.partials
    if series is None:
        return 0
    for segment in run.line:  # the latest attempt first
        newest = connection.scalar(
            select(table.c.step)
            .where(
                table.c.series_id == series.id,
                table.c.attempt == segment.attempt,
                table.c.step >= segment.first,
                *(() if segment.end is None else (table.c.step < segment.end,)),
                *(() if until_s is None else ((table.c.bucket + 1) * BUCKET_S <= until_s,)),
            )
            .order_by(table.c.step.desc())
            .limit(1)
        )
        if newest is not None:
            return int(newest) + 1
    return 0


def read_steps(
    connection: Connection, run: RunRow, *, catalogue: Catalogue, begin: int, end: int
) -> list[StepValues]:
    """The steps begin <= step < end of the line that have values, in ascending order."""
    values: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for series in all_series(connection, run):
        reduction = catalogue.metric(series.key, instrument=series.instrument).default
        query = Query("step", reduction, since=begin, until=end, width=1)
        for point in history(connection, run, series, query).points:
            if point.value is not None:
                values[point.x][series.key] = point.value
    ended_s = _ended_s(connection, run, begin, end)
    return [
        StepValues(step=step, at_s=ended_s.get(step, run.last_s), values=values[step])
        for step in sorted(values)
    ]


def _ended_s(connection: Connection, run: RunRow, begin: int, end: int) -> Mapping[int, float]:
    """About when each step ended: the end of the bucket of the trainer's report."""
    series, table = find_series(connection, run, STEP_KEY), schema.partials
    if series is None:
        return {}
    rows = connection.execute(
        select(table.c.step, func.max(table.c.bucket))
        .where(
            table.c.series_id == series.id,
            on_line(run.line),
            table.c.step >= begin,
            table.c.step < end,
        )
        .group_by(table.c.step)
    )
    return {step: float((bucket + 1) * BUCKET_S) for step, bucket in rows}
