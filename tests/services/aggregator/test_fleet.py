"""What scaling rests on as it is read from the store, and the routes that answer with it."""

import dataclasses
import itertools
from typing import Any

import httpx
import pytest

from services.aggregator import fleet
from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.ingest import Ingest
from services.aggregator.series import RunRow, find_run
from services.aggregator.store import Store
from tests.services.aggregator.asking import problem, strict
from tests.services.aggregator.making import NOW_S, Producer, event, observed, ratio

STEP_S = 10.0


class Running:
    """A run of 10 s a step and 32 groups, fed to the store as time goes by."""

    def __init__(self, ingest: Ingest) -> None:
        self.ingest = ingest
        self.now_s = NOW_S
        self.step = 0
        self.trainer = Producer("trainer-0")
        self.groups = itertools.count()
        self.others: dict[str, Producer] = {}

    def steps(self, number: int, *, generators: int, wait_s: float = 6.0, **queue: float) -> None:
        """So many steps, with so many generators."""
        for _ in range(number):
            self.step += 1
            self.now_s += STEP_S
            for name in (f"generator-{n}" for n in range(generators)):
                producer = self.others.setdefault(name, Producer(name, service="generator"))
                producer.send(
                    self.ingest,
                    [
                        ("rollout/slots_busy_frac", ratio(62.0 * STEP_S, 64.0 * STEP_S)),
                        ("rollout/slots_starved_frac", ratio(0.0, 64.0 * STEP_S)),
                        ("perf/generator_paused_frac", ratio(0.1, STEP_S)),
                        ("rollout/request_wait_s", observed([1.0] * (32 // generators))),
                    ],
                    step=self.step,
                    now_s=self.now_s,
                )
            self.looks(**queue)
            deltas = [
                ("perf/rollout_wait_s", observed([wait_s])),
                ("batch/groups_per_step", observed([32.0])),
                *([("perf/step_s", observed([STEP_S]))] if self.step > 1 else []),
            ]
            self.trainer.send(self.ingest, deltas, step=self.step, now_s=self.now_s)

    def looks(self, *, waiting: float = 0.0, held: float = 0.0, full: float = 0.1) -> None:
        """The trainer's look at the queue."""
        deltas = [
            ("queue/waiting/requests", observed([100.0])),
            ("queue/held/requests", observed([16.0])),
            ("queue/waiting/groups", observed([waiting])),
            ("queue/held/groups", observed([held])),
            ("queue/waiting/samples", observed([0.0])),
            ("queue/fill_frac/samples", ratio(full, 1.0)),
        ]
        self.trainer.send(self.ingest, deltas, step=self.step, now_s=self.now_s)

    def groups_are(self, state: str) -> None:
        """One more group, as far as this state."""
        said = event(f"0.{next(self.groups)}.1.1", state)
        self.trainer.send(self.ingest, events=[said], step=self.step, now_s=self.now_s)


@pytest.fixture
def running(ingest: Ingest) -> Running:
    return Running(ingest)


@pytest.fixture
def asked(backend: Backend, running: Running) -> httpx.AsyncClient:
    """The application, at the run's own time."""
    app = create_app(backend, clock=lambda: running.now_s)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://aggregator")


def the_run(store: Store) -> RunRow:
    with store.engine.begin() as connection:
        run = find_run(connection, "demo")
        assert run is not None
        return run


async def generator(client: httpx.AsyncClient, **query: Any) -> Any:
    return strict(await client.get("/api/v1/runs/demo/scale/generator", params=query))


async def scorer(client: httpx.AsyncClient, **query: Any) -> Any:
    return strict(await client.get("/api/v1/runs/demo/scale/scorer", params=query))


async def test_more_generators_where_the_trainer_waits(
    asked: httpx.AsyncClient, running: Running
) -> None:
    running.steps(12, generators=2)
    answer = await generator(asked)
    assert (answer["live"], answer["replicas"], answer["num_steps"]) == (2, 4, 11)
    assert answer["needed_groups_per_s"] == pytest.approx(8.0)
    assert answer["produced_groups_per_s"] == pytest.approx(3.2)
    assert answer["producing"] == pytest.approx(2.0)
    assert all(each["holds"] for each in answer["evidence"])
    # Replicas that joined in mid-window count for as long as they have served.
    running.steps(6, generators=4)
    answer = await generator(asked)
    assert (answer["live"], answer["num_steps"]) == (4, 17)
    assert answer["producing"] == pytest.approx((11 * 2 + 6 * 4) / 17)
    assert (await generator(asked, window_s=50))["producing"] == pytest.approx(4.0)


async def test_the_window_is_of_time_and_of_three_steps_at_least(
    asked: httpx.AsyncClient, running: Running, store: Store
) -> None:
    running.steps(12, generators=2)
    assert (await generator(asked, window_s=60))["num_steps"] in (6, 7)  # by 10 s
    running.now_s += 45.0
    assert (await generator(asked, window_s=10))["num_steps"] == 3
    with store.engine.begin() as connection:
        ended_s = fleet.ended_s(connection, the_run(store))
    assert ended_s is not None
    assert running.now_s - 45.0 <= ended_s + 10.0 <= running.now_s - 25.0
    running.now_s += 300.0
    answer = await generator(asked)
    assert answer["replicas"] == 2
    assert "the last step ended" in answer["reason"]


async def test_who_has_left_is_not_live_and_who_came_changes_it(
    asked: httpx.AsyncClient, running: Running
) -> None:
    running.steps(3, generators=3, wait_s=0.0)
    begun_s = running.now_s
    running.steps(5, generators=2, wait_s=0.0)
    assert (await generator(asked))["live"] == 3  # 50 s silent: not gone yet
    running.steps(3, generators=2, wait_s=0.0)
    answer = await generator(asked)
    assert (answer["live"], answer["replicas"]) == (2, 2)
    assert answer["unchanged_s"] == pytest.approx(running.now_s - begun_s, abs=2.0)


async def test_one_fewer_after_a_calm_time(asked: httpx.AsyncClient, running: Running) -> None:
    running.steps(20, generators=2, wait_s=0.0)
    assert (await generator(asked, calm_s=100))["replicas"] == 2  # no slot was free
    for name in ("generator-0", "generator-1"):
        starved = [("rollout/slots_starved_frac", ratio(1e6, 1e6))]
        running.others[name].send(running.ingest, starved, step=running.step, now_s=running.now_s)
    assert (await generator(asked, calm_s=100))["replicas"] == 1
    assert (await generator(asked))["replicas"] == 2  # by default an hour has to pass


async def test_a_run_that_has_begun_or_is_over(asked: httpx.AsyncClient, running: Running) -> None:
    assert "no run 'demo'" in await problem(asked, "/api/v1/runs/demo/scale/generator", 404)
    assert "no run 'demo'" in await problem(asked, "/api/v1/runs/demo/scale/scorer", 404)
    running.looks()
    answer = await generator(asked)
    assert (answer["live"], answer["replicas"]) == (0, 1)
    running.groups_are("trained")
    running.steps(4, generators=1)
    running.now_s += 400.0
    assert (await generator(asked))["replicas"] == 0
    # An evaluation: the trainer looks at the queue, and no group of training is under way.
    running.looks()
    assert (await generator(asked))["replicas"] == 1
    # A trainer that is away while groups are under way.
    running.groups_are("dispatched")
    running.now_s += 400.0
    assert (await generator(asked))["replicas"] == 1


async def test_all_are_live_while_nobody_has_reported_to_an_aggregator_that_was_away(
    asked: httpx.AsyncClient, running: Running
) -> None:
    running.steps(12, generators=3, wait_s=0.0)
    running.now_s += 1000.0
    assert (await generator(asked))["live"] == 3


async def test_scorers_by_what_waits_and_what_is_held(
    asked: httpx.AsyncClient, running: Running
) -> None:
    running.looks(waiting=1.0)
    answer = await scorer(asked)
    assert (answer["live"], answer["replicas"], answer["waiting_groups"]) == (0, 1, 1.0)
    for name in ("scorer-0", "scorer-1"):
        producer = Producer(name, service="scorer")
        producer.send(running.ingest, [("rollout/score_s", observed([0.1]))], now_s=running.now_s)
    running.looks(waiting=20.0, held=16.0)
    answer = await scorer(asked)
    assert (answer["live"], answer["replicas"], answer["held_groups"]) == (2, 5, 16.0)
    assert (await scorer(asked, max_groups=72))["replicas"] == 1
    running.now_s += 30.0
    running.looks(held=0.0)
    answer = await scorer(asked)
    assert (answer["replicas"], answer["peak_groups"]) == (2, 36.0)
    running.now_s += 90.0
    running.looks(waiting=0.0)
    assert (await scorer(asked))["replicas"] == 0


async def test_scorers_where_the_rollout_queue_is_full_or_nobody_looks(
    asked: httpx.AsyncClient, running: Running
) -> None:
    Producer("scorer-0", service="scorer").send(
        running.ingest, [("rollout/score_s", observed([0.1]))], now_s=running.now_s
    )
    running.looks(waiting=64.0, full=1.0)
    answer = await scorer(asked)
    assert (answer["replicas"], answer["held_back"]) == (1, True)
    running.now_s += 400.0
    answer = await scorer(asked)
    assert (answer["replicas"], answer["peak_groups"], answer["held_back"]) == (8, None, False)


async def test_the_aggregators_own_run_needs_no_name(backend: Backend, running: Running) -> None:
    running.steps(3, generators=1)
    other = dataclasses.replace(backend, run="demo")
    for served, status in ((other, 200), (dataclasses.replace(backend, run="other"), 404)):
        app = httpx.ASGITransport(create_app(served, clock=lambda: running.now_s))
        async with httpx.AsyncClient(transport=app, base_url="http://aggregator") as client:
            for service in ("generator", "scorer"):
                answer = await client.get(f"/api/v1/runs/-/scale/{service}")
                assert answer.status_code == status, answer.text
                assert status == 404 or answer.json()["run"] == "demo"


@pytest.mark.parametrize("query", ["window_s=9", "calm_s=0", "window_s=1.5", "windows=3"])
async def test_what_cannot_be_asked(asked: httpx.AsyncClient, running: Running, query: str) -> None:
    running.looks()
    await problem(asked, f"/api/v1/runs/demo/scale/generator?{query}", 422)
    await problem(asked, "/api/v1/runs/-/scale/generator", 404)
