"""The window of a verdict as it is read from the store, and the route that answers with it."""

import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.evidence import COUNTED, POOLED, read_window
from services.aggregator.ingest import Ingest
from services.aggregator.reduce import REDUCTIONS
from services.aggregator.series import find_run
from services.aggregator.store import Store
from services.aggregator.window import STEP_PARTS, Window
from services.common.tokens import Tokens
from tests.services.aggregator.making import Build, Producer, count, observed, ratio

PATH = "/api/v1/runs/demo/verdict"


def of_the_trainer(wait_s: float = 1.9) -> list[tuple[str, Build]]:
    """A step of 3.1 s of which the trainer waits."""
    seconds = {"rollout_wait_s": wait_s, "fwd_bwd_s": 1.0, "optimizer_s": 0.1, "data_s": 0.05}
    return [
        *((f"perf/{part}", observed([value])) for part, value in seconds.items()),
        ("perf/weight_sync_s", observed([0.05])),
        ("batch/groups_per_step", observed([32])),
        ("queue/waiting/groups", observed([0, 1])),
        ("queue/waiting/samples", observed([3, 5])),
        ("pace/outstanding_frac", ratio(40, 160)),
    ]


def of_the_others() -> list[tuple[str, Build]]:
    return [
        ("rollout/slots_busy_frac", ratio(3.0, 3.1)),
        ("rollout/slots_starved_frac", ratio(0.0, 3.1)),
        ("perf/generator_paused_frac", ratio(0.031, 3.1)),
        ("rollout/request_wait_s", observed([0.1] * 32)),
        ("rollout/duration_s", observed([1.0, 3.0])),
        ("rollout/scorer_busy_frac", ratio(0.31, 3.1)),
        ("rollout/score_s", observed([0.01] * 32)),
    ]


def record(ingest: Ingest, steps: Iterable[int], *, attempt: int = 1, step_s: float = 3.1) -> None:
    trainer = Producer("trainer-0", boot_id=f"attempt-{attempt}")
    others = Producer("generator-0", service="generator", boot_id=f"attempt-{attempt}")
    for step in steps:
        lasted = [] if step == 1 else [("perf/step_s", observed([step_s]))]
        trainer.send(ingest, [*of_the_trainer(), *lasted], step=step, attempt=attempt)
        others.send(ingest, of_the_others(), step=step, attempt=attempt)


def read(store: Store, num_steps: int = 20) -> Window:
    with store.engine.begin() as connection:
        run = find_run(connection, "demo")
        assert run is not None
        return read_window(connection, run, num_steps=num_steps)


@pytest.mark.parametrize("reads", [*(f"perf/{part}" for part in STEP_PARTS), *COUNTED.values()])
def test_what_is_read_of_steps_are_observations(reads: str) -> None:
    found = CATALOGUE.find(reads)
    assert found is not None
    assert found.metric.instrument == "observation"


def test_what_is_pooled_has_its_reduction() -> None:
    for key, reduction in POOLED.values():
        found = CATALOGUE.find(key)
        assert found is not None, key
        assert reduction in REDUCTIONS[found.metric.instrument], key


def test_a_window_is_the_last_steps_of_known_length(ingest: Ingest, store: Store) -> None:
    record(ingest, range(1, 31))
    assert [step.step for step in read(store).steps] == list(range(11, 31))
    assert [step.step for step in read(store, 100).steps] == list(range(2, 31))
    found = read(store, 10)
    assert found.steps[0].step_s == 3.1
    assert found.steps[0].rollout_wait_s == 1.9
    assert found.steps[0].straggler_wait_s is None
    assert found.groups_per_step == 32
    assert (found.groups_waiting, found.samples_waiting) == (0.5, 4.0)
    assert found.slots_busy_frac == pytest.approx(3.0 / 3.1)
    assert (found.groups_generated, found.groups_scored) == (320, 320)
    assert found.duration_s == 2.0
    assert (found.score_block_s, found.backpressure_s, found.tool_s) == (None, None, None)


def test_what_counts_is_summed_over_the_window_only(ingest: Ingest, store: Store) -> None:
    record(ingest, range(1, 8))
    generator = Producer("generator-1", service="generator")
    for step in (2, 5, 6):
        generator.send(ingest, [("rollout/score_block_s", count(1.5))], step=step)
    assert read(store, 3).score_block_s == 3.0


def test_steps_that_were_made_again_are_the_later_attempts(ingest: Ingest, store: Store) -> None:
    record(ingest, range(1, 11))
    record(ingest, range(7, 10), attempt=2, step_s=5.0)
    lengths = {step.step: step.step_s for step in read(store, 5).steps}
    assert lengths == {5: 3.1, 6: 3.1, 7: 5.0, 8: 5.0, 9: 5.0}


def test_tools_are_told_apart(ingest: Ingest, store: Store) -> None:
    record(ingest, range(1, 5))
    Producer("generator-1", service="generator").send(
        ingest,
        [
            ("tools/latency_s", observed([1.0, 2.0, 4.0])),
            ("rollout/env_s", observed([1.0, 8.0])),
            ("rollout/env_s/sandbox", observed([3.0, 4.0])),
            ("rollout/env_s/board", observed([2.0])),
            ("tools/search/latency_s", observed([1.0, 2.0])),
            ("tools/run/latency_s", observed([4.0])),
        ],
        step=3,
    )
    assert read(store).tool_latency_s == {"search": 3.0, "run": 4.0}
    assert read(store).environment_s == {"sandbox": 7.0, "board": 2.0}


def test_reward_functions_are_told_apart(ingest: Ingest, store: Store) -> None:
    record(ingest, range(1, 5))
    Producer("scorer-0", service="scorer").send(
        ingest,
        [
            ("reward/function_s/exact_match", observed([0.25] * 4)),
            ("reward/function_s/judge", observed([1.0, 2.0])),
            ("rewards/judge", observed([0.5])),
        ],
        step=3,
    )
    assert read(store).function_s == {"exact_match": 1.0, "judge": 3.0}


async def answer(client: httpx.AsyncClient, query: str = "") -> dict[str, Any]:
    """A good answer, in strict JSON."""
    response = await client.get(f"{PATH}{query}")
    assert response.status_code == 200, response.text

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found: dict[str, Any] = json.loads(response.text, parse_constant=refuse)
    return found


async def test_the_route_answers_in_words_and_numbers(
    client: httpx.AsyncClient, ingest: Ingest
) -> None:
    record(ingest, range(1, 31))
    found = await answer(client, "?speed_up=2")
    assert found["sentence"] == (
        "generation-bound: the trainer waits 61 % of each step (1.9 of 3.1 s); with generation for "
        "free a step would take 1.2 s; 2 times as fast, 1.6 s"
    )
    assert "generator.replicas" in found["knob"]
    assert (found["verdict"], found["confidence"]) == ("generation-bound", "high")
    assert found["share"] == pytest.approx(1.9 / 3.1)
    assert (found["num_steps"], found["first_step"], found["last_step"]) == (20, 11, 30)
    assert found["stages"] == {
        "training_s": pytest.approx(1.2),
        "generation_s": pytest.approx(3.0),
        "scoring_s": pytest.approx(0.31),
    }
    assert found["evidence"][-1] == {
        "key": "rollout/slots_busy_frac",
        "measure": "share of the time",
        "value": pytest.approx(3.0 / 3.1),
        "compare": ">=",
        "threshold": 0.8,
        "holds": True,
    }
    assert (found["missing"], found["unaccounted_share"]) == ([], None)
    fewer = await answer(client, "?window=10")
    assert (fewer["num_steps"], fewer["confidence"]) == (10, "medium")
    assert fewer["step_s_at_speed_up"] is None


async def test_a_run_that_has_just_begun_is_told_so(
    client: httpx.AsyncClient, ingest: Ingest
) -> None:
    record(ingest, [1])
    found = await answer(client)
    assert (found["verdict"], found["num_steps"], found["first_step"]) == (
        "not enough data",
        0,
        None,
    )
    assert (found["share"], found["confidence"], found["evidence"]) == (None, None, [])
    assert found["missing"] == ["perf/step_s"]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/v1/runs/none/verdict", 404, "no run 'none'; runs here: demo"),
        (f"{PATH}?window=0", 422, "window: "),
        (f"{PATH}?window=1001", 422, "window: "),
        (f"{PATH}?window=all", 422, "window: "),
        (f"{PATH}?speed_up=0.5", 422, "speed_up: "),
        (f"{PATH}?speed_up=nan", 422, "speed_up: "),
        (f"{PATH}?speed_up=inf", 422, "speed_up: "),
    ],
)
async def test_mistakes_are_problems(
    client: httpx.AsyncClient, ingest: Ingest, path: str, status: int, says: str
) -> None:
    record(ingest, [1])
    response = await client.get(path)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    assert says in response.json()["detail"]


async def test_the_verdict_needs_the_token(backend: Backend) -> None:
    transport = httpx.ASGITransport(create_app(backend, tokens=Tokens("s3cret")))
    async with httpx.AsyncClient(transport=transport, base_url="http://aggregator") as client:
        assert (await client.get(PATH)).status_code == 401
