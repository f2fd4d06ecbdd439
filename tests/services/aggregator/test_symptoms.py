"""Faults as they are found in a store: what is planted is what the route answers with."""

from typing import Any

import httpx
import pytest

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.evidence import read_window
from services.aggregator.faults import Symptoms
from services.aggregator.ingest import Ingest
from services.aggregator.series import find_run
from services.aggregator.store import Store
from services.aggregator.symptoms import KEYS, read_symptoms
from tests.services.aggregator.asking import strict
from tests.services.aggregator.making import NOW_S, Build, Producer, count, event, observed, ratio
from tests.services.aggregator.test_evidence import PATH, record


def send(
    ingest: Ingest, name: str, *deltas: tuple[str, Build], step: int = 25, attempt: int = 1
) -> None:
    """More deltas of one process, at a step of the window."""
    sender = Producer(name, service=name.partition("-")[0], boot_id=f"more-{step}-{attempt}")
    sender.send(ingest, deltas, step=step, attempt=attempt)


def read(store: Store, *, now_s: float = NOW_S, stuck_after_s: float = 600.0) -> Symptoms:
    with store.engine.begin() as connection:
        run = find_run(connection, "demo")
        assert run is not None
        window = read_window(connection, run, num_steps=20)
        return read_symptoms(connection, run, window, now_s=now_s, stuck_after_s=stuck_after_s)


async def faults(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    """What the route answers, by name."""
    found: list[dict[str, Any]] = strict(await client.get(PATH))["faults"]
    return {each["name"]: each for each in found}


def test_what_is_read_is_declared() -> None:
    for key in KEYS:
        assert CATALOGUE.find(key) is not None, key


async def test_a_run_without_trouble_has_no_fault(
    client: httpx.AsyncClient, ingest: Ingest
) -> None:
    record(ingest, range(1, 31))
    assert await faults(client) == {}


async def test_a_stale_head_is_seen_by_the_gap_at_lag_0(
    client: httpx.AsyncClient, ingest: Ingest, store: Store
) -> None:
    """Step 3 is the first that has tokens of lag 0. Of the window one step in twenty is at 0.003
    nats and one at 0.5: 100 tokens each."""
    record(ingest, range(1, 31))
    for step, gap in ((3, 0.004), (24, 0.003), (25, 0.5)):
        send(ingest, "trainer-0", ("policy/logprob_gap_mean/0", ratio(100 * gap, 100)), step=step)
    send(ingest, "trainer-0", ("policy/logprob_gap_mean/1", ratio(90.0, 100)), step=26)
    found = read(store)
    assert found.first_gap == pytest.approx(0.004)
    assert found.gap == pytest.approx(0.2515)
    fault = (await faults(client))["engine-disagrees"]
    assert fault["evidence"] == [
        {
            "key": "policy/logprob_gap_mean/0",
            "measure": "mean of the window, nats",
            "value": pytest.approx(0.2515),
            "compare": ">",
            "threshold": pytest.approx(0.012),
            "holds": True,
        }
    ]
    assert "policy/served_version" in fault["knob"]


def test_drops_are_weighed_by_samples(ingest: Ingest, store: Store) -> None:
    record(ingest, range(1, 31))
    drop = ("sample/dropped_tokens_mean", ratio(1800.0, 2.0))
    send(ingest, "trainer-0", drop, ("sample/forwarded_tokens_mean", observed([100.0, 300.0])))
    send(ingest, "trainer-0", ("sample/dropped_tokens_mean", ratio(300.0, 1.0)), step=26)
    # Before the window.
    send(ingest, "trainer-0", ("sample/dropped_tokens_mean", ratio(9e6, 1.0)), step=5)
    found = read(store)
    assert (found.dropped_samples, found.dropped_tokens) == (3.0, 700.0)
    assert (found.trained_samples, found.trained_tokens) == (2.0, 200.0)


async def test_a_function_that_never_answers_is_named(
    client: httpx.AsyncClient, ingest: Ingest, store: Store
) -> None:
    """Of 8 conversations exact_match scores 6, judge none; 2 have no reward at all."""
    record(ingest, range(1, 31))
    send(
        ingest,
        "scorer-0",
        ("reward/function_s/exact_match", observed([0.1])),
        ("reward/function_s/judge", observed([0.1])),
        ("rewards/exact_match", observed([1.0] * 6)),
        ("reward", observed([1.0] * 6)),
        ("reward/unscored_total", count(2)),
        ("reward/failed_calls_total", count(4)),
        ("reward/zero_std_frac", ratio(9.0, 10.0)),
    )
    found = read(store)
    assert found.rewards_given == {"exact_match": 6.0, "judge": 0.0}
    assert (found.scored, found.unscored, found.failed_calls) == (6.0, 2.0, 4.0)
    assert (found.reward, found.zero_signal_frac) == (1.0, 0.9)
    named = await faults(client)
    assert [*named] == ["reward-abstains", "conversations-unscored", "zero-signal"]
    assert "the reward function judge abstains in 100 %" in named["reward-abstains"]["sentence"]
    assert "25 % of the conversations have no reward" in named["conversations-unscored"]["sentence"]


async def test_a_replica_that_lags_is_a_fault_and_the_knob(
    client: httpx.AsyncClient, ingest: Ingest
) -> None:
    """generator-1 makes 4 tokens a second of a busy slot, generator-0 20, at 60 slot-seconds."""
    record(ingest, range(1, 31))
    for name, tokens in (("generator-0", 20 * 30.0 + 20 * 60.0), ("generator-1", 4 * 30.0)):
        slots = ("rollout/slots_busy_frac", ratio(30.0, 31.0))
        send(ingest, name, ("rollout/generated_tok_s", count(tokens)), slots)
    answer = strict(await client.get(PATH))
    assert (answer["verdict"], answer["replica"]) == ("generation-bound", "generator-1")
    assert answer["knob"].startswith("look at generator-1 first, which works at 20 % of the")
    (fault,) = answer["faults"]
    assert (fault["name"], fault["evidence"][0]["value"]) == ("replica-lags", 4.0)


def test_a_replica_that_has_left_is_none_that_lags(ingest: Ingest, store: Store) -> None:
    """generator-1 was heard of last two minutes before all others."""
    record(ingest, range(1, 31))
    for name, version, before_s in (("generator-0", 45, 0.0), ("generator-1", 3, 120.0)):
        Producer(name, service="generator", boot_id="versions").send(
            ingest,
            [("policy/served_version", observed([version]))],
            step=25,
            now_s=NOW_S - before_s,
        )
    assert [each.name for each in read(store).generators] == ["generator-0"]


async def test_a_version_is_known_from_long_before_the_window(
    client: httpx.AsyncClient, ingest: Ingest
) -> None:
    record(ingest, range(1, 31))
    send(ingest, "generator-0", ("policy/served_version", observed([30])), step=29)
    send(ingest, "generator-1", ("policy/served_version", observed([2])), step=2)
    fault = (await faults(client))["replica-lags"]
    assert fault["sentence"] == "generator-1 serves version 2 where another serves 30"


async def test_the_group_that_a_stage_waits_for_is_named_before_the_first_step(
    backend: Backend, ingest: Ingest, store: Store
) -> None:
    """Of three groups two are in flight for more than 600 s, the oldest for 700 s."""
    said = [
        event("0.1.1.1", "dispatched", age_s=700.0, row_index=4, worker="trainer-0"),
        event("0.1.1.1", "generating", age_s=650.0, row_index=4, worker="generator-1"),
        event("0.2.1.1", "dispatched", age_s=610.0, worker="trainer-0"),
        event("0.3.1.1", "dispatched", age_s=10.0, worker="trainer-0"),
    ]
    Producer("trainer-0").send(ingest, events=said)
    found = read(store)
    assert found.stuck is not None
    assert (found.stuck.group_id, found.stuck.state, found.stuck.holder) == (
        "0.1.1.1",
        "generating",
        "generator-1",
    )
    assert (found.stuck.age_s, found.stuck.in_state_s, found.num_stuck) == (700.0, 650.0, 2)
    assert read(store, stuck_after_s=701.0).stuck is None
    transport = httpx.ASGITransport(create_app(backend, clock=lambda: NOW_S))
    async with httpx.AsyncClient(transport=transport, base_url="http://aggregator") as client:
        answer = strict(await client.get(PATH))
    assert answer["verdict"] == "not enough data"
    (fault,) = answer["faults"]
    assert fault["name"] == "stage-stalled"
    assert "group 0.1.1.1 (row 4)" in fault["sentence"]


async def test_what_was_not_taken_is_a_fault(client: httpx.AsyncClient, ingest: Ingest) -> None:
    record(ingest, range(1, 31))
    gap = Producer("scorer-0", service="scorer")
    gap.send(ingest, [("rollout/score_s", observed([0.1]))], step=25, sequence=1)
    gap.send(ingest, [("rollout/score_s", observed([0.1]))], step=25, sequence=4)
    send(
        ingest,
        "aggregator-0",
        ("ingest/rejected/unknown_key", count(5)),
        ("recorder/dropped_total", count(3)),
    )
    fault = (await faults(client))["metrics-lost"]
    assert [(each["key"], each["value"]) for each in fault["evidence"]] == [
        ("ingest/rejected/unknown_key", 5.0),
        ("recorder/dropped_total", 3.0),
        ("ingest/gaps", 2.0),
    ]


def test_steps_that_were_made_again_count_once(ingest: Ingest, store: Store) -> None:
    record(ingest, range(1, 11))
    record(ingest, range(7, 10), attempt=2)
    unscored = ("reward/unscored_total", count(1))
    send(ingest, "scorer-0", unscored, step=8)
    send(ingest, "scorer-0", unscored, step=8, attempt=2)
    assert read(store).unscored == 1.0
