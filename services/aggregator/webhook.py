"""Telling a webhook of an alert: one POST with a JSON body, which chat services take as it is.

The URL opens the webhook, so that nothing of it but the host is ever logged, stored or shown.
"""

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from services.aggregator.alert_book import Alert, Event
from services.common.alerts_config import Alerts, hidden_url, is_web_url
from services.common.errors import UserError
from services.common.secret_keys import read_password

TIMEOUT_S = 10.0
"""Of one call."""

MAX_TRIES = 7
"""Of one call; with the pauses between them about an hour and a half."""

FIRST_PAUSE_S, PAUSE_GROWS, LONGEST_PAUSE_S = 5.0, 4.0, 3600.0
"""After a call that failed; each pause is so many times the one before."""

TRANSIENT = (408, 425, 429)
"""Statuses below 500 that may be different the next time."""


class CallFailed(Exception):
    """A call that was not taken; the message holds nothing of the URL but its host."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final
        """Trying again would change nothing."""


@dataclass(frozen=True, repr=False)
class Webhook:
    """Where alerts are told."""

    url: str

    @property
    def shown(self) -> str:
        """For people and logs."""
        return hidden_url(self.url)

    def __repr__(self) -> str:
        return f"Webhook({self.shown})"

    def send(self, body: dict[str, Any]) -> None:
        """POST a JSON body; blocking, TIMEOUT_S at most for each answer. Raises CallFailed."""
        request = urllib.request.Request(
            self.url,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "headrace"},
            method="POST",
        )
        # What went wrong is told in our words: the library's may repeat the URL.
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S):
                return
        except urllib.error.HTTPError as error:
            final = error.code < 500 and error.code not in TRANSIENT
            error.close()
            raise CallFailed(f"{self.shown} answered {error.code}", final=final) from None
        except urllib.error.URLError as error:
            cause = type(error.reason).__name__ if error.reason is not None else "no reason"
            raise CallFailed(f"{self.shown} cannot be reached ({cause})", final=False) from None
        except (OSError, http.client.HTTPException) as error:
            kind = type(error).__name__
            raise CallFailed(f"{self.shown} did not answer ({kind})", final=False) from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: a POST would go on as a GET, with a secret for somebody else."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Never follow."""


def webhook_of(alerts: Alerts) -> Webhook | None:
    """Where a recipe's alerts are told; None: nowhere. Raises UserError for a file that cannot be
    read or holds no URL."""
    if alerts.webhook_file is None:
        return None if alerts.webhook is None else Webhook(alerts.webhook)
    url = read_password(alerts.webhook_file, key="alerts.webhook_file")
    if not is_web_url(url):
        raise UserError(
            f"alerts.webhook_file: {alerts.webhook_file} holds no http:// or https:// URL"
        )
    return Webhook(url)


def pause_s(tries: int) -> float | None:
    """How long to wait after so many tries have failed; None: no more.

    Example: 5 s after the first, 20 s after the second, 80 s after the third.
    """
    if tries >= MAX_TRIES:
        return None
    return min(FIRST_PAUSE_S * PAUSE_GROWS ** (tries - 1), LONGEST_PAUSE_S)


def body(run: str, alert: Alert, event: Event) -> dict[str, Any]:
    """What is sent. `id` names the event: a call that comes again has the same one. `text` is what
    Slack, Mattermost and others show."""
    ended = event == "ended"
    return {
        "version": 1,
        "id": f"{run}/{alert.id}/{event}",
        "event": event,
        "run": run,
        "alert": alert.name,
        "severity": alert.severity,
        "sentence": alert.sentence,
        "value": alert.value,
        "step": alert.step,
        "fired_at": _time(alert.fired_s),
        "ended_at": _time(alert.ended_s) if ended else None,
        "ended_because": alert.ended_because if ended else None,
        "text": _text(run, alert, event),
    }


def _text(run: str, alert: Alert, event: Event) -> str:
    if event == "fired" or alert.ended_s is None:
        return f"Run {run}, step {alert.step}: {alert.name} ({alert.severity}). {alert.sentence}"
    lasted_s = alert.ended_s - alert.fired_s
    return f"Run {run}: {alert.name} has ended after {lasted_s:.0f} s: {alert.ended_because}."


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
