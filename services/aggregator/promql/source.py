"""Series of the store as Prometheus would know them: found by their labels, and read in buckets.

Each has the labels `run`, `producer` and its placeholder's; a pooled gauge has no `producer`. A
bucket's sample is taken at its end: for counters the run's total so far, all attempts included, for
gauges the value of the bucket. The bucket that is still filling ends when its producer was last
heard of.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection

from services.aggregator import overview
from services.aggregator.history import Point, Query, history
from services.aggregator.promql.buckets import begin_of, counter, gauge
from services.aggregator.promql.errors import QueryError
from services.aggregator.promql.grid import Grid
from services.aggregator.promql.names import Family, Names
from services.aggregator.promql.parsing import Select
from services.aggregator.promql.samples import LOOKBACK_S, Samples
from services.aggregator.promql.selector import NAME, Matcher, all_hold
from services.aggregator.schema import BUCKET_S
from services.aggregator.series import RunRow, SeriesRow, all_series, find_run
from services.common.instruments import Reduction

PRODUCER = "producer"

BASE_WIDTH_S = 3600
"""Buckets in which is read what a counter held before the query's range."""

PAGE_BUCKETS = 5000

MAX_SERIES = 1000
"""Keys of runs that one selector may find."""

MAX_BUCKETS = 500_000
"""Buckets that one selector may read."""


@dataclass(frozen=True, slots=True)
class Found:
    """A key of a run, under one of its names."""

    run: RunRow
    series: SeriesRow
    family: Family
    reduction: Reduction
    labels: Mapping[str, str]
    """All but the producer."""


class Source:
    """The store, for the time of one query. What it has read once it does not read again."""

    def __init__(self, connection: Connection, names: Names) -> None:
        self._connection = connection
        self._names = names
        self._seen: dict[int, dict[str, float]] = {}
        self._loaded: dict[Select, list[Samples]] = {}

    def find(self, matchers: Iterable[Matcher], *, since_s: float, until_s: float) -> list[Found]:
        """The keys that matchers select, of runs that were heard of in that time; conditions on the
        producer are not asked.
        """
        matchers = tuple(matchers)
        found = []
        for run in self._runs(matchers, since_s=since_s, until_s=until_s):
            for series in all_series(self._connection, run):
                for named in self._names.of(series.key, instrument=series.instrument):
                    labels = {NAME: named.family.name, "run": run.name, **named.labels}
                    if named.family.pooled and not _without_producer(matchers):
                        continue
                    others = (m for m in matchers if m.label != PRODUCER)
                    if all_hold(others, labels):
                        found.append(Found(run, series, named.family, named.reduction, labels))
        return found

    def labels(
        self, matchers: Iterable[Matcher], *, since_s: float, until_s: float
    ) -> list[dict[str, str]]:
        """The labels of all series that matchers select and that have samples in that time. Raises
        QueryError for more than MAX_SERIES.
        """
        matchers = tuple(matchers)
        keys = self.find(matchers, since_s=since_s, until_s=until_s)
        _check_number(keys)
        answer = []
        for found in keys:
            points = self._read(
                found, found.reduction, BASE_WIDTH_S, since_s=since_s, until_s=until_s
            )
            for labels in _labelled(found, points):
                if all_hold(matchers, labels):
                    answer.append(labels)
        return answer

    def producers(self, *, since_s: float, until_s: float) -> list[str]:
        """All producers of the runs that were heard of in that time, by name."""
        runs = self._runs((), since_s=since_s, until_s=until_s)
        return sorted({name for run in runs for name in self._last_seen(run)})

    def load(self, selector: Select, grid: Grid) -> list[Samples]:
        """The samples that a selector reads at the times of a query. Raises QueryError for more
        than MAX_SERIES or MAX_BUCKETS.
        """
        if selector not in self._loaded:
            self._loaded[selector] = self._load(selector, grid)
        return self._loaded[selector]

    def _load(self, selector: Select, grid: Grid) -> list[Samples]:
        moments = grid.shifted(-selector.offset_s)
        reach_s = LOOKBACK_S if selector.range_s is None else selector.range_s
        width_s = BUCKET_S if selector.finest else moments.width_s(selector.range_s)
        since_s = math.floor((moments.start_s - reach_s) / width_s) * width_s
        until_s = math.floor(moments.end_s / width_s) * width_s + width_s
        found = self.find(selector.matchers, since_s=since_s, until_s=until_s)
        _check_number(found)
        num_buckets = sum(
            max(0.0, min(until_s, each.run.last_s) - max(since_s, each.run.first_s)) / width_s
            for each in found
        )
        if num_buckets > MAX_BUCKETS:
            raise QueryError(
                f"about {num_buckets:.0f} buckets of {width_s} s are selected, {MAX_BUCKETS} at "
                "most are read at once: select fewer series, a shorter time or a longer step",
                error_type="execution",
            )
        samples: list[Samples] = []
        for each in found:
            samples += self._samples(each, width_s, since_s=since_s, until_s=until_s)
        return [each for each in samples if all_hold(selector.matchers, each.labels)]

    def _runs(
        self, matchers: tuple[Matcher, ...], *, since_s: float, until_s: float
    ) -> Iterator[RunRow]:
        asked = [matcher for matcher in matchers if matcher.label == "run"]
        for name in overview.run_names(self._connection):
            if not all_hold(asked, {"run": name}):
                continue
            run = find_run(self._connection, name)
            if run is not None and run.first_s < until_s and run.last_s + LOOKBACK_S > since_s:
                yield run

    def _last_seen(self, run: RunRow) -> dict[str, float]:
        """When each producer was heard of last."""
        if run.id not in self._seen:
            producers = overview.producers(self._connection, run)
            self._seen[run.id] = {each.name: each.last_s for each in producers}
        return self._seen[run.id]

    def _read(
        self,
        found: Found,
        reduction: Reduction,
        width_s: int,
        *,
        since_s: float | None,
        until_s: float,
    ) -> dict[str, list[Point]]:
        """Points by producer, page by page; of a pooled family under the empty name."""
        by_producer: defaultdict[str, list[Point]] = defaultdict(list)
        begin_s: float | None = since_s
        while True:
            query = Query(
                "time",
                reduction,
                since=begin_s,
                until=until_s,
                by_producer=not found.family.pooled,
                width=width_s,
                limit=PAGE_BUCKETS,
            )
            page = history(self._connection, found.run, found.series, query)
            if found.family.pooled:
                by_producer[""] += page.points
            for producer, points in page.by_producer.items():
                by_producer[producer] += points
            if page.next_x is None:
                return {producer: points for producer, points in by_producer.items() if points}
            begin_s = page.next_x

    def _samples(
        self, found: Found, width_s: int, *, since_s: int, until_s: int
    ) -> Iterator[Samples]:
        run = found.run
        points = self._read(found, found.reduction, width_s, since_s=since_s, until_s=until_s)
        seen = self._last_seen(run)
        if found.family.type == "gauge":
            for labels, held in zip(_labelled(found, points), points.items(), strict=True):
                producer, values = held
                yield gauge(labels, values, width_s, end_s=seen.get(producer, run.last_s))
            return
        before = dict.fromkeys(points, 0.0)
        if since_s > run.first_s:
            earlier = self._read(found, "sum", BASE_WIDTH_S, since_s=None, until_s=since_s)
            for producer, held_points in earlier.items():
                before[producer] = math.fsum(point.value or 0.0 for point in held_points)
        for labels, (producer, total) in zip(_labelled(found, before), before.items(), strict=True):
            events = points.get(producer, [])
            yield counter(
                labels,
                {begin_of(point, width_s): point.value or 0.0 for point in events},
                width_s,
                before=total,
                since_s=since_s,
                until_s=until_s,
                seen_s=seen[producer],
                run=run,
            )


def _check_number(found: list[Found]) -> None:
    if len(found) > MAX_SERIES:
        raise QueryError(
            f"{len(found)} keys are selected, {MAX_SERIES} at most are read at once: add a "
            "condition on __name__ or run",
            error_type="execution",
        )


def _without_producer(matchers: Iterable[Matcher]) -> bool:
    """Whether a series without a producer fits."""
    return all_hold((m for m in matchers if m.label == PRODUCER), {})


def _labelled(found: Found, producers: Iterable[str]) -> list[dict[str, str]]:
    return [
        dict(found.labels) if found.family.pooled else {**found.labels, PRODUCER: producer}
        for producer in producers
    ]
