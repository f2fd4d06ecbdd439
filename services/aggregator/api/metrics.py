"""Metrics: the catalogue, what a run has, and the history of one key."""

import re
from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Path, Query
from sqlalchemy import Connection

from services.aggregator.api import models
from services.aggregator.api.backend import Backend
from services.aggregator.api.parameters import check_range, position
from services.aggregator.api.problems import documented
from services.aggregator.api.runs import known_run
from services.aggregator.history import Axis, history
from services.aggregator.history import Query as HistoryQuery
from services.aggregator.latest import latest
from services.aggregator.reduce import Reduction
from services.aggregator.series import RunRow, SeriesRow, find_series

MAX_POINTS = 10_000
"""Most points of one answer; a larger wish is capped."""

DEFAULT_POINTS = 1000

Position = Annotated[str | None, Query(description="A step; or seconds since 1970, or ISO 8601.")]


def router(backend: Backend) -> APIRouter:
    """The endpoints about metrics."""
    routes = APIRouter(prefix="/api/v1", tags=["metrics"], responses=documented(401, 422, 503))

    @routes.get("/catalogue", summary="Every declared metric")
    def show_catalogue() -> models.CatalogueAnswer:
        return models.CatalogueAnswer(
            metrics=[
                models.Declared(
                    key=metric.key,
                    instrument=metric.instrument,
                    unit=metric.unit,
                    reductions=list(metric.reductions),
                    producers=list(metric.producers),
                    meaning=metric.meaning,
                    since=metric.since,
                    old_names=list(metric.old_names),
                )
                for metric in backend.catalogue.metrics
            ],
            renamed={old: list(new) for old, new in backend.catalogue.renamed.items()},
        )

    @routes.get(
        "/runs/{run}/metrics",
        summary="The metrics of a run, with their latest values",
        responses=documented(404),
        response_model_exclude_defaults=True,
    )
    def list_metrics(
        run: str,
        match: Annotated[
            str | None, Query(max_length=200, description="A regular expression found in the key.")
        ] = None,
    ) -> models.Metrics:
        pattern = None if match is None else _pattern(match)
        with backend.read() as connection:
            found = latest(
                connection, known_run(connection, run), catalogue=backend.catalogue, match=pattern
            )
        answers = []
        for each in found:
            point = models.Point.of(each.point) if each.point is not None else None
            answers.append(
                models.Latest(
                    key=each.key,
                    instrument=each.metric.instrument,
                    unit=each.metric.unit_of(each.metric.default),
                    reduce=each.metric.default,
                    value=point.value if point else None,
                    step=point.x if point else None,
                    nan=point.nan if point else 0,
                    pos_inf=point.pos_inf if point else 0,
                    neg_inf=point.neg_inf if point else 0,
                )
            )
        return models.Metrics(run=run, metrics=answers)

    @routes.get(
        "/runs/{run}/metrics/{key:path}",
        summary="The history of one metric",
        responses=documented(404),
        response_model_exclude_defaults=True,
    )
    def show_history(
        run: str,
        key: Annotated[str, Path(description="Such as reward, or perf/step_s.")],
        axis: Annotated[
            Axis, Query(description="By step: the surviving line. By time: all attempts.")
        ] = "step",
        reduce: Annotated[
            Reduction | None, Query(description="The metric's first reduction by default.")
        ] = None,
        since: Position = None,
        until: Position = None,
        max_points: Annotated[
            int, Query(ge=1, description=f"Windows at most; {MAX_POINTS} is the most.")
        ] = DEFAULT_POINTS,
        group_by: Annotated[
            Literal["producer"] | None, Query(description="Also each producer alone.")
        ] = None,
    ) -> models.History:
        begin, end = position("since", since, axis=axis), position("until", until, axis=axis)
        check_range(begin, end)
        with backend.read() as connection:
            found_run = known_run(connection, run)
            series = _known_series(backend, connection, found_run, key)
            metric = backend.catalogue.metric(key, instrument=series.instrument)
            reduction = reduce or metric.default
            if reduction not in metric.reductions:
                allowed = ", ".join(metric.reductions)
                raise HTTPException(
                    422, f"reduce: not for {key} ({metric.instrument}); choose one of {allowed}"
                )
            query = HistoryQuery(
                axis=axis,
                reduction=reduction,
                since=begin,
                until=end,
                max_points=min(max_points, MAX_POINTS),
                by_producer=group_by is not None,
            )
            found = history(connection, found_run, series, query)
        return models.History(
            run=run,
            key=key,
            instrument=metric.instrument,
            unit=metric.unit_of(reduction),
            axis=axis,
            reduce=reduction,
            width=found.width,
            points=[models.Point.of(each) for each in found.points],
            by_producer=None
            if group_by is None
            else {
                producer: [models.Point.of(each) for each in points]
                for producer, points in found.by_producer.items()
            },
        )

    return routes


def _pattern(match: str) -> re.Pattern[str]:
    try:
        return re.compile(match)
    except (re.error, RecursionError, OverflowError) as error:
        raise HTTPException(422, f"match: not a regular expression: {error}") from None


def _known_series(backend: Backend, connection: Connection, run: RunRow, key: str) -> SeriesRow:
    """The series of a key. A declared key that nothing has recorded yet has an empty one; others
    raise 404.
    """
    series = find_series(connection, run, key)
    if series is not None:
        return series
    declared = backend.catalogue.find(key)
    if declared is not None:
        return SeriesRow(id=-1, key=key, instrument=declared.metric.instrument)
    renamed = backend.catalogue.renamed.get(key)
    if renamed is not None:
        raise HTTPException(404, f"{key} is called {' or '.join(renamed)} here")
    raise HTTPException(
        404,
        f"no metric {key[:80]!r} in run {run.name}; /api/v1/runs/{run.name}/metrics lists what it "
        "has, /api/v1/catalogue what is declared",
    )
