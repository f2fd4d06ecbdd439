"""Traced conversations by REST: lists with filters and pages, and one whole."""

from typing import Any

import httpx
import pytest

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.ingest import Ingest
from services.common.tokens import Tokens
from tests.services.aggregator.asking import problem, strict
from tests.services.aggregator.making import NOW_S, Producer, event
from tests.services.aggregator.traced import send, trace_of

ROLLOUTS = "/api/v1/runs/demo/rollouts"


async def names(client: httpx.AsyncClient, **wanted: Any) -> list[str]:
    answer = strict(await client.get(ROLLOUTS, params=wanted))
    return [each["rollout_id"] for each in answer["rollouts"]]


async def test_a_list_shows_what_a_conversation_was_worth_and_where_its_group_is(
    client: httpx.AsyncClient, ingest: Ingest
) -> None:
    Producer("trainer-0").send(ingest, events=[event("0.0.1.1", "trained", step=3, age_s=5.0)])
    send(
        ingest,
        trace_of(tools=["add"], rewards={"exact": 1.0, "short": None}),
        trace_of("0.1.1.1/2"),
    )
    answer = strict(await client.get(ROLLOUTS))
    assert (answer["run"], answer["next_page_token"]) == ("demo", None)
    unknown, trained = answer["rollouts"]
    assert trained == {
        "rollout_id": "0.0.1.1/0",
        "group_id": "0.0.1.1",
        "row_index": 17,
        "version": 3,
        "newest_version": 4,
        "end": "stop",
        "at": "2027-01-15T07:59:59Z",
        "reward": 1.0,
        "rewards": {"exact": 1.0, "short": None},
        "advantage": 0.5,
        "tools": {"add": 1},
        "num_turns": 1,
        "num_generated_tokens": 2,
        "num_trained_tokens": 2,
        "duration_s": 2.5,
        "generator": "generator-0",
        "scorer": "scorer-0",
        "state": "trained",
        "reason": "",
        "step": 3,
    }
    assert (unknown["rollout_id"], unknown["state"], unknown["step"]) == ("0.1.1.1/2", None, None)


async def test_one_is_shown_whole(client: httpx.AsyncClient, ingest: Ingest) -> None:
    trace = trace_of(tools=["add"], text="Fo ur.")
    trace.rollout.environment, trace.rollout.environment_reward = "maze", 0.0
    trace.rollout.completion[0].tool_calls.add(id="1", name="add", arguments_json='{"a": 1}')
    trace.rollout.completion.add(role="tool", content="4", tool_call_id="1", name="add")
    send(ingest, trace)
    whole = strict(await client.get(f"{ROLLOUTS}/0.0.1.1/0"))
    assert strict(await client.get(f"{ROLLOUTS}/0.0.1.1%2F0")) == whole
    [listed] = strict(await client.get(ROLLOUTS))["rollouts"]
    assert {key: whole[key] for key in listed} == listed
    no_calls = {"reasoning": "", "tool_calls": [], "tool_call_id": "", "name": ""}
    assert whole["prompt"] == [{"role": "user", "content": "2 + 2 =", **no_calls}]
    asked = [{"id": "1", "name": "add", "arguments_json": '{"a": 1}'}]
    assert whole["completion"] == [
        {"role": "assistant", "content": "Fo ur.", **no_calls, "tool_calls": asked},
        {"role": "tool", "content": "4", **no_calls, "tool_call_id": "1", "name": "add"},
    ]
    [turn] = whole["turns"]
    assert (turn["begin_s"], turn["duration_s"], turn["finish_reason"]) == (0.0, 2.0, "stop")
    assert turn["calls"] == [
        {
            "name": "add",
            "arguments": '{"a": 1}',
            "text": "4",
            "failed": False,
            "declared": True,
            "by_environment": False,
            "duration_s": 0.25,
        }
    ]
    assert whole["sequences"] == [
        {
            "token_ids": [5, 6, 7, 8],
            "texts": ["2+", "2=", "Fo", "ur."],
            "trained": [False, False, True, True],
            "logprobs": [None, None, -0.5, -0.25],
            "spans": [
                {"version": 3, "start": 2, "end": 3},
                {"version": 4, "start": 3, "end": 4},
            ],
        }
    ]
    assert (whole["environment"], whole["environment_reward"]) == ("maze", 0.0)


async def test_log_probabilities_of_context_are_absent_whatever_they_are(
    client: httpx.AsyncClient, ingest: Ingest
) -> None:
    trace = trace_of()
    sequence = trace.rollout.sequences[0]
    sequence.logprobs = b"\0\0\xc0\x7f" + sequence.logprobs[4:]  # NaN
    assert send(ingest, trace).rejected == ()
    whole = strict(await client.get(f"{ROLLOUTS}/0.0.1.1/0"))
    assert whole["sequences"][0]["logprobs"] == [None, None, -0.5, -0.25]
    assert whole["environment_reward"] is None


async def test_filters_and_pages_go_together(client: httpx.AsyncClient, ingest: Ingest) -> None:
    for number in range(7):
        send(
            ingest,
            trace_of(f"0.{number}.1.1/0", version=number, reward=number % 2, tools=["add"]),
            now_s=NOW_S + number,
        )
    odd = [f"0.{number}.1.1/0" for number in (5, 3, 1)]
    assert await names(client, reward_min=0.5) == odd
    assert await names(client, function="exact", reward_min=1, tool="add", end="stop") == odd
    assert await names(client, version=3) == odd[1:2]
    assert await names(client, version=3, reward_max=0.5) == []
    first = strict(await client.get(ROLLOUTS, params={"reward_min": 0.5, "limit": 2}))
    assert [each["rollout_id"] for each in first["rollouts"]] == odd[:2]
    token = first["next_page_token"]
    assert await names(client, reward_min=0.5, limit=2, page_token=token) == odd[2:]
    exactly = strict(await client.get(ROLLOUTS, params={"reward_min": 0.5, "limit": 3}))
    assert exactly["next_page_token"] is None


@pytest.mark.parametrize(
    ("path", "status", "why"),
    [
        ("/api/v1/runs/none/rollouts", 404, "no run"),
        (f"{ROLLOUTS}/0.9.1.1/0", 404, "no trace of conversation '0.9.1.1/0' is kept of run demo"),
        (f"{ROLLOUTS}?page_token=x", 422, "page_token"),
        (f"{ROLLOUTS}?reward_min=nan", 422, "reward_min"),
        (f"{ROLLOUTS}?reward_min=inf", 422, "reward_min"),
        (f"{ROLLOUTS}?end=tired", 422, "end"),
        (f"{ROLLOUTS}?limit=201", 422, "limit"),
        (f"{ROLLOUTS}?policy=3", 422, "is no parameter"),
    ],
)
async def test_what_cannot_be_answered_says_so(
    client: httpx.AsyncClient, ingest: Ingest, path: str, status: int, why: str
) -> None:
    send(ingest, trace_of())
    assert why in await problem(client, path, status)


async def test_what_was_said_needs_the_token(backend: Backend, ingest: Ingest) -> None:
    send(ingest, trace_of())
    transport = httpx.ASGITransport(create_app(backend, tokens=Tokens("s3cret")))
    async with httpx.AsyncClient(transport=transport, base_url="http://aggregator") as client:
        for path in (ROLLOUTS, f"{ROLLOUTS}/0.0.1.1/0"):
            assert (await client.get(path)).status_code == 401
            allowed = {"Authorization": "Bearer s3cret"}
            assert (await client.get(path, headers=allowed)).status_code == 200
