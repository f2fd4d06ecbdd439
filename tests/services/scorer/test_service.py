"""The scorer on a real queue server: groups in, scored groups, tombstones and dead letters out."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from headrace.v1 import metrics_pb2, rollout_pb2, sample_pb2

from services.common import queue, streams, workers
from services.common.config import Recipe
from services.common.lifecycle import Lifecycle
from services.common.queue import GROUP, QueueClient
from services.common.recorder import Recorder
from services.common.streams import Stage
from services.scorer import rewards, service
from tests.services.scorer.groups import drops_reasoning, group_of
from tests.services.scorer.measured import values
from tests.waiting import PATIENCE_S, until

HERE = "tests.services.scorer.reward_functions"


def recipe_of(*functions: dict[str, Any] | str, **sections: dict[str, Any]) -> Recipe:
    entries = [{"function": f} if isinstance(f, str) else f for f in functions]
    for entry in entries:
        entry["function"] = entry["function"].replace("HERE", HERE)
    tree: dict[str, Any] = {
        "run": "r",
        "data": {"file": "prompts.jsonl"},
        "trainer": {"max_steps": 1, "groups_per_step": 2},
        "rewards": {"functions": entries, "workers": 2},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Recipe.model_validate(tree)


@pytest.fixture(autouse=True)
def short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop waits for the read under way: a shorter one makes faster tests."""
    monkeypatch.setattr(streams, "BLOCK_S", 0.1)


class EventLog(Recorder):
    """A recorder that keeps the group events for the test."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(
            run="r", producer="scorer-0", service="scorer", settings=recipe.recorder, channel=None
        )
        self.states: list[tuple[str, int]] = []

    def event(self, event: metrics_pb2.GroupEvent) -> None:
        self.states.append((event.group_id, event.state))
        super().event(event)


@dataclass
class River:
    """A queue with a scorer on it, seen from outside."""

    client: QueueClient
    stage: Stage
    recorder: EventLog
    state: Lifecycle
    task: "asyncio.Task[None] | None" = None
    ids: list[str] = field(default_factory=list)

    async def put(self, *groups: rollout_pb2.RolloutGroup) -> None:
        for group in groups:
            await self.put_bytes(group.request.group_id, group.SerializeToString())

    async def put_bytes(self, group_id: str, data: bytes, *, stream: str = "groups") -> None:
        keys = self.client.keys
        if stream == "groups":
            await self.client.raw.hset(keys.outstanding, group_id, "groups:g:1|3|")
        await self.client.raw.xadd(getattr(keys, stream), {"id": group_id, "n": "1", "data": data})

    async def entries(self, stream: str, number: int) -> list[dict[str, bytes]]:
        """The entries of a stream, once there are `number`."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if self.task is not None and self.task.done():
                    self.task.result()
                found = await self.client.raw.xrange(getattr(self.client.keys, stream))
                if len(found) >= number:
                    assert len(found) == number
                    return [{k.decode(): v for k, v in fields.items()} for _, fields in found]
                await asyncio.sleep(0.01)

    async def scored(self, stream: str, number: int) -> list[sample_pb2.ScoredGroup]:
        entries = await self.entries(stream, number)
        return [sample_pb2.ScoredGroup.FromString(entry["data"]) for entry in entries]

    async def num_left(self) -> int:
        return int(await self.client.raw.xlen(self.client.keys.groups))

    async def stop(self) -> None:
        self.state.stopping.set()
        assert self.task is not None
        async with asyncio.timeout(PATIENCE_S):
            await self.task


@asynccontextmanager
async def river(url: str, recipe: Recipe) -> AsyncIterator[River]:
    client = await queue.connect(url, run="r", claim_after_s=recipe.queue.claim_after_s)
    recorder = EventLog(recipe)
    clock = {"attempt": 1, "step": 5, "state": "running", "started_ms": 1}
    await client.raw.hset(client.keys.clock, mapping=clock)
    functions = rewards.resolve(recipe.rewards)
    pool = workers.Pool(recipe.rewards.workers)
    judges = rewards.Judges(functions, pool, timeout_s=recipe.rewards.timeout_s)
    scorer = service.Scorer(recipe, judges=judges, recorder=recorder, producer="scorer-0")
    stage = Stage(
        client,
        name="groups",
        consumer="scorer-0-x",
        settings=recipe.queue,
        capacity=recipe.samples_capacity,
        recorder=recorder,
    )
    state = Lifecycle(service="scorer", replica="0")
    seen = River(client, stage, recorder, state)
    try:
        async with stage:
            work = service.run_stage(scorer, stage, state, max_groups=recipe.scorer.max_groups)
            seen.task = asyncio.create_task(work)
            yield seen
            await seen.stop()
    finally:
        if seen.task is not None:
            seen.task.cancel()
            await asyncio.gather(seen.task, return_exceptions=True)
        await pool.close()
        await client.close()


async def test_a_group_is_scored_and_handed_on(valkey_url: str) -> None:
    recipe = recipe_of("HERE:scripted", {"function": "HERE:length", "weight": 0.0})
    async with river(valkey_url, recipe) as seen:
        await seen.put(group_of("1", "None", "0", "1", num_sequences=2))
        [scored] = await seen.scored("samples", 1)
        [entry] = await seen.entries("samples", 1)
        await seen.stop()
        assert await seen.num_left() == 0
        assert await seen.client.raw.hget(seen.client.keys.outstanding, "0.0.1.0") == (
            b"samples:scorer-0-x:1|3|"
        )
    assert (entry["id"], entry["n"]) == (b"0.0.1.0", b"8")
    # The second conversation has the length's reward of weight 0 only: "sum_present" scores it 0.
    totals = [rollout.reward for rollout in scored.rollouts]
    assert totals == [1, 0, 0, 1]
    assert not scored.rollouts[1].functions[0].HasField("reward")
    assert scored.rollouts[1].functions[1].reward == 4
    assert [rollout.advantage for rollout in scored.rollouts] == pytest.approx([1, -1, -1, 1])
    measured = values(seen.recorder)
    functions = ("reward/function_s/scripted", "reward/function_s/length")
    for key in ("rollout/score_s", "rollout/score_wait_s", *functions):
        number_and_sum = measured[key]
        assert isinstance(number_and_sum, tuple)
        assert number_and_sum[0] == 1
    assert measured["reward/zero_std_frac"] == (0, 1)
    assert measured["reward/unscored_total"] == 0
    stamps = {(attempt, step) for _, attempt, step in seen.recorder.snapshot()}
    assert stamps == {(1, 5)}
    assert seen.recorder.states == [
        ("0.0.1.0", metrics_pb2.GROUP_STATE_SCORING),
        ("0.0.1.0", metrics_pb2.GROUP_STATE_SCORED),
    ]


async def test_abstentions_stay_outside_the_baseline(valkey_url: str) -> None:
    async with river(valkey_url, recipe_of("HERE:scripted")) as seen:
        await seen.put(group_of("1", "None", "0", "1"))
        [scored] = await seen.scored("samples", 1)
    assert [rollout.HasField("reward") for rollout in scored.rollouts] == [True, False, True, True]
    advantages = [rollout.advantage for rollout in scored.rollouts]
    assert advantages == pytest.approx([0.70711, 0, -1.41421, 0.70711], abs=1e-5)
    assert [sample.rollout_id for sample in scored.samples] == [
        "0.0.1.0/0",
        "0.0.1.0/2",
        "0.0.1.0/3",
    ]


async def test_conversations_of_an_environment_are_scored_by_it(valkey_url: str) -> None:
    group = group_of("a", "b", "c", "d")
    for rollout, reward in zip(group.rollouts, (1.0, None, 0.0, 1.0), strict=True):
        rollout.environment = "Guess"
        if reward is not None:
            rollout.environment_reward = reward
    del group.rollouts[0].sequences[:]
    group.rollouts[0].sequences.extend(drops_reasoning())
    del group.rollouts[2].sequences[:]
    recipe = recipe_of("environment", environments={"classes": [{"environment": "games:Guess"}]})
    async with river(valkey_url, recipe) as seen:
        await seen.put(group)
        [scored] = await seen.scored("samples", 1)
        [entry] = await seen.entries("samples", 1)
        await seen.stop()
    assert [rollout.HasField("reward") for rollout in scored.rollouts] == [True, False, True, True]
    advantages = [rollout.advantage for rollout in scored.rollouts]
    assert advantages == pytest.approx([0.70711, 0, -1.41421, 0.70711], abs=1e-5)
    samples = [(sample.rollout_id[-1], sample.index) for sample in scored.samples]
    assert samples == [("0", 0), ("0", 1), ("3", 0)]
    assert {sample.advantage for sample in scored.samples} == {scored.rollouts[0].advantage}
    assert entry["n"] == b"3"
    measured = values(seen.recorder)
    # Once for a conversation, however many sequences it has.
    assert measured["rewards/environment"] == measured["reward"] == (3, 2.0)
    assert measured["reward/unscored_total"] == 1


async def test_groups_of_the_same_prompt_stay_apart(valkey_url: str) -> None:
    async with river(valkey_url, recipe_of("HERE:scripted")) as seen:
        await seen.put(
            group_of("1", "0", group_id="0.0.1.0"), group_of("10", "9", group_id="0.1.1.0")
        )
        scored = await seen.scored("samples", 2)
    advantages = {group.group_id: [r.advantage for r in group.rollouts] for group in scored}
    assert advantages["0.0.1.0"] == pytest.approx([1, -1])
    assert advantages["0.1.1.0"] == pytest.approx([1, -1])


async def test_evaluation_is_scored_apart_and_never_dropped(valkey_url: str) -> None:
    async with river(valkey_url, recipe_of("HERE:scripted")) as seen:
        for row, text in enumerate(("1", "None")):
            group = group_of(text, group_id=f"eval.0.1.{row}", evaluation=True)
            data = group.SerializeToString()
            await seen.put_bytes(group.request.group_id, data, stream="eval_groups")
        scored = await seen.scored("evals", 2)
        entries = await seen.entries("evals", 2)
        await seen.stop()
    assert [entry["n"] for entry in entries] == [b"1", b"1"]
    by_id = {group.group_id: group for group in scored}
    first, second = by_id["eval.0.1.0"], by_id["eval.0.1.1"]
    assert (first.rollouts[0].reward, first.rollouts[0].advantage) == (1, 0)
    assert not second.rollouts[0].HasField("reward")
    assert not any(group.samples for group in scored)
    keys = {key for key in values(seen.recorder) if not key.startswith("queue/")}
    assert keys == set()  # the trainer records what it takes of these
    assert seen.recorder.states == []


async def test_what_can_never_be_processed_goes_to_the_dead_letters(valkey_url: str) -> None:
    broken = group_of("1", "0", group_id="broken")
    broken.rollouts[1].sequences[0].trained_mask = b"\1\0\1\1"
    async with river(valkey_url, recipe_of("HERE:scripted")) as seen:
        await seen.put(group_of("1", "0", group_id="good-1"))
        await seen.put_bytes("garbage", b"\xff\xff\xff")
        await seen.put(broken)
        await seen.put_bytes("swapped", group_of("1", "0", group_id="x").SerializeToString())
        await seen.put(group_of("1", "0", group_id="good-2"))
        dead = await seen.entries("dead", 3)
        tombstones = await seen.entries("samples", 5)
        await seen.stop()
        assert await seen.num_left() == 0
    reasons = {entry["id"].decode(): entry["reason"].decode() for entry in dead}
    assert reasons["garbage"].startswith("not a RolloutGroup")
    assert "its first token is marked as trained" in reasons["broken"]
    assert "its bytes of 'x'" in reasons["swapped"]
    assert {entry["data"] for entry in dead} >= {b"\xff\xff\xff", broken.SerializeToString()}
    ended = {entry["id"].decode(): entry["n"] for entry in tombstones}
    poison = {"garbage": b"0", "broken": b"0", "swapped": b"0"}
    assert ended == {"good-1": b"2", "good-2": b"2"} | poison
    assert values(seen.recorder)["queue/dead_total"] == 3


@pytest.mark.parametrize("value", [[1.0], [1.0] * 5, ["0.7"] * 2, [[1.0], [2.0]]])
async def test_unreadable_rewards_are_refused_once(valkey_url: str, value: Sequence[Any]) -> None:
    recipe = recipe_of({"function": "HERE:returns", "params": {"value": value}})
    async with river(valkey_url, recipe) as seen:
        await seen.put(group_of("a", "b"))
        [letter] = await seen.entries("dead", 1)
        [tombstone] = await seen.entries("samples", 1)
        await seen.stop()
        assert await seen.num_left() == 0
    assert letter["reason"].startswith(b"returns: ")
    assert tombstone["reason"] == b"poison"


async def test_groups_without_a_result_end_as_tombstones(valkey_url: str) -> None:
    async with river(valkey_url, recipe_of("HERE:scripted")) as seen:
        await seen.put(
            group_of("1", group_id="lone"),
            group_of(group_id="empty"),
            group_of("None", "None", "None", group_id="silent"),
            group_of("1", "None", "None", group_id="one"),
            group_of("1", "0", group_id="bare", num_sequences=0),
        )
        tombstones = await seen.entries("samples", 5)
        await seen.stop()
    assert {entry["id"]: entry["reason"] for entry in tombstones} == {
        b"lone": b"failed",
        b"empty": b"failed",
        b"silent": b"unscored",
        b"one": b"unscored",
        b"bare": b"no_trained_tokens",
    }
    measured = values(seen.recorder)
    assert measured["reward/unscored_total"] == 5
    assert measured["reward"] == (3, 2.0)


async def test_a_failing_function_abstains_and_the_service_goes_on(valkey_url: str) -> None:
    async with river(valkey_url, recipe_of("HERE:raises", "HERE:scripted")) as seen:
        await seen.put(*(group_of("1", "0", group_id=str(number)) for number in range(3)))
        scored = await seen.scored("samples", 3)
        await seen.stop()
    assert all([r.reward for r in group.rollouts] == [1, 0] for group in scored)
    assert values(seen.recorder)["reward/failed_calls_total"] == 3


async def test_at_most_max_groups_are_held_at_a_time(valkey_url: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    recipe = recipe_of(
        {"function": "HERE:waits_for_file", "params": {"path": str(go)}},
        scorer={"max_groups": 2},
        rewards={"workers": 4},
    )
    async with river(valkey_url, recipe) as seen:
        await seen.put(*(group_of("a", "b", group_id=str(number)) for number in range(5)))
        await until(lambda: len(list(tmp_path.glob("go.begun-*"))) == 2)
        assert seen.stage.held == 2
        go.touch()
        await seen.entries("samples", 5)


async def test_a_full_queue_holds_the_result_back(valkey_url: str) -> None:
    recipe = recipe_of("HERE:scripted", queue={"samples_capacity": 2})
    async with river(valkey_url, recipe) as seen:
        await seen.put(*(group_of("1", "0", group_id=str(number)) for number in range(3)))
        await until(lambda: "rollout/backpressure_s" in values(seen.recorder))
        first, *_ = await seen.client.raw.xrange(seen.client.keys.samples)
        await seen.client.raw.xdel(seen.client.keys.samples, first[0])
        await seen.entries("samples", 2)
        await until(lambda: not seen.stage.held)
        assert await seen.num_left() == 0


async def test_a_lost_claim_cancels_the_work(valkey_url: str, tmp_path: Path) -> None:
    recipe = recipe_of(
        {"function": "HERE:waits_for_file", "params": {"path": str(tmp_path / "go")}},
        queue={"claim_after_s": 0.3},
        rewards={"workers": 1},
    )
    async with river(valkey_url, recipe) as seen:
        await seen.put(group_of("a", "b"))
        await until(lambda: list(tmp_path.glob("go.begun-*")))
        [entry_id] = [entry_id for _, entry_id in seen.stage._held]
        keys = seen.client.keys
        await seen.client.raw.xclaim(keys.groups, GROUP, "thief", 0, [entry_id])
        await until(lambda: not seen.stage.held)
        await seen.client.raw.xack(keys.groups, GROUP, entry_id)
        await seen.client.raw.xdel(keys.groups, entry_id)
        # Its one worker was in an endless call: the next group is scored all the same.
        await seen.put(group_of("1", "0", group_id="next"))
        (tmp_path / "go").touch()
        [scored] = await seen.scored("samples", 1)
        assert scored.group_id == "next"
        await seen.stop()
    assert values(seen.recorder)["queue/lost_total"] == 1


async def test_a_stop_gives_back_what_cannot_be_finished(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "DRAIN_S", 0.1)
    path = str(tmp_path / "go")
    recipe = recipe_of({"function": "HERE:waits_for_file", "params": {"path": path}})
    async with river(valkey_url, recipe) as seen:
        await seen.put(group_of("a", "b"))
        await until(lambda: list(tmp_path.glob("go.begun-*")))
        await seen.stop()
        keys = seen.client.keys
        [pending] = await seen.client.raw.xpending_range(keys.groups, GROUP, "-", "+", 10)
        assert (pending["consumer"], pending["times_delivered"]) == (b"~returned", 0)
        assert await seen.client.raw.xlen(keys.samples) == 0


async def test_a_stop_lets_what_is_begun_finish(valkey_url: str, tmp_path: Path) -> None:
    path = tmp_path / "go"
    recipe = recipe_of({"function": "HERE:waits_for_file", "params": {"path": str(path)}})
    async with river(valkey_url, recipe) as seen:
        await seen.put(group_of("a", "b"))
        await until(lambda: list(tmp_path.glob("go.begun-*")))
        seen.state.stopping.set()
        path.touch()
        await seen.stop()
        [scored] = await seen.scored("samples", 1)
        assert len(scored.samples) == 2
        assert await seen.num_left() == 0
