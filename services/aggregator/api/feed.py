"""What is new in a run since one listener was last told: the messages of its stream.

A point is a step of the surviving line, by the key's default reduction. Points are told apart by
key and step: a later one replaces an earlier one. When an attempt supersedes another, the new line
is told first: steps whose owner has changed are forgotten by both sides, and what the new owner
recorded follows.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from sqlalchemy import Connection

from services.aggregator import alert_book
from services.aggregator.api import models
from services.aggregator.api.alerts import Alerts, alerts_of
from services.aggregator.api.backend import Backend
from services.aggregator.api.selection import same_run
from services.aggregator.changes import Change, changed_since
from services.aggregator.history import Point, Query, history
from services.aggregator.lengths import STEP_KEY
from services.aggregator.lines import Segment
from services.aggregator.metric import Metric
from services.aggregator.series import RunRow, SeriesRow, find_run, find_series

MESSAGE_POINTS = 2000
"""Points of one message, or somewhat more: what is read at once and held for one listener."""

REMEMBERED_POINTS = 64
"""Of each key, so many points that were told last: what changes is a block of so many steps, of
which most are what they were.
"""


@dataclass(frozen=True, slots=True)
class Message:
    """One event. `revision` is what to go on after when it is the last that was received."""

    event: Literal["line", "points", "alerts", "gone"]
    revision: int
    data: models.Line | models.NewPoints | Alerts | models.Gone


@dataclass(frozen=True, slots=True)
class _Range:
    """Steps `begin` <= step < `end` of a series, all owned by one attempt."""

    series: SeriesRow
    attempt: int
    begin: int
    end: int


class Feed:
    """The news of one run for one listener, who knows all up to `revision`."""

    def __init__(
        self, backend: Backend, run: RunRow, *, revision: int, keys: Collection[str] = ()
    ) -> None:
        self._backend = backend
        self._run = run
        self._revision = revision
        self._keys = frozenset(keys)
        """Empty: all of the run."""
        self._line: tuple[Segment, ...] | None = None
        self._alerts = (0, 0)
        """The stamp of the alerts that were told; none were before the first."""
        self._told: dict[str, OrderedDict[int, tuple[int, Point]]] = {}
        """By key and step, the attempt and the point that were told last."""
        self.over = False
        """The run is gone: nothing follows."""

    def news(self) -> Iterator[Message]:
        """Everything since the last call; blocking. A message is read when it is asked for, so
        that a slow listener holds no connection and little memory.

        A listener that goes away half-way resumes after the revision of the last message, which is
        the earlier one until all is told.
        """
        with self._backend.read() as connection:
            run = find_run(connection, self._run.name)
            changes = None
            if run is not None and same_run(run, self._run):
                changes = changed_since(connection, run, self._revision)
                stamp = alert_book.stamp(connection, run.id)
                alerts = alerts_of(connection, run) if stamp != self._alerts else None
                pending = deque(dict.fromkeys(self._changed(connection, run, changes.series)))
        if run is None or changes is None:
            self.over = True
            yield Message("gone", self._revision, models.Gone(run=self._run.name))
            return
        self._run = run
        if run.line != self._line:
            self._line = run.line
            line = [
                models.Owner(attempt=each.attempt, first_step=each.first, end_step=each.end)
                for each in run.line
            ]
            yield Message("line", self._revision, models.Line(run=run.name, line=line))
        if alerts is not None:
            self._alerts = stamp
            yield Message("alerts", self._revision, alerts)
        while pending:
            with self._backend.read() as connection:
                found = self._read(connection, run, pending)
            if not pending:
                self._revision = changes.revision
            if found:
                points = models.NewPoints(revision=self._revision, series=found)
                yield Message("points", self._revision, points)
        self._revision = changes.revision

    def _changed(
        self, connection: Connection, run: RunRow, changes: Collection[Change]
    ) -> Iterator[_Range]:
        """What to read again: each change, within the steps that its attempt owns."""
        spans = [(change.series, change) for change in changes]
        # A step's rate becomes known with the step's length, which is another series' change.
        lengths = [change for change in changes if change.series.key == STEP_KEY]
        if lengths:
            rated = {change.series for change in changes} | set(self._rated(connection, run))
            spans += [
                (series, change)
                for series in sorted(rated, key=lambda each: each.key)
                if self._metric(series).default == "rate"
                for change in lengths
            ]
        for series, change in spans:
            if self._keys and series.key not in self._keys:
                continue
            for segment in run.line:
                begin = max(change.first_step, segment.first)
                end = change.end_step if segment.end is None else min(change.end_step, segment.end)
                if segment.attempt == change.attempt and begin < end:
                    yield _Range(series, segment.attempt, begin, end)

    def _rated(self, connection: Connection, run: RunRow) -> Iterator[SeriesRow]:
        for metric in self._backend.catalogue.metrics:
            if metric.default == "rate":
                series = find_series(connection, run, metric.key)
                if series is not None:
                    yield series

    def _metric(self, series: SeriesRow) -> Metric:
        return self._backend.catalogue.metric(series.key, instrument=series.instrument)

    def _read(
        self, connection: Connection, run: RunRow, pending: deque[_Range]
    ) -> list[models.NewSeriesPoints]:
        """Take ranges off `pending` until there are enough points for a message."""
        told: dict[tuple[str, int], list[models.Point]] = {}
        room = MESSAGE_POINTS
        while pending and room > 0:
            each = pending.popleft()
            query = Query(
                axis="step",
                reduction=self._metric(each.series).default,
                since=each.begin,
                until=each.end,
                width=1,
                limit=MESSAGE_POINTS,
            )
            found = history(connection, run, each.series, query)
            if found.next_x is not None:
                pending.appendleft(replace(each, begin=found.next_x))
            room -= len(found.points)
            points = [models.Point.of(point) for point in self._untold(each, found.points)]
            if points:
                told.setdefault((each.series.key, each.attempt), []).extend(points)
        return [
            models.NewSeriesPoints(key=key, attempt=attempt, points=points)
            for (key, attempt), points in told.items()
        ]

    def _untold(self, each: _Range, points: Iterable[Point]) -> Iterator[Point]:
        told = self._told.setdefault(each.series.key, OrderedDict())
        for point in points:
            if told.get(point.x) != (each.attempt, point):
                told[point.x] = (each.attempt, point)
                told.move_to_end(point.x)
                yield point
        while len(told) > REMEMBERED_POINTS:
            told.popitem(last=False)
