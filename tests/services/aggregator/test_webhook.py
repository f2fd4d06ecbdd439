"""Telling a webhook: what is sent, what is tried again, and what is never said."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.aggregator.alert_book import Alert
from services.aggregator.webhook import (
    MAX_TRIES,
    CallFailed,
    Webhook,
    body,
    pause_s,
    webhook_of,
)
from services.common.alerts_config import Alerts
from services.common.errors import UserError
from tests.conftest import free_port
from tests.services.aggregator.receiving import Receiver, receiving

ALERT = Alert(
    id=7,
    name="stall",
    severity="error",
    sentence="No step has ended for 301 s; usual are 1 s.",
    value=301.0,
    step=40,
    fired_s=1_800_000_000.0,
    ended_s=1_800_000_090.0,
    ended_because="it is right again",
    calls={},
)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


def test_the_body_is_for_programs_and_for_chats(receiver: Receiver) -> None:
    Webhook(receiver.url).send(body("demo", ALERT, "fired"))
    assert receiver.bodies == [
        {
            "version": 1,
            "id": "demo/7/fired",
            "event": "fired",
            "run": "demo",
            "alert": "stall",
            "severity": "error",
            "sentence": ALERT.sentence,
            "value": 301.0,
            "step": 40,
            "fired_at": "2027-01-15T08:00:00.000+00:00",
            "ended_at": None,
            "ended_because": None,
            "text": f"Run demo, step 40: stall (error). {ALERT.sentence}",
        }
    ]
    assert receiver.headers[0]["Content-Type"] == "application/json"
    assert receiver.paths == ["/services/secret-key?token=secret"]
    ended = body("demo", ALERT, "ended")
    assert ended["ended_at"] == "2027-01-15T08:01:30.000+00:00"
    assert ended["text"] == "Run demo: stall has ended after 90 s: it is right again."


@pytest.mark.parametrize(
    ("status", "final"),
    [(500, False), (503, False), (429, False), (408, False), (400, True), (404, True), (301, True)],
)
def test_what_may_be_different_the_next_time(receiver: Receiver, status: int, final: bool) -> None:
    receiver.statuses = [status]
    with pytest.raises(CallFailed) as failed:
        Webhook(receiver.url).send({})
    assert failed.value.final is final
    assert str(status) in str(failed.value)
    assert "secret" not in str(failed.value)


def test_a_redirect_is_not_followed(receiver: Receiver) -> None:
    receiver.statuses = [307, 200]
    receiver.location = receiver.url
    with pytest.raises(CallFailed):
        Webhook(receiver.url).send({})
    assert len(receiver.paths) == 1


def test_nobody_there_is_told_without_the_secret() -> None:
    hook = Webhook(f"http://me:secret@127.0.0.1:{free_port()}/services/secret")
    with pytest.raises(CallFailed, match="cannot be reached") as failed:
        hook.send({})
    assert not failed.value.final
    assert "secret" not in str(failed.value)
    assert failed.value.__cause__ is None  # the library's words may hold the URL
    assert failed.value.__suppress_context__
    assert "secret" not in repr(hook)


def test_pauses_grow_and_end() -> None:
    pauses = [pause_s(tries) for tries in range(1, MAX_TRIES + 1)]
    assert pauses == [5.0, 20.0, 80.0, 320.0, 1280.0, 3600.0, None]


def test_the_url_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hook"
    file.write_text("https://hooks.example/services/secret\n")
    found = webhook_of(Alerts(webhook_file=str(file)))
    assert found == Webhook("https://hooks.example/services/secret")
    assert webhook_of(Alerts()) is None
    file.write_text("secret")
    with pytest.raises(UserError, match="holds no http") as refused:
        webhook_of(Alerts(webhook_file=str(file)))
    assert "secret" not in str(refused.value)
    with pytest.raises(UserError, match=r"alerts\.webhook_file: .* cannot be read"):
        webhook_of(Alerts(webhook_file=str(tmp_path / "none")))
