"""What fires in a run, and what has fired."""

from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from sqlalchemy import Connection

from services.aggregator import alert_book
from services.aggregator.alert_book import CallState
from services.aggregator.api.backend import Backend
from services.aggregator.api.models import Answer, moment
from services.aggregator.api.parameters import WHOLE
from services.aggregator.api.problems import documented
from services.aggregator.api.runs import known_run
from services.aggregator.series import RunRow

MAX_PAST = alert_book.KEPT
DEFAULT_PAST = 100


class Alert(Answer):
    """An alert, firing or past. Times are the aggregator's."""

    id: int
    name: str
    """The rule's."""
    severity: str
    """warning or error."""
    sentence: str
    """What is wrong, as it was when the alert fired."""
    value: float | None
    """What the rule compared then."""
    step: int
    """The optimizer step that was under way."""
    fired_at: datetime
    ended_at: datetime | None
    """Null while it fires."""
    ended_because: str | None
    told: dict[Literal["fired", "ended"], CallState]
    """Whether the webhook was told of each event; empty where there is none."""

    @classmethod
    def of(cls, found: alert_book.Alert) -> "Alert":
        """From the store's."""
        return cls.model_validate(
            {
                "id": found.id,
                "name": found.name,
                "severity": found.severity,
                "sentence": found.sentence,
                "value": found.value,
                "step": found.step,
                "fired_at": moment(found.fired_s),
                "ended_at": None if found.ended_s is None else moment(found.ended_s),
                "ended_because": found.ended_because,
                "told": dict(found.calls),
            }
        )


class Alerts(Answer):
    """The alerts of a run."""

    run: str
    firing: list[Alert]
    """The one that fired last first."""
    past: list[Alert]
    """Those that have ended, the one that fired last first."""
    failed_calls: int
    """Calls of the webhook that were given up, of the alerts that are kept."""
    pending_calls: int
    """Calls of the webhook that are still to be made, or to be made again."""


def alerts_of(connection: Connection, run: RunRow, *, limit: int = DEFAULT_PAST) -> Alerts:
    """What the endpoint answers, and the stream."""
    calls = alert_book.num_calls(connection, run.id)
    return Alerts(
        run=run.name,
        firing=[Alert.of(each) for each in alert_book.firing(connection, run.id).values()],
        past=[Alert.of(each) for each in alert_book.past(connection, run.id, limit=limit)],
        failed_calls=calls.get("failed", 0),
        pending_calls=calls.get("pending", 0),
    )


def router(backend: Backend) -> APIRouter:
    """The endpoint of alerts."""
    routes = APIRouter(
        prefix="/api/v1/runs", tags=["alerts"], responses=documented(401, 404, 422, 503)
    )

    @routes.get("/{run}/alerts", summary="Alerts, firing and past")
    def alerts(
        run: str,
        limit: Annotated[
            int, Query(ge=0, le=MAX_PAST, description="Past alerts at most."), WHOLE
        ] = DEFAULT_PAST,
    ) -> Alerts:
        with backend.read() as connection:
            return alerts_of(connection, known_run(connection, run), limit=limit)

    return routes
