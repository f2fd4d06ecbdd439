"""/metrics: the aggregator's own health, and the latest value of every series of the runs that were
heard of lately.

Counts are shown as their total so far, so that Prometheus' own rate() works; observations and
ratios by their default reduction, over all producers. A value that is absent is left out.
"""

import time
from collections import defaultdict
from collections.abc import Callable

from fastapi import APIRouter
from fastapi.responses import Response
from sqlalchemy import Connection, text

from services.aggregator import exposition, overview
from services.aggregator.api.backend import Backend
from services.aggregator.api.problems import documented
from services.aggregator.exposition import Exposed, Sample
from services.aggregator.history import Query, history
from services.aggregator.intake import OUTCOMES, Intake
from services.aggregator.latest import latest
from services.aggregator.promql.names import OWN_PREFIX, Names
from services.aggregator.series import RunRow, find_run, find_series

RECENT_S = 86_400.0
"""Runs that were not heard of for longer are left out."""

MAX_RUNS = 20
"""Runs at most, those heard of last."""


def router(backend: Backend, names: Names, *, clock: Callable[[], float] = time.time) -> APIRouter:
    """The endpoint; `clock` tells seconds since 1970."""
    routes = APIRouter(tags=["prometheus"], responses=documented(401, 503))

    @routes.get(
        "/metrics",
        summary="For Prometheus to scrape",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    def expose() -> Response:
        now_s = clock()
        with backend.read() as connection:
            runs = _recent(connection, now_s)
            families = [
                *_health(connection, runs, backend.intake, now_s),
                *_series(connection, runs, backend, names),
            ]
        return Response(exposition.render(families), media_type=exposition.MEDIA_TYPE)

    return routes


def _recent(connection: Connection, now_s: float) -> list[RunRow]:
    """Runs heard of lately, the last one first."""
    found: list[RunRow] = []
    for name in overview.run_names(connection)[:MAX_RUNS]:
        run = find_run(connection, name)
        if run is not None and now_s - run.last_s <= RECENT_S:
            found.append(run)
    return found


def _series(
    connection: Connection, runs: list[RunRow], backend: Backend, names: Names
) -> list[Exposed]:
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    for run in runs:
        for each in latest(connection, run, catalogue=backend.catalogue):
            named = names.of(each.key, instrument=each.metric.instrument)[0]
            if named.family.type == "counter":
                value = _total(connection, run, each.key)
            else:
                value = each.point.value if each.point is not None else None
            if value is not None:
                labels = {"run": run.name, **named.labels}
                samples[named.family.name].append(Sample(labels, value))
    return [
        Exposed(family.name, family.type, family.help, tuple(samples[family.name]))
        for family in names.families
        if family.name in samples
    ]


def _total(connection: Connection, run: RunRow, key: str) -> float | None:
    """A count's sum over the whole run, all attempts included: what was counted stays counted."""
    series = find_series(connection, run, key)
    assert series is not None
    points = history(connection, run, series, Query("time", "sum", max_points=1)).points
    return sum(point.value for point in points if point.value is not None) if points else None


def _health(
    connection: Connection, runs: list[RunRow], intake: Intake, now_s: float
) -> list[Exposed]:
    last_s = intake.last_taken_s
    return [
        _gauge("up", "1: the process answers, and its store can be read.", 1),
        Exposed(
            f"{OWN_PREFIX}batches_total",
            "counter",
            "Batches since the process started: taken, duplicate, refused for want of a name, "
            "failed because the store did.",
            tuple(Sample({"outcome": each}, intake.batches[each]) for each in OUTCOMES),
        ),
        Exposed(
            f"{OWN_PREFIX}deltas_total",
            "counter",
            "Deltas of the batches taken: accepted, or rejected with a reason.",
            (
                Sample({"outcome": "accepted"}, intake.num_deltas_accepted),
                Sample({"outcome": "rejected"}, intake.num_deltas_rejected),
            ),
        ),
        Exposed(
            f"{OWN_PREFIX}commit_seconds",
            "summary",
            "From a batch's arrival until it was committed.",
            (
                Sample({}, intake.commit_s, "_sum"),
                Sample({}, intake.num_commits, "_count"),
            ),
        ),
        Exposed(
            f"{OWN_PREFIX}last_batch_age_seconds",
            "gauge",
            "Time since a batch was taken; absent before the first.",
            () if last_s is None else (Sample({}, max(0.0, now_s - last_s)),),
        ),
        _gauge("store_bytes", "Size of the store.", _store_bytes(connection)),
        _gauge("exposed_runs", "Runs heard of lately, whose series are below.", len(runs)),
        Exposed(
            f"{OWN_PREFIX}missing_batches",
            "gauge",
            "Gaps: batches that have not arrived although later ones of their producer did.",
            tuple(
                Sample(
                    {"run": run.name},
                    sum(each.missing_batches for each in overview.producers(connection, run)),
                )
                for run in runs
            ),
        ),
    ]


def _gauge(name: str, help_text: str, value: float) -> Exposed:
    return Exposed(OWN_PREFIX + name, "gauge", help_text, (Sample({}, value),))


def _store_bytes(connection: Connection) -> float:
    if connection.dialect.name == "sqlite":
        statement = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
    else:
        statement = "SELECT pg_database_size(current_database())"
    return float(connection.execute(text(statement)).scalar_one())
