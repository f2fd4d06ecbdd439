"""Histories: one metric page by page, or several metrics of several runs at once."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Response
from pydantic_core import to_json

from services.aggregator import history
from services.aggregator.api import models, parameters
from services.aggregator.api.backend import Backend
from services.aggregator.api.pages import following, on_page, read_token, write_token
from services.aggregator.api.problems import documented
from services.aggregator.api.runs import known_run
from services.aggregator.api.selection import Selected, select_series
from services.aggregator.points import Points

MAX_HISTORIES = 200
"""Most histories of one answer: runs times keys."""

MAX_TOTAL_POINTS = 200_000
"""Most points of one answer, over its histories; they share it evenly."""

MaxPoints = Annotated[
    int,
    Query(
        ge=1,
        description="How wide the windows are: so wide that the whole range has at most so many; "
        f"{parameters.MAX_POINTS} is the most, a larger number counts as that. Where a window "
        "pools several steps (or more than 10 s), low and high are the smallest and largest value "
        "among them.",
    ),
    parameters.WHOLE,
]


def router(backend: Backend) -> APIRouter:
    """The endpoints that answer histories."""
    routes = APIRouter(prefix="/api/v1", tags=["metrics"], responses=documented(401, 404, 422, 503))

    @routes.get(
        "/runs/{run}/metrics/{key:path}",
        summary="The history of one metric",
        response_model=models.History,
    )
    def show_history(
        run: str,
        key: parameters.Key,
        axis: parameters.Axis = "step",
        reduce: parameters.Reduce = None,
        since: parameters.Since = None,
        until: parameters.Until = None,
        attempt: parameters.Attempt = None,
        group_by: parameters.GroupBy = None,
        max_points: MaxPoints = parameters.DEFAULT_POINTS,
        limit: Annotated[
            int,
            Query(
                ge=1,
                description="How many of the windows one answer has; "
                f"{parameters.MAX_POINTS} is the most, a larger number counts as that. It changes "
                "no window: with max_points above limit the range comes on several pages, each "
                "with the next one's token.",
            ),
            parameters.WHOLE,
        ] = parameters.DEFAULT_POINTS,
        page: Annotated[
            str | None,
            Query(
                max_length=100,
                description="The next_page of the answer before, with the same other parameters "
                "(only limit may change). Points recorded meanwhile do not shift pages.",
            ),
        ] = None,
    ) -> Response:
        begin, end = parameters.span(since, until, axis=axis)
        with backend.read() as connection:
            (selected,) = select_series(
                connection,
                [known_run(connection, run)],
                [key],
                catalogue=backend.catalogue,
                reduce=reduce,
            )
            query = history.Query(
                axis=axis,
                reduction=selected.reduction,
                since=begin,
                until=end,
                max_points=min(max_points, parameters.MAX_POINTS),
                by_producer=group_by is not None,
                attempt=attempt,
                limit=min(limit, parameters.MAX_POINTS),
            )
            named = (
                run,
                key,
                axis,
                selected.reduction,
                begin,
                end,
                query.max_points,
                query.by_producer,
                attempt,
            )
            at = None if page is None else read_token(page, query=named)
            found = history.history(connection, selected.run, selected.series, on_page(query, at))
        after = following(found)
        next_page = None if after is None else write_token(after, query=named)
        return _respond({**_answer(selected, query, found), "next_page": next_page})

    @routes.get(
        "/history",
        summary="The histories of several metrics and runs",
        response_model=models.Histories,
    )
    def show_histories(
        run: Annotated[
            list[str],
            Query(min_length=1, description="A run; repeat it for several, as run=a&run=b."),
        ],
        key: Annotated[
            list[str],
            Query(
                min_length=1,
                description="A metric; repeat it for several. In a run that has not recorded it "
                "its history is empty, as long as it is declared or another of the runs has it.",
            ),
        ],
        axis: parameters.Axis = "step",
        reduce: parameters.Reduce = None,
        since: parameters.Since = None,
        until: parameters.Until = None,
        attempt: parameters.Attempt = None,
        group_by: parameters.GroupBy = None,
        max_points: MaxPoints = parameters.DEFAULT_POINTS,
    ) -> Response:
        """Runs times keys are at most 200, all of one moment of the store. The histories share
        200,000 points: each has at most max_points and its even share."""
        begin, end = parameters.span(since, until, axis=axis)
        names, keys = list(dict.fromkeys(run)), list(dict.fromkeys(key))
        number = _counted(names, keys)
        with backend.read() as connection:
            selected = select_series(
                connection,
                [known_run(connection, name) for name in names],
                keys,
                catalogue=backend.catalogue,
                reduce=reduce,
            )
            answers = []
            for each in selected:
                query = history.Query(
                    axis=axis,
                    reduction=each.reduction,
                    since=begin,
                    until=end,
                    max_points=min(max_points, parameters.MAX_POINTS, MAX_TOTAL_POINTS // number),
                    by_producer=group_by is not None,
                    attempt=attempt,
                )
                found = history.history(connection, each.run, each.series, query)
                answers.append(_answer(each, query, found))
        return _respond({"histories": answers})

    return routes


def _counted(names: Sequence[str], keys: Sequence[str]) -> int:
    number = len(names) * len(keys)
    if number > MAX_HISTORIES:
        raise HTTPException(
            422,
            f"key: {len(names)} runs with {len(keys)} keys each are {number} histories; "
            f"{MAX_HISTORIES} fit in one answer, so ask in several",
        )
    return number


def _answer(selected: Selected, query: history.Query, found: history.History) -> dict[str, Any]:
    """The fields of a models.SeriesHistory."""
    answer = {
        "run": selected.run.name,
        "key": selected.series.key,
        "instrument": selected.metric.instrument,
        "unit": selected.unit,
        "axis": query.axis,
        "reduce": selected.reduction,
        "width": found.width,
        "points": _shown(found.points),
    }
    if query.by_producer:
        answer["by_producer"] = {
            producer: _shown(points) for producer, points in found.by_producer.items()
        }
    return answer


def _shown(points: Points) -> list[dict[str, int | float | None]]:
    """Points as the JSON of models.Point has them: what has its default is left out."""
    shown = []
    for x, value, low, high, nan, pos_inf, neg_inf in zip(*points.columns(), strict=True):
        fields = {"x": x, "value": value}
        if low is not None:
            fields["low"] = low
        if high is not None:
            fields["high"] = high
        if nan:
            fields["nan"] = nan
        if pos_inf:
            fields["pos_inf"] = pos_inf
        if neg_inf:
            fields["neg_inf"] = neg_inf
        shown.append(fields)
    return shown


def _respond(answer: dict[str, Any]) -> Response:
    # As the response model would write it: a model a point costs more than the query itself.
    return Response(to_json(answer, inf_nan_mode="null"), media_type="application/json")
