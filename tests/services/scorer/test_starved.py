"""Three scorers as processes, and reward functions that hold the interpreter far longer than a
claim lasts: what starves a service's renewals where user code shares its process."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from headrace.v1 import rollout_pb2, sample_pb2, status_pb2, status_pb2_grpc

from services.common import config, queue
from services.common.config import Recipe
from services.common.queue import GROUP, QueueClient
from tests.conftest import free_port
from tests.processes import service
from tests.services.scorer.groups import group_of
from tests.services.scorer.starving import letters_for
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

SCORERS = 3

CLAIM_AFTER_S = 5.0

HELD_S = 24.0
"""Processor time wanted of the long search: it lasts 20 s also where the machine has become
quicker."""

SEARCHED_WITHIN_S = 600.0
"""HELD_S of a processor that many others may want."""

HERE = "tests.services.scorer.starving"


@dataclass
class Crew:
    """The scorers of one run, its queue and its aggregator, seen from outside."""

    client: QueueClient
    rest: httpx.AsyncClient
    folders: list[Path]
    processes: "list[subprocess.Popen[bytes]]"
    holders: set[tuple[bytes, bytes, int]]
    """Who was seen to hold an entry of `groups`, and at which delivery."""

    async def put(self, group: rollout_pb2.RolloutGroup) -> None:
        keys, group_id = self.client.keys, group.request.group_id
        await self.client.raw.hset(keys.outstanding, group_id, "groups:g:1|3|")
        fields = {"id": group_id, "n": "1", "data": group.SerializeToString()}
        await self.client.raw.xadd(keys.groups, fields)

    async def ended(self, number: int) -> dict[str, dict[bytes, bytes]]:
        """The entries of `samples` by group, once there are `number`; watches meanwhile who holds
        the groups."""
        keys = self.client.keys
        async with asyncio.timeout(SEARCHED_WITHIN_S):
            while True:
                page = await self.client.raw.xpending_range(keys.groups, GROUP, "-", "+", 99)
                self.holders |= {
                    (each["message_id"], each["consumer"], each["times_delivered"]) for each in page
                }
                found = await self.client.raw.xrange(keys.samples)
                if len(found) >= number:
                    assert len(found) == number
                    assert await self.client.raw.xlen(keys.groups) == 0
                    return {fields[b"id"].decode(): fields for _, fields in found}
                assert all(process.poll() is None for process in self.processes)
                await asyncio.sleep(0.05)

    async def status(self, folder: Path) -> status_pb2.GetStatusResponse:
        port = json.loads((folder / "ports").read_text())["grpc_port"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = status_pb2_grpc.StatusServiceStub(channel)
            request = status_pb2.GetStatusRequest()
            answer: status_pb2.GetStatusResponse = await stub.GetStatus(request, timeout=PATIENCE_S)
            return answer

    async def all_ready(self) -> bool:
        return all([(await self.status(folder)).ready for folder in self.folders])

    def check_first_deliveries(self) -> None:
        """Nobody took over, and nobody was given an entry a second time."""
        assert self.holders
        assert {deliveries for _, _, deliveries in self.holders} == {1}
        assert len(self.holders) == len({entry_id for entry_id, _, _ in self.holders})

    async def measured(self) -> Mapping[str, float]:
        """By key, what the scorers have counted in the only step there is."""
        answer = await self.rest.get("/api/v1/runs/starved/metrics")
        return {each["key"]: each["value"] for each in answer.raise_for_status().json()["metrics"]}

    async def stop(self) -> None:
        """End all as SIGTERM does, what they measured is told then; nothing of theirs is left."""
        parents = [psutil.Process(process.pid) for process in self.processes]
        started = [child for parent in parents for child in parent.children(recursive=True)]
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
        assert not [child for child in started if child.is_running()]


def recipe_of(folder: Path, url: str, *functions: dict[str, Any], timeout_s: float) -> Recipe:
    return Recipe.model_validate(
        {
            "run": "starved",
            "folder": str(folder),
            "data": {"file": "prompts.jsonl"},
            "trainer": {"max_steps": 1, "groups_per_step": 2},
            "rewards": {"functions": list(functions), "workers": 2, "timeout_s": timeout_s},
            "queue": {"url": url, "claim_after_s": CLAIM_AFTER_S},
            "network": {"aggregator": f"127.0.0.1:{free_port()}"},
            "recorder": {"flush_s": 0.2},
        }
    )


@asynccontextmanager
async def crew_of(recipe: Recipe, folder: Path) -> AsyncIterator[Crew]:
    """An aggregator and ready scorers."""
    written = folder / "recipe.toml"
    written.write_text(config.dump_toml(recipe))
    assert recipe.queue.url is not None
    async with AsyncExitStack() as stack:
        client = await queue.connect(recipe.queue.url, run=recipe.run, claim_after_s=CLAIM_AFTER_S)
        stack.push_async_callback(client.close)
        clock = {"attempt": 1, "step": 5, "state": "running", "started_ms": 1}
        await client.raw.hset(client.keys.clock, mapping=clock)

        def start(name: str, *more: str) -> "subprocess.Popen[bytes]":
            (folder / name).mkdir()
            kind, _, number = name.partition("-")
            command = [sys.executable, "-m", f"services.{kind}", str(written), "--replica", number]
            return stack.enter_context(service([*command, *more], folder / name))

        port = recipe.network.aggregator.rpartition(":")[2]
        start(
            "aggregator-0", "--set", f"network.grpc_port={port}", "--set", "aggregator.http_port=0"
        )
        names = [f"scorer-{number}" for number in range(SCORERS)]
        processes = [start(name) for name in names]
        await until(lambda: all((folder / n / "ports").exists() for n in ("aggregator-0", *names)))
        http = json.loads((folder / "aggregator-0" / "ports").read_text())["http_port"]
        rest = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{http}")
        )
        crew = Crew(client, rest, [folder / name for name in names], processes, set())
        async with asyncio.timeout(PATIENCE_S):
            while not await crew.all_ready():  # noqa: ASYNC110 - they are other processes
                await asyncio.sleep(0.1)
        yield crew


def said(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(900)
async def test_a_function_that_holds_the_interpreter_is_called_once(
    valkey_url: str, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    function = {"function": f"{HERE}:holds", "params": {"path": str(calls)}}
    recipe = recipe_of(tmp_path, valkey_url, function, timeout_s=SEARCHED_WITHIN_S)
    letters = letters_for(HELD_S)
    async with crew_of(recipe, tmp_path) as crew:
        await crew.put(group_of("long", "b", group_id="0.0.1.1", row={"letters": letters}))
        await until(calls.exists)
        # Others are scored meanwhile, by whoever is free.
        for number in range(1, 4):
            row = {"letters": 10}
            await crew.put(group_of(f"{number}", "b", group_id=f"0.{number}.1.1", row=row))
        ended = await crew.ended(4)
        # A second scorer that had begun it would end it as late as now.
        await asyncio.sleep(2 * CLAIM_AFTER_S)
        assert len(await crew.ended(4)) == 4
        await crew.stop()
        measured = await crew.measured()
    scored = sample_pb2.ScoredGroup.FromString(ended["0.0.1.1"][b"data"])
    assert [rollout.reward for rollout in scored.rollouts] == [0, 1]
    of_the_long = [line for line in said(calls) if line["group"] == "long"]
    assert [line["what"] for line in of_the_long] == ["begun", "ended"]
    assert of_the_long[1]["held_s"] > 3 * CLAIM_AFTER_S
    assert len(said(calls)) == 2 * 4
    crew.check_first_deliveries()
    assert measured["reward/function_s/holds"] > 0
    for key in ("takeover_total", "redelivered_total", "lost_total"):
        assert f"queue/{key}" not in measured
    print(f"\nheld for {of_the_long[1]['held_s']:.1f} s, claims last {CLAIM_AFTER_S:g} s")


async def test_a_function_that_never_returns_is_cut_off_and_abstains(
    valkey_url: str, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    functions: list[dict[str, Any]] = [
        {"function": f"{HERE}:never_returns", "params": {"path": str(calls)}},
        {"function": f"{HERE}:parses"},
    ]
    # Longer than a claim: it has to be renewed while the function is waited for.
    timeout_s = 1.5 * CLAIM_AFTER_S
    recipe = recipe_of(tmp_path, valkey_url, *functions, timeout_s=timeout_s)
    async with crew_of(recipe, tmp_path) as crew:
        forever = {"forever": True}
        # Another function has something to say of the first, and none of the second.
        await crew.put(group_of("3 a", "1 a", group_id="0.0.1.1", row=forever))
        await crew.put(group_of("no b", "no b", group_id="0.1.1.1", row=forever))
        ended = await crew.ended(2)
        begun = said(calls)
        assert sorted(line["group"] for line in begun) == ["3 a", "no b"]
        assert {line["what"] for line in begun} == {"begun"}
        # Their processes are gone with the calls, and the scorers as ready as before.
        await until(lambda: not any(psutil.pid_exists(line["pid"]) for line in begun))
        assert await crew.all_ready()
        # Each of them has a worker for whatever comes next.
        for number in range(2, 2 + 2 * SCORERS):
            row = {"forever": False}
            await crew.put(group_of("2 c", "5 c", group_id=f"0.{number}.1.1", row=row))
        later = await crew.ended(2 + 2 * SCORERS)
        assert await crew.all_ready()
        await crew.stop()
        measured = await crew.measured()
    partial = sample_pb2.ScoredGroup.FromString(ended["0.0.1.1"][b"data"])
    assert [rollout.reward for rollout in partial.rollouts] == [3, 1]
    verdicts = [[f.HasField("reward") for f in rollout.functions] for rollout in partial.rollouts]
    assert verdicts == [[False, True], [False, True]]
    assert (ended["0.1.1.1"][b"n"], ended["0.1.1.1"][b"reason"]) == (b"0", b"unscored")
    healthy = sample_pb2.ScoredGroup.FromString(later["0.2.1.1"][b"data"])
    assert [rollout.reward for rollout in healthy.rollouts] == [2 + 0, 5 + 1]
    crew.check_first_deliveries()
    assert measured["reward/failed_calls_total"] == 2
    assert measured["reward/unscored_total"] == 2
    assert "queue/takeover_total" not in measured
    log = "".join((folder / "log").read_text() for folder in crew.folders)
    assert f"did not return within {timeout_s:g} s" in log
