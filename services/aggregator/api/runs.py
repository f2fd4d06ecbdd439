"""Runs: which there are, who was seen in them, where their groups are; and deleting one."""

from fastapi import APIRouter, HTTPException, Response
from sqlalchemy import Connection

from services.aggregator import overview
from services.aggregator.api import models
from services.aggregator.api.backend import Backend
from services.aggregator.api.problems import documented
from services.aggregator.series import RunRow, find_run


def known_run(connection: Connection, name: str) -> RunRow:
    """The run of this name. Raises HTTPException 404."""
    run = find_run(connection, name)
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
            found = (find_run(connection, name) for name in overview.run_names(connection))
            return models.Runs(
                runs=[
                    _glance(run, overview.attempts(connection, run))
                    for run in found
                    if run is not None
                ]
            )

    @routes.get("/{run}", summary="One run", responses=documented(404))
    def show_run(run: str) -> models.RunDetail:
        with backend.read() as connection:
            found = known_run(connection, run)
            attempts = overview.attempts(connection, found)
            return models.RunDetail(
                **_glance(found, attempts).model_dump(),
                attempts=[
                    models.Attempt(
                        attempt=each.attempt,
                        first_step=each.first_step,
                        last_step=each.last_step,
                        first_seen=models.moment(each.first_s),
                        last_seen=models.moment(each.last_s),
                    )
                    for each in attempts
                ],
                producers=[
                    models.Producer(
                        producer=each.name,
                        service=each.service,
                        first_seen=models.moment(each.first_s),
                        last_seen=models.moment(each.last_s),
                        missing_batches=each.missing_batches,
                    )
                    for each in overview.producers(connection, found)
                ],
            )

    @routes.delete(
        "/{run}",
        summary="Delete a run",
        status_code=204,
        responses=documented(404),
    )
    async def delete_run(run: str) -> Response:
        if not await backend.write(lambda: backend.store.delete_run(run)):
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


def _glance(run: RunRow, attempts: list[overview.Attempt]) -> models.Run:
    newest = attempts[-1] if attempts else None
    return models.Run(
        run=run.name,
        attempt=newest.attempt if newest else None,
        latest_step=newest.last_step if newest else None,
        first_seen=models.moment(run.first_s),
        last_seen=models.moment(run.last_s),
    )
