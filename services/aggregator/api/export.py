"""Export: the histories of a run as a table, CSV or Parquet, at full resolution."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import StreamingResponse

from services.aggregator import history
from services.aggregator.api import models, parameters
from services.aggregator.api.backend import Backend
from services.aggregator.api.pages import Cursor, following, on_page
from services.aggregator.api.problems import documented
from services.aggregator.api.runs import known_run
from services.aggregator.api.selection import Selected, same_run, select_series
from services.aggregator.api.tables import Row, to_csv, to_parquet
from services.aggregator.reduce import REDUCTIONS
from services.aggregator.schema import BUCKET_S
from services.aggregator.series import all_series, find_run

PAGE_WINDOWS = 5000
"""Windows of one series that are read at once."""

MEDIA_TYPES = {
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
}

ABOUT = """One row a window: `run`, `key`, `axis`, `x` (the first step, or the begin in seconds
since 1970), `time` (the begin in UTC, with axis=time), `reduce`, `value`, `low` and `high`
(smallest and largest value of the steps or 10 s that a wider window pools), `nan`, `pos_inf` and
`neg_inf` (how many values are in no sum), `producer` (empty: over all).

An absent value is empty (null in Parquet), never NaN or 0. In CSV, text that begins with
`=`, `+`, `-`, `@`, a tab or a line break has an apostrophe before it, so that no spreadsheet takes
it for a formula; numbers are left as they are.

The table is read page by page while it is sent: what is recorded meanwhile may be in it. When the
run is deleted meanwhile, the transfer breaks off."""


class RunGoneError(RuntimeError):
    """The run was deleted while it was being exported; what was sent is not all of it."""


def router(backend: Backend) -> APIRouter:
    """The endpoint that exports."""
    routes = APIRouter(
        prefix="/api/v1/runs", tags=["export"], responses=documented(401, 404, 422, 503)
    )

    @routes.get(
        "/{run}/export",
        summary="The histories of a run as a table",
        description=ABOUT,
        response_class=StreamingResponse,
        responses={
            200: {
                "description": "The table.",
                "content": {
                    media_type: {"schema": {"type": "string", "format": "binary"}}
                    for media_type in MEDIA_TYPES.values()
                },
            }
        },
    )
    def export(
        run: str,
        key: Annotated[
            list[str] | None,
            Query(
                description="A metric; repeat it for several. By default all that the run has "
                "(and that have the reduction, where one is asked for)."
            ),
        ] = None,
        table: Annotated[Literal["csv", "parquet"], Query(alias="format")] = "csv",
        axis: parameters.Axis = "step",
        reduce: parameters.Reduce = None,
        since: parameters.Since = None,
        until: parameters.Until = None,
        attempt: parameters.Attempt = None,
        group_by: parameters.GroupBy = None,
        width: Annotated[
            int | None,
            Query(
                ge=1,
                le=parameters.MAX_POSITION,
                description="Steps of one row; with axis=time its seconds, a multiple of 10. By "
                "default the finest: 1 step, or 10 s.",
            ),
            parameters.WHOLE,
        ] = None,
    ) -> StreamingResponse:
        begin, end = parameters.span(since, until, axis=axis)
        with backend.read() as connection:
            found = known_run(connection, run)
            keys = list(dict.fromkeys(key or ()))
            if not keys:
                keys = [
                    each.key
                    for each in all_series(connection, found)
                    if reduce is None or reduce in REDUCTIONS[each.instrument]
                ]
            selected = select_series(
                connection, [found], keys, catalogue=backend.catalogue, reduce=reduce
            )
        queries = [
            history.Query(
                axis=axis,
                reduction=each.reduction,
                since=begin,
                until=end,
                by_producer=group_by is not None,
                attempt=attempt,
                width=_width(axis, width),
                limit=PAGE_WINDOWS,
            )
            for each in selected
        ]
        pages = _pages(backend, list(zip(selected, queries, strict=True)))
        return StreamingResponse(
            to_csv(pages) if table == "csv" else to_parquet(pages),
            media_type=MEDIA_TYPES[table],
            headers={
                "Content-Disposition": f'attachment; filename="{run}.{table}"',
                "X-Content-Type-Options": "nosniff",
            },
        )

    return routes


def _width(axis: history.Axis, width: int | None) -> int:
    unit = 1 if axis == "step" else BUCKET_S
    if width is not None and width % unit:
        raise HTTPException(422, f"width: {width} is not a multiple of {BUCKET_S} s")
    return width or unit


def _pages(
    backend: Backend, asked: Sequence[tuple[Selected, history.Query]]
) -> Iterator[list[Row]]:
    for selected, query in asked:
        at: Cursor | None = None
        while True:
            # A connection a page, not one for all: however slow the reader is, it holds none.
            with backend.read() as connection:
                run = find_run(connection, selected.run.name)
                if not same_run(run, selected.run):
                    raise RunGoneError(f"run {selected.run.name} was deleted during its export")
                # With the surviving line as it was at the beginning: the pages belong together.
                found = history.history(
                    connection, selected.run, selected.series, on_page(query, at)
                )
            yield list(_rows(selected, query, found))
            at = following(found)
            if at is None:
                break


def _rows(selected: Selected, query: history.Query, found: history.History) -> Iterator[Row]:
    for producer, points in ((None, found.points), *found.by_producer.items()):
        for point in points:
            yield Row(
                run=selected.run.name,
                key=selected.series.key,
                axis=query.axis,
                x=point.x,
                time=models.moment(point.x) if query.axis == "time" else None,
                reduce=selected.reduction,
                value=point.value,
                low=point.low,
                high=point.high,
                nan=point.num_nan,
                pos_inf=point.num_pos_inf,
                neg_inf=point.num_neg_inf,
                producer=producer,
            )
