"""Live updates of a run as server-sent events."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Header, Query
from fastapi.concurrency import iterate_in_threadpool
from fastapi.sse import EventSourceResponse, ServerSentEvent
from sqlalchemy.exc import SQLAlchemyError

from services.aggregator.api import parameters
from services.aggregator.api.backend import Backend
from services.aggregator.api.feed import Feed, Message
from services.aggregator.api.problems import documented
from services.aggregator.api.runs import known_run
from services.aggregator.api.selection import select_series
from services.aggregator.changes import newest_revision

POLL_S = 1.0
"""How often the store is asked for news; recorders send about as often."""

ABOUT = """Points by step of the surviving line, by each metric's default reduction, as they are
recorded. Read it with `fetch()`, which can send the bearer token; `EventSource` cannot.

- `event: line`, first and whenever a new attempt makes steps again: which attempt each step belongs
  to. Forget points of other attempts.
- `event: points`: `{"revision": 7, "series": [{"key": "loss", "attempt": 1, "points": [{"x": 40,
  "value": 0.5}]}]}`. A point replaces the one of the same key and step: a late report amends its
  step.
- `event: alerts`: what `/alerts` answers, whenever an alert has fired or ended, and first where the
  run has had any.
- `event: gone`, last: the run has been deleted.

The `id` of each event is a revision. To resume, send the last one as the header `Last-Event-ID` (or
as `after`): everything that has changed since follows; everything that there is, if the store does
not know any more what has (after ten minutes), or with `after=0`. A new listener begins without it,
waits for the first event, and then reads the histories that it shows: nothing is missing between
the two.

A comment is sent after 15 s without an event. The stream ends when the server ends; resume it then.
"""


def router(backend: Backend) -> APIRouter:
    """The endpoint that streams."""
    routes = APIRouter(
        prefix="/api/v1/runs", tags=["stream"], responses=documented(401, 404, 422, 503)
    )

    def opened(
        run: str,
        key: Annotated[
            list[str] | None,
            Query(description="A metric; repeat it for several. By default all of the run."),
        ] = None,
        after: Annotated[
            int | None,
            Query(
                ge=0,
                le=parameters.MAX_POSITION,
                description="A revision: send what has changed since. By default only what is new "
                "from now on.",
            ),
            parameters.WHOLE,
        ] = None,
        last_event_id: Annotated[
            int | None,
            Header(
                alias="Last-Event-ID",
                ge=0,
                le=parameters.MAX_POSITION,
                description="The id of the last event that was received; counts more than after.",
            ),
            parameters.WHOLE,
        ] = None,
    ) -> Feed:
        since = after if last_event_id is None else last_event_id
        with backend.read() as connection:
            found = known_run(connection, run)
            keys = list(dict.fromkeys(key or ()))
            select_series(connection, [found], keys, catalogue=backend.catalogue, reduce=None)
            if since is None:
                since = newest_revision(connection)
        return Feed(backend, found, revision=since, keys=keys)

    @routes.get(
        "/{run}/stream",
        summary="Live updates",
        description=ABOUT,
        response_class=EventSourceResponse,
    )
    async def stream(feed: Annotated[Feed, Depends(opened)]) -> AsyncIterator[ServerSentEvent]:
        while not feed.over and not backend.draining.is_set():
            try:
                async for message in iterate_in_threadpool(feed.news()):
                    yield _event(message)
            except SQLAlchemyError as error:
                # The answer has begun: no status can say it any more. The listener resumes.
                cause = getattr(error, "orig", None) or error
                structlog.get_logger().error("the store failed; a stream ends", cause=str(cause))
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(backend.draining.wait(), POLL_S)

    return routes


def _event(message: Message) -> ServerSentEvent:
    return ServerSentEvent(
        event=message.event,
        id=str(message.revision),
        raw_data=message.data.model_dump_json(exclude_defaults=True),
    )
