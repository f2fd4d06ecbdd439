"""Runs: which there are, who was seen in them, where their groups are; keeping and deleting one."""

import asyncio
import math
from typing import Literal

from fastapi import APIRouter, HTTPException, Response
from sqlalchemy import Connection

from services.aggregator import overview, retention
from services.aggregator.api import models
from services.aggregator.api.backend import Backend
from services.aggregator.api.problems import documented
from services.aggregator.series import RunRow, find_run
from services.common.config import RUN_NAME


def known_run(connection: Connection, name: str) -> RunRow:
    """The run of this name. Raises HTTPException 404."""
    run = find_run(connection, name) if RUN_NAME.fullmatch(name) else None
    if run is None:
        names = ", ".join(overview.run_names(connection)[:10]) or "none yet"
        raise HTTPException(404, f"no run {name[:80]!r}; runs here: {names}")
    return run


def router(backend: Backend) -> APIRouter:
    """The endpoints under /api/v1/runs that are about a run as a whole."""
    routes = APIRouter(prefix="/api/v1/runs", tags=["runs"], responses=documented(401, 422, 503))

    @routes.get("", summary="All runs")
    def list_runs() -> models.Runs:
        with backend.read() as connection:
            kept = retention.kept_runs(connection)
            found = (find_run(connection, name) for name in overview.run_names(connection))
            return models.Runs(
                runs=[
                    _glance(connection, run, kept[run.name], default_s=backend.keep_s)
                    for run in found
                    if run is not None
                ]
            )

    def detail(name: str) -> models.RunDetail:
        with backend.read() as connection:
            run = known_run(connection, name)
            kept = retention.kept_runs(connection)[run.name]
            glance = _glance(connection, run, kept, default_s=backend.keep_s)
            return models.RunDetail(
                **glance.model_dump(),
                attempts=[
                    models.Attempt(
                        attempt=each.attempt,
                        first_step=each.first_step,
                        last_step=each.last_step,
                        first_seen=models.moment(each.first_s),
                        last_seen=models.moment(each.last_s),
                    )
                    for each in overview.attempts(connection, run)
                ],
                producers=[
                    models.Producer(
                        producer=each.name,
                        service=each.service,
                        first_seen=models.moment(each.first_s),
                        last_seen=models.moment(each.last_s),
                        missing_batches=each.missing_batches,
                    )
                    for each in overview.producers(connection, run)
                ],
            )

    @routes.get("/{run}", summary="One run", responses=documented(404))
    def show_run(run: str) -> models.RunDetail:
        return detail(run)

    @routes.patch("/{run}", summary="Say how long a run is kept", responses=documented(400, 404))
    async def keep_run(run: str, wish: models.Retention) -> models.RunDetail:
        def keep() -> None:
            with backend.read() as connection:
                known_run(connection, run)
            retention.set_keep(backend.store, run, keep_s=_keep_s(wish.keep_days))

        await backend.write(keep)
        return await asyncio.to_thread(detail, run)

    @routes.delete(
        "/{run}",
        summary="Delete a run",
        status_code=204,
        responses=documented(404),
    )
    async def delete_run(run: str) -> Response:
        named = RUN_NAME.fullmatch(run) is not None
        if not named or not await backend.write(lambda: backend.store.delete_run(run)):
            raise HTTPException(404, f"no run {run[:80]!r}; nothing was deleted")
        return Response(status_code=204)

    @routes.get(
        "/{run}/groups/counts", summary="Where the groups of a run are", responses=documented(404)
    )
    def count_groups(run: str) -> models.GroupCounts:
        with backend.read() as connection:
            counts = overview.group_counts(connection, known_run(connection, run))
            return models.GroupCounts(
                run=run,
                total=counts.total,
                in_flight=counts.in_flight,
                states=counts.states,
                reasons=counts.reasons,
                evaluation=counts.evaluation,
            )

    return routes


def _glance(
    connection: Connection, run: RunRow, kept: retention.Kept, *, default_s: float
) -> models.Run:
    attempts = overview.attempts(connection, run)
    producers = overview.producers(connection, run)
    newest = attempts[-1] if attempts else None
    until_s = kept.until_s(default_s=default_s)
    return models.Run(
        run=run.name,
        attempt=newest.attempt if newest else None,
        latest_step=newest.last_step if newest else None,
        first_seen=models.moment(run.first_s),
        last_seen=models.moment(run.last_s),
        num_producers=len(producers),
        missing_batches=sum(each.missing_batches for each in producers),
        keep_days=_keep_days(kept.keep_s),
        kept_until=models.moment(until_s) if math.isfinite(until_s) else None,
    )


def _keep_s(days: float | Literal["forever"] | None) -> float | None:
    if days is None:
        return None
    return retention.FOREVER_S if days == "forever" else days * retention.DAY_S


def _keep_days(keep_s: float | None) -> float | Literal["forever"] | None:
    if keep_s is None:
        return None
    # Rounded: 3.609 days in seconds and back are 3.6089999999999995.
    return round(keep_s / retention.DAY_S, 9) if math.isfinite(keep_s) else "forever"
