"""Metrics: the catalogue, and what a run has."""

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query

from services.aggregator.api import models
from services.aggregator.api.backend import Backend
from services.aggregator.api.problems import documented
from services.aggregator.api.runs import known_run
from services.aggregator.latest import latest
from services.aggregator.patterns import BadPattern, Pattern


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
                    only_when=metric.only_when,
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

    return routes


def _pattern(match: str) -> Pattern:
    try:
        return Pattern(match)
    except BadPattern as error:
        raise HTTPException(422, f"match: {error}") from None
