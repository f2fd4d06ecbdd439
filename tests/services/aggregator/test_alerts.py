"""Alerts over a real store: they fire once, are kept, end once, and are told."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from services.aggregator import alert_book
from services.aggregator.alert_rules import compile_rules
from services.aggregator.alerts import NO_RULE, RIGHT_AGAIN, RUN_OVER, Watch, watch_once
from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.ingest import Ingest
from services.aggregator.leading import Leading
from services.aggregator.series import RunRow, find_run
from services.aggregator.store import Store
from services.aggregator.webhook import Webhook
from services.common.alerts_config import AlertRule, Alerts
from tests.services.aggregator.asking import strict
from tests.services.aggregator.making import NOW_S, Producer, count, event, observed, ratio
from tests.services.aggregator.receiving import Receiver, receiving

pytestmark = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)

LOW = AlertRule(name="low-reward", key="reward", compare="below", threshold=0.1, for_steps=2)

STUCK_S = 600.0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


def watch(store: Store, settings: Alerts | None = None, *, webhook: Webhook | None = None) -> Watch:
    rules = compile_rules(settings or Alerts(rules=(LOW,)), CATALOGUE)
    return Watch(store, "demo", rules, webhook=webhook, stuck_after_s=STUCK_S)


def look(watched: Watch, *, now_s: float) -> list[alert_book.Call]:
    seen = watched.look(now_s=now_s)
    assert seen is not None
    return watched.note(seen, now_s=now_s)


def run_of(store: Store) -> RunRow:
    with store.engine.begin() as connection:
        run = find_run(connection, "demo")
    assert run is not None
    return run


def firing(store: Store) -> set[str]:
    with store.engine.begin() as connection:
        return set(alert_book.firing(connection, run_of(store).id))


def past(store: Store) -> list[alert_book.Alert]:
    with store.engine.begin() as connection:
        return alert_book.past(connection, run_of(store).id, limit=10)


class Trainer:
    """A trainer whose steps take 10 s each, on the aggregator's clock."""

    def __init__(self, ingest: Ingest) -> None:
        self._ingest = ingest
        self._producer = Producer("trainer-0")
        self.step = 0

    @property
    def now_s(self) -> float:
        return NOW_S + 10.0 * self.step

    def steps(self, number: int, *, reward: float = 1.0, gap: float = 0.0) -> None:
        for _ in range(number):
            self._producer.send(
                self._ingest,
                [
                    ("perf/step_s", observed([10.0])),
                    ("reward", observed([reward])),
                    ("batch/groups_per_step", observed([8.0])),
                    ("policy/logprob_gap_mean/0", ratio(gap, 1.0)),
                    ("queue/waiting/groups", observed([1.0])),
                ],
                step=self.step,
                now_s=self.now_s,
            )
            self.step += 1

    def count(self, key: str, number: float) -> None:
        self._producer.send(self._ingest, [(key, count(number))], step=self.step, now_s=self.now_s)

    def groups(self, *said: tuple[str, str], now_s: float | None = None) -> None:
        self._producer.send(
            self._ingest,
            events=[event(group, state) for group, state in said],
            step=self.step,
            now_s=self.now_s if now_s is None else now_s,
        )


@pytest.fixture
def trainer(ingest: Ingest) -> Trainer:
    return Trainer(ingest)


def test_a_rule_of_the_recipe_fires_once_and_ends_once(store: Store, trainer: Trainer) -> None:
    watched = watch(store)
    trainer.steps(4)
    look(watched, now_s=trainer.now_s)
    assert firing(store) == set()
    trainer.steps(3, reward=0.0)  # the last one is still open
    for _ in range(3):
        look(watched, now_s=trainer.now_s)
        assert firing(store) == {"low-reward"}
    (found,) = _firing(store)
    assert (found.severity, found.value, found.step) == ("warning", 0.0, 6)
    assert found.sentence == "reward (mean) was below 0.1 reward in the last 2 steps; now 0."
    trainer.steps(1)
    look(watched, now_s=trainer.now_s)
    assert firing(store) == {"low-reward"}  # two steps make it right, as two made it wrong
    trainer.steps(2)
    for _ in range(3):
        look(watched, now_s=trainer.now_s)
    assert firing(store) == set()
    (ended,) = past(store)
    assert (ended.name, ended.ended_because, ended.ended_s) == (
        *("low-reward", RIGHT_AGAIN, trainer.now_s),
    )


def _firing(store: Store) -> list[alert_book.Alert]:
    with store.engine.begin() as connection:
        return list(alert_book.firing(connection, run_of(store).id).values())


def test_what_fires_is_still_known_after_a_restart(
    database: str, store: Store, trainer: Trainer
) -> None:
    trainer.steps(6, reward=0.0)
    look(watch(store), now_s=trainer.now_s)
    again = Store.open(database)
    try:
        assert firing(again) == {"low-reward"}
        look(watch(again), now_s=trainer.now_s + 1)
        assert len(_firing(again)) == 1
        assert past(again) == []
        without = watch(again, Alerts())
        look(without, now_s=trainer.now_s + 2)
    finally:
        again.close()
    assert [(each.name, each.ended_because) for each in past(store)] == [("low-reward", NO_RULE)]


def test_two_watchers_at_once_fire_it_once(database: str, store: Store, trainer: Trainer) -> None:
    trainer.steps(6, reward=0.0)
    other = Store.open(database)
    try:
        watches = [watch(store), watch(other)]
        seen = [each.look(now_s=trainer.now_s) for each in watches]
        for each, found in zip(watches, seen, strict=True):
            assert found is not None
            each.note(found, now_s=trainer.now_s)
        assert len(_firing(store)) == 1
    finally:
        other.close()


def test_no_step_for_long_is_a_stall_and_a_step_ends_it(store: Store, trainer: Trainer) -> None:
    watched = watch(store, Alerts(stall_s=100.0, stall_times=20.0))
    trainer.groups(("0.0.1.1", "dispatched"))
    trainer.steps(6)
    last_s = trainer.now_s
    look(watched, now_s=last_s + 150)
    assert firing(store) == set()  # 20 usual steps are 200 s
    look(watched, now_s=last_s + 250)
    assert firing(store) == {"stall"}
    trainer.step += 25
    trainer.steps(1)
    look(watched, now_s=trainer.now_s)
    assert firing(store) == set()


def test_a_run_that_is_over_has_no_alerts(store: Store, trainer: Trainer) -> None:
    watched = watch(store)
    trainer.groups(("0.0.1.1", "dispatched"))
    trainer.steps(6, reward=0.0)
    look(watched, now_s=trainer.now_s + 1000)
    assert firing(store) == {"low-reward", "stall", "stuck-groups"}
    trainer.groups(("0.0.1.1", "trained"))
    look(watched, now_s=trainer.now_s + 1000)
    assert firing(store) == set()
    assert {each.ended_because for each in past(store)} == {RUN_OVER}
    look(watched, now_s=trainer.now_s + 100_000)
    assert firing(store) == set()


def test_the_built_in_alerts_see_what_they_are_for(store: Store, trainer: Trainer) -> None:
    watched = watch(store)
    trainer.groups(("0.0.1.1", "dispatched"), now_s=NOW_S - STUCK_S)
    trainer.steps(7, gap=0.2)
    trainer.count("group/dropped/stale", 30.0)
    trainer.count("nonfinite_total/ratio", 2.0)
    trainer.count("recorder/dropped_total", 5.0)
    look(watched, now_s=trainer.now_s)
    found = {each.name: each for each in _firing(store)}
    assert set(found) == {
        *("disagreement", "dropped-groups", "stuck-groups", "lost-metrics", "not-finite"),
    }
    assert found["dropped-groups"].value == pytest.approx(30 / (30 + 7 * 8))
    assert found["lost-metrics"].value == 5.0
    assert "0.0.1.1 (dispatched)" in found["stuck-groups"].sentence


def test_deltas_that_are_rejected_are_lost_metrics(store: Store, trainer: Trainer) -> None:
    watched = watch(store)
    trainer.steps(3)
    trainer.count("no/such/key", 1.0)
    trainer.steps(1)  # what a batch was refused is recorded with it, and seen at once
    look(watched, now_s=trainer.now_s)
    assert firing(store) == {"lost-metrics"}


def test_a_deleted_run_takes_its_alerts_along(store: Store, trainer: Trainer) -> None:
    watched = watch(store, webhook=Webhook("http://127.0.0.1:9/never"))
    trainer.steps(6, reward=0.0)
    seen = watched.look(now_s=trainer.now_s)
    assert seen is not None
    watched.note(seen, now_s=trainer.now_s)
    assert store.delete_run("demo")
    assert watched.note(seen, now_s=trainer.now_s) == []
    assert watched.look(now_s=trainer.now_s) is None
    trainer.steps(1)
    assert firing(store) == set()
    assert past(store) == []


async def test_a_webhook_is_told_once_of_each_event(
    backend: Backend, trainer: Trainer, receiver: Receiver
) -> None:
    watched = watch(backend.store, webhook=Webhook(receiver.url))
    trainer.steps(6, reward=0.0)
    await at(backend, watched, trainer.now_s)
    await at(backend, watched, trainer.now_s + 1)
    (fired,) = receiver.bodies
    assert (fired["event"], fired["run"], fired["alert"], fired["step"]) == (
        *("fired", "demo", "low-reward", 5),
    )
    assert fired["text"] == f"Run demo, step 5: low-reward (warning). {fired['sentence']}"
    trainer.steps(4)
    await at(backend, watched, trainer.now_s)
    await at(backend, watched, trainer.now_s + 1)
    ended = receiver.bodies[-1]
    assert len(receiver.bodies) == 2
    assert (ended["event"], ended["ended_because"]) == ("ended", RIGHT_AGAIN)
    assert ended["id"] == fired["id"].replace("fired", "ended")
    assert ended["text"] == "Run demo: low-reward has ended after 40 s: it is right again."
    answer = await asked(backend)
    assert answer["firing"] == []
    assert answer["past"][0]["told"] == {"fired": "sent", "ended": "sent"}
    assert (answer["pending_calls"], answer["failed_calls"]) == (0, 0)


async def test_a_webhook_that_is_away_is_called_again_by_another_start(
    database: str, backend: Backend, trainer: Trainer, receiver: Receiver
) -> None:
    hook = Webhook(receiver.url)
    trainer.steps(6, reward=0.0)
    receiver.statuses = [503, 503]
    now_s = trainer.now_s
    with capture_logs() as logs:
        await at(backend, watch(backend.store, webhook=hook), now_s)
        await at(backend, watch(backend.store, webhook=hook), now_s + 4.9)  # its time comes at 5 s
        assert len(receiver.bodies) == 1
        await at(backend, watch(backend.store, webhook=hook), now_s + 5)
        assert (await asked(backend))["pending_calls"] == 1
        await at(backend, watch(backend.store, webhook=hook), now_s + 5 + 20)
    assert len(receiver.bodies) == 3
    assert len({body["id"] for body in receiver.bodies}) == 1
    assert (await asked(backend))["firing"][0]["told"] == {"fired": "sent"}
    told = [each for each in logs if each["event"] == "an alert could not be told"]
    assert [(each["tries"], each["again_in_s"]) for each in told] == [(1, 5.0), (2, 20.0)]
    assert "secret" not in str(logs)


async def test_a_webhook_that_refuses_is_given_up_and_counted(
    backend: Backend, trainer: Trainer, receiver: Receiver
) -> None:
    watched = watch(backend.store, webhook=Webhook(receiver.url))
    trainer.steps(6, reward=0.0)
    receiver.statuses = [404]
    await at(backend, watched, trainer.now_s)
    await at(backend, watched, trainer.now_s + 100)
    assert len(receiver.bodies) == 1
    answer = await asked(backend)
    assert answer["failed_calls"] == 1
    assert answer["firing"][0]["told"] == {"fired": "failed"}
    # That it has ended is told all the same.
    trainer.steps(4)
    await at(backend, watched, trainer.now_s)
    assert [body["event"] for body in receiver.bodies] == ["fired", "ended"]


async def test_tries_are_bounded(backend: Backend, trainer: Trainer, receiver: Receiver) -> None:
    watched = watch(backend.store, webhook=Webhook(receiver.url))
    trainer.steps(6, reward=0.0)
    receiver.statuses = [500] * 100
    for hour in range(40):
        await at(backend, watched, trainer.now_s + 3600.0 * hour, only_calls=True)
    assert len(receiver.bodies) == 7
    assert (await asked(backend))["failed_calls"] == 1


async def test_only_the_leader_of_a_run_looks(backend: Backend, trainer: Trainer) -> None:
    trainer.steps(6, reward=0.0)
    watched = watch(backend.store)
    await at(backend, watched, trainer.now_s, leads=lambda: False)
    assert firing(backend.store) == set()


def test_one_process_leads_until_it_ends(database: str, store: Store) -> None:
    other = Store.open(database)
    try:
        first = Leading(store.engine, "demo", what="alerts")
        second = Leading(other.engine, "demo", what="alerts")
        beside = Leading(other.engine, "demo", what="mirrors")
        alone = database.startswith("sqlite")
        assert first.holds()
        assert first.holds()
        assert second.holds() is alone
        assert beside.holds()
        first.close()
        assert second.holds()
        assert first.holds() is alone
        for each in (first, second, beside):
            each.close()
    finally:
        other.close()


async def at(
    backend: Backend,
    watched: Watch,
    now_s: float,
    *,
    leads: Callable[[], bool] = lambda: True,
    only_calls: bool = False,
) -> None:
    """One look at this time; `only_calls` leaves alone what would have changed since."""
    if only_calls and firing(backend.store):
        with backend.store.engine.begin() as connection:
            calls = alert_book.due(connection, run_of(backend.store).id, now_s=now_s)
        for call in calls:
            failure = watched.send(call)
            await backend.write(partial(watched.tried, call, failure, now_s=now_s))
        return
    await watch_once(watched, write=backend.write, leads=leads, clock=lambda: now_s)


async def asked(backend: Backend) -> Any:
    """What REST says."""
    transport = httpx.ASGITransport(create_app(backend))
    async with httpx.AsyncClient(transport=transport, base_url="http://aggregator") as client:
        return strict(await client.get("/api/v1/runs/demo/alerts"))


def test_a_look_finds_nothing_where_there_is_no_run(store: Store) -> None:
    assert watch(store).look(now_s=NOW_S) is None
