"""The application: probes, the REST endpoints, and their documentation."""

import asyncio
import time
from collections.abc import Callable
from importlib.metadata import version

from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError

from services.aggregator.api import (
    access,
    alerts,
    docs,
    export,
    histories,
    ledger,
    metrics,
    page,
    parameters,
    problems,
    prometheus,
    prometheus_query,
    recipes,
    rollouts,
    runs,
    scale,
    stream,
    verdict,
)
from services.aggregator.api.backend import Backend
from services.aggregator.api.limits import Limits
from services.aggregator.promql.names import Names
from services.common.config import Network
from services.common.tokens import Tokens

PROBE_S = 2.0
"""A store that has not written one row within this time is not ready."""


def create_app(
    backend: Backend,
    *,
    tokens: Tokens | None = None,
    needs_certificate: bool = False,
    max_requests_per_s: float = Network().max_requests_per_s,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The aggregator's HTTP side; `clock` tells seconds since 1970.

    With tokens all data needs one, with `needs_certificate` and without tokens a client's
    certificate; /healthz, /readyz and what is the same for everyone (the page, /docs,
    /openapi.json) do not.
    """
    app = FastAPI(
        title="Headrace aggregator",
        version=version("headrace"),
        description=(
            "Metrics, history and answers about runs. "
            "[What each metric means, and how to read them together](docs/metrics)."
        ),
        docs_url=None,
        redoc_url=None,
    )
    problems.install(app)
    app.add_middleware(Limits, per_s=max_requests_per_s)
    docs.install(app, backend.catalogue)
    app.include_router(page.router())
    app.include_router(_probes(backend))
    allowed = access.check(tokens, needs_certificate=needs_certificate)
    needs_token = [Depends(allowed)]
    checks = [*needs_token, Depends(parameters.refuse_unknown)]
    for part in (runs, recipes, metrics, histories, export, stream, rollouts):
        app.include_router(part.router(backend), dependencies=checks)
    app.include_router(alerts.router(backend), dependencies=checks)
    app.include_router(verdict.router(backend, clock=clock), dependencies=checks)
    app.include_router(scale.router(backend, clock=clock), dependencies=checks)
    # After those of runs: groups/counts is no group.
    app.include_router(ledger.router(backend, clock=clock), dependencies=checks)
    names = Names(backend.catalogue)
    # Prometheus and Grafana may send more parameters than we know.
    for shown in (prometheus, prometheus_query):
        app.include_router(shown.router(backend, names, clock=clock), dependencies=needs_token)
    return app


def _probes(backend: Backend) -> APIRouter:
    routes = APIRouter(tags=["probes"])

    @routes.get("/healthz", summary="The process answers")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/readyz", summary="The store can be written", responses=problems.documented(503))
    async def readyz() -> JSONResponse:
        try:
            await asyncio.wait_for(backend.write(backend.store.probe), PROBE_S)
        except TimeoutError:
            return problems.answer(503, f"the store has not written for {PROBE_S} s")
        except SQLAlchemyError as error:
            cause = getattr(error, "orig", None) or error
            return problems.answer(503, f"the store cannot be written: {cause}")
        return JSONResponse({"status": "ready"})

    return routes
