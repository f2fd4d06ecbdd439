"""The latest value of every series: of the highest step of the surviving line, not the last to
arrive.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import BigInteger, Connection, and_, column, func, select, values

from services.aggregator import schema
from services.aggregator.history import Point, Query, history, point
from services.aggregator.lengths import StepLengths, step_lengths
from services.aggregator.metric import Catalogue, Metric
from services.aggregator.patterns import Pattern
from services.aggregator.reduce import Partial, reduce
from services.aggregator.rows import SCALAR_NAMES, Row, pool
from services.aggregator.series import RunRow, SeriesRow, all_series

KEYS_PER_SELECT = 500
"""Steps looked up by one statement."""

PLACE = ("series_id", "attempt", "step")
"""Where a partial is, up to its producer and its wall time."""

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
    match: Pattern | None = None,
) -> list[Latest]:
    """Every series of a run whose key `match` finds, by key."""
    found = [
        each for each in all_series(connection, run) if match is None or match.search(each.key)
    ]
    metrics = {each.id: catalogue.metric(each.key, instrument=each.instrument) for each in found}
    heads = _heads(connection, run, found)
    newest = max((head.step for head in heads.values()), default=0)
    lengths = StepLengths({})
    rates = [each for each in found if metrics[each.id].default == "rate" and each.id in heads]
    if rates:
        begin = max(0, newest - STEPS_BACK)
        lengths = StepLengths(
            step_lengths(connection, run, line=run.line, begin=begin, end=newest + 1)
        )
    if lengths.newest is not None:
        # The open step has no length yet: the rate is that of the last one that has ended.
        ended = _heads(connection, run, rates, below=lengths.newest + 1)
        for series in rates:
            if heads[series.id].step > lengths.newest:
                heads.pop(series.id)
                if series.id in ended:
                    heads[series.id] = ended[series.id]
    partials = _at(connection, heads.values())
    answer = []
    for series in found:
        metric, head = metrics[series.id], heads.get(series.id)
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


def _heads(
    connection: Connection, run: RunRow, found: Iterable[SeriesRow], *, below: int | None = None
) -> dict[int, _Head]:
    """By series, its highest step on the line, and below a step where one is given."""
    series, table = schema.series, schema.partials
    left = {each.id: each for each in found}
    heads: dict[int, _Head] = {}
    for segment in run.line:  # the latest attempt first
        ends = [each for each in (segment.end, below) if each is not None]
        highest = (
            select(func.max(table.c.step))
            .where(
                table.c.series_id == series.c.id,
                table.c.attempt == segment.attempt,
                table.c.step >= segment.first,
                *((table.c.step < min(ends),) if ends else ()),
            )
            .scalar_subquery()
        )
        if not left:
            break
        wanted = select(series.c.id, highest).where(series.c.run_id == run.id)
        if len(left) <= KEYS_PER_SELECT:
            wanted = wanted.where(series.c.id.in_(left))
        for series_id, step in connection.execute(wanted):
            if step is not None and series_id in left:
                heads[series_id] = _Head(left.pop(series_id), segment.attempt, step)
    return heads


def _at(connection: Connection, heads: Iterable[_Head]) -> dict[int, Partial]:
    """The pooled partials of each head's step, by series."""
    table = schema.partials
    heads = list(heads)
    keys = [(head.series.id, head.attempt, head.step) for head in heads]
    instruments = {head.series.id: head.series.instrument for head in heads}
    pooled: dict[int, Partial] = {}
    for start in range(0, len(keys), KEYS_PER_SELECT):
        rows: defaultdict[int, list[Row]] = defaultdict(list)
        # A table to join with: for `(a, b, c) IN (...)` SQLite reads all rows there are.
        wanted = (
            values(*(column(name, BigInteger) for name in PLACE), name="wanted")
            .data(keys[start : start + KEYS_PER_SELECT])
            .cte("wanted")
        )
        for row in connection.execute(
            select(table.c.series_id, *(table.c[name] for name in SCALAR_NAMES)).join_from(
                wanted, table, and_(*(table.c[name] == wanted.c[name] for name in PLACE))
            )
        ):
            rows[row[0]].append(row[1:])
        for series_id, held in rows.items():
            pooled[series_id] = pool(instruments[series_id], held)
    return pooled
