"""The whole trainer on a real queue server, with a real (tiny) model, to its report."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import redis
from transformers import AutoModelForCausalLM

from services.common.errors import Fenced, UserError
from services.common.queue import GROUP
from services.trainer import comparison
from services.trainer.run_queue import RunQueue
from tests.services.trainer.folders import make_folder
from tests.services.trainer.river import River, flowing, recipe_of
from tests.waiting import until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def check_balance(report: dict[str, Any] | None, *, trained: int = 10) -> dict[str, Any]:
    """The promise of every finished run; the report."""
    assert report is not None
    groups = report["groups"]
    ended = groups["trained"] + sum(groups["dropped"].values()) + groups["given_up"]
    assert groups["dispatched"] == ended + groups["rolled_back"]
    assert (groups["in_flight"], groups["trained_twice"]) == (0, 0)
    assert groups["trained"] == trained
    return report


def check_drained(river: River) -> None:
    with redis.Redis.from_url(str(river.recipe.queue.url)) as client:
        keys = river.client.keys
        assert [client.xlen(key) for key in keys.streams] == [0] * 6
        assert client.hlen(keys.outstanding) == 0
        assert client.hget(keys.clock, "state") == b"done"


async def test_a_run_from_the_first_prompt_to_the_report(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url, evaluation={"enabled": True})
    async with flowing(recipe) as river:
        report = check_balance(await river.run())
    check_drained(river)
    assert report["steps"] == 5
    assert report["trained_samples"] == 20
    assert report["groups"]["dropped"] == {}
    assert report["versions_published"] == 6
    assert [v.version for v in river.announced] == [1, 2, 3, 4, 5, 6]
    assert [v.step for v in river.announced] == [0, 1, 2, 3, 4, 5]
    # Only the first version is announced with the proof: the generator served it from then on.
    assert [bool(v.canary.perturbed_logprobs) for v in river.announced] == [True] + [False] * 5
    # Real log-probabilities of the fetched weights: at lag 0 trainer and generator agree.
    assert report["gap_tokens"] > 0
    assert report["max_logprob_gap"] < 1e-4
    assert 0 <= report["staleness_max"] <= 2
    assert report["eval_reward_before"] == report["eval_reward_after"] == 0.5
    assert report["eval_failed"] == 0
    asked = [request for request in river.requests if request.evaluation]
    assert len({request.group_id for request in asked}) == len(asked) >= 4
    assert {request.sampling.num_generations for request in asked} == {1}
    # Every prompt of training is another one, and none is of those held out for evaluation.
    rows = [request.row_index for request in river.requests if not request.evaluation]
    assert len(set(rows)) == len(rows) == 10
    assert max(rows) < 12
    folder = recipe.run_folder
    assert json.loads((folder / "trainer.json").read_text()) == report
    AutoModelForCausalLM.from_pretrained(folder / "model")
    assert river.lifecycle.phase == "complete"
    assert not list(folder.glob("*.tmp"))
    steps = sorted({step for key, _, step in river.recorder.snapshot() if key == "loss"})
    assert steps == [1, 2, 3, 4, 5]


async def test_epochs_end_a_run_with_a_smaller_last_step(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    """Half of 14 prompts, two a step: 7 groups in 4 steps."""
    changes: dict[str, Any] = {"data": {"epochs": 0.5}, "trainer": {"max_steps": None}}
    async with flowing(recipe_of(tmp_path, model, valkey_url, **changes)) as river:
        report = check_balance(await river.run(), trained=7)
    assert report["steps"] == 4
    assert report["versions_published"] == 5


async def test_stale_groups_are_dropped_and_their_prompts_come_again(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    def decide(group_id: str, tries: int) -> int | str:
        late = int(group_id.split(".")[1]) >= 8
        return 1 if late and tries == 0 else ""

    recipe = recipe_of(tmp_path, model, valkey_url, trainer={"max_staleness": 1})
    async with flowing(recipe, decide=decide) as river:
        report = check_balance(await river.run())
    assert report["groups"]["dropped"]["stale"] >= 2
    again = [r.group_id for r in river.requests if r.group_id.startswith("0.8.")]
    assert again[:2] == ["0.8.1.0", "0.8.1.1"]
    dropped = report["groups"]["dropped"]["stale"]
    assert river.counts("sample/dropped_stale_total") == {"": 2 * dropped}
    assert report["staleness_max"] <= 1


async def test_without_staleness_training_still_advances(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url, trainer={"max_staleness": 0})
    async with flowing(recipe) as river:
        report = check_balance(await river.run())
    assert (report["steps"], report["staleness_max"]) == (5, 0)


async def test_a_group_that_fails_three_times_is_given_up_and_the_run_ends(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    def decide(group_id: str, tries: int) -> str:
        return "failed" if group_id.startswith("0.1.") else ""

    changes: dict[str, Any] = {"data": {"epochs": 0.5}, "trainer": {"max_steps": None}}
    recipe = recipe_of(tmp_path, model, valkey_url, **changes)
    async with flowing(recipe, decide=decide) as river:
        report = check_balance(await river.run(), trained=6)
    assert report["groups"]["given_up"] == 1
    assert report["groups"]["dropped"] == {"failed": 2}
    assert river.dispatches["0.1"] == 3
    assert river.counts("group/") == {"dropped/failed": 2, "given_up_total": 1}
    check_drained(river)


async def test_a_run_whose_every_prompt_is_given_up_ends(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    changes: dict[str, Any] = {"data": {"epochs": 0.2}, "trainer": {"max_steps": None}}
    recipe = recipe_of(tmp_path, model, valkey_url, **changes)
    async with flowing(recipe, decide=lambda *_: "failed") as river:
        report = check_balance(await river.run(), trained=0)
    assert (report["steps"], report["groups"]["given_up"]) == (0, 3)
    assert report["versions_published"] == 1


async def test_poison_ends_in_the_dead_letters_and_the_run_goes_on(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    def decide(group_id: str, tries: int) -> str:
        if tries:
            return ""
        return {"0.1": "poison", "0.3": "bad luck"}.get(group_id.rsplit(".", 2)[0], "")

    recipe = recipe_of(tmp_path, model, valkey_url)
    async with flowing(recipe, decide=decide) as river:
        keys = river.client.keys
        await river.client.raw.xadd(keys.samples, {"data": b"no id"})
        report = check_balance(await river.run())
        letters = [fields for _, fields in await river.client.raw.xrange(keys.dead)]
    assert report["groups"]["dropped"] == {"poison": 2}
    assert {letter[b"id"] for letter in letters} == {b"0.1.1.0", b"0.3.1.0", b""}
    by_id = {letter[b"id"]: letter for letter in letters}
    assert by_id[b"0.1.1.0"][b"data"] == b"\xff\xfe no message"
    assert by_id[b"0.1.1.0"][b"reason"].startswith(b"not a ScoredGroup")
    assert (by_id[b""][b"data"], by_id[b""][b"reason"]) == (b"no id", b"no group id")
    assert b"unknown reason 'bad luck'" in by_id[b"0.3.1.0"][b"reason"]
    assert {letter[b"stream"] for letter in letters} == {b"samples"}
    assert {letter[b"deliveries"] for letter in letters} == {b"1"}
    assert river.counts("queue/dead_total") == {"": 3}
    check_drained(river)


async def test_a_step_without_signal_is_empty_and_publishes_nothing(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    def decide(group_id: str, tries: int) -> str:
        return "zero" if int(group_id.split(".")[1]) < 4 else ""

    # Without staleness the groups of a step are exactly those that were dispatched for it.
    # An evaluation at the end waits until the last version has been heard of.
    recipe = recipe_of(
        tmp_path,
        model,
        valkey_url,
        trainer={"max_staleness": 0},
        evaluation={"enabled": True},
    )
    async with flowing(recipe, decide=decide) as river:
        report = check_balance(await river.run())
    assert report["steps"] == 5
    assert report["versions_published"] == 4
    assert [v.step for v in river.announced] == [0, 1, 2, 3]
    assert river.counts("perf/empty_step_total") == {"": 2}
    # Weights that did not move are no step behind: all tokens are of lag 0.
    assert report["gap_tokens"] == report["trained_tokens"] == 6 * 2 * 3
    assert report["max_logprob_gap"] < 1e-4


async def test_a_run_without_any_signal_publishes_its_first_version_only(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url)
    async with flowing(recipe, decide=lambda *_: "zero") as river:
        report = check_balance(await river.run())
    assert (report["steps"], report["versions_published"]) == (5, 1)
    assert report["max_logprob_gap"] is None


async def test_versions_may_come_less_often_than_steps_and_the_last_one_always(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url, trainer={"weight_sync_steps": 2})
    async with flowing(recipe) as river:
        report = check_balance(await river.run())
    assert report["versions_published"] == 4
    assert river.training._store.step_of == {1: 0, 2: 2, 3: 4, 4: 5}
    # Half of the steps were made with weights that no generator has seen.
    assert report["gap_tokens"] < report["trained_tokens"]


async def test_a_group_whose_samples_are_all_too_long_is_dropped_and_not_trained(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    def decide(group_id: str, tries: int) -> str:
        return "long" if group_id.startswith("0.2.") and tries == 0 else ""

    async with flowing(recipe_of(tmp_path, model, valkey_url), decide=decide) as river:
        report = check_balance(await river.run())
    assert report["groups"]["dropped"] == {"oversize": 1}
    assert river.counts("sample/dropped/") == {"oversize": 2}
    # A step that lost a group to it is a smaller step: the run has one more.
    assert report["steps"] == 6


async def test_a_group_that_the_server_has_lost_is_found_and_tried_again(
    valkey_url: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "COMPARE_EVERY_S", 0.1)

    def decide(group_id: str, tries: int) -> str:
        return "lost" if group_id.startswith("0.9.") and tries == 0 else ""

    recipe = recipe_of(tmp_path, model, valkey_url)
    async with flowing(recipe, decide=decide) as river:
        await river.client.raw.hset(river.client.keys.outstanding, "9.9.9.9", "a||")  # a stranger
        report = check_balance(await river.run())
    assert report["groups"]["dropped"] == {"lost": 1}
    assert [r.group_id for r in river.requests if r.group_id.startswith("0.9.")] == [
        "0.9.1.0",
        "0.9.1.1",
    ]
    check_drained(river)


async def test_a_settlement_under_way_is_no_loss(
    valkey_url: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's list is without the group before the trainer's memory is: a comparison between
    the two must not settle it a second time."""
    monkeypatch.setattr(comparison, "COMPARE_EVERY_S", 0.02)
    settle = RunQueue.settle

    async def slow(self: RunQueue, *arguments: Any, **named: Any) -> None:
        await settle(self, *arguments, **named)
        await asyncio.sleep(0.1)

    monkeypatch.setattr(RunQueue, "settle", slow)

    def decide(group_id: str, tries: int) -> str:
        return ("failed", "stale", "poison", "")[
            int(group_id.split(".")[1]) % 4 if not tries else 3
        ]

    recipe = recipe_of(tmp_path, model, valkey_url, trainer={"max_steps": 2})
    async with flowing(recipe, decide=decide) as river:
        report = check_balance(await river.run(), trained=4)
    assert "lost" not in report["groups"]["dropped"]


async def test_strangers_in_the_servers_list_are_removed(
    valkey_url: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "COMPARE_EVERY_S", 0.02)
    recipe = recipe_of(tmp_path, model, valkey_url, trainer={"max_steps": 1000})
    async with flowing(recipe) as river:
        running = asyncio.create_task(river.run())
        await until(lambda: river.requests or running.done())
        keys, raw = river.client.keys, river.client.raw
        await raw.hset(keys.outstanding, "7.7.7.7", "samples:x:1||")
        while await raw.hexists(keys.outstanding, "7.7.7.7"):  # noqa: ASYNC110 - as tests.waiting
            await asyncio.sleep(0.01)
        river.lifecycle.stopping.set()
        assert await running is None


async def test_a_second_entry_of_a_group_is_not_trained_on(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    async with flowing(recipe_of(tmp_path, model, valkey_url), decide=lambda *_: "twice") as river:
        report = check_balance(await river.run())
    assert report["trained_samples"] == 20
    assert river.counts("queue/redelivered_total")[""] >= 9
    check_drained(river)


PUT_BACK = """
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], ARGV[2], '+')) do
  redis.call('XDEL', KEYS[1], entry[1])
  redis.call('XADD', KEYS[1], '*', unpack(entry[2]))
end
"""
"""A held entry and those behind it come anew, in their order."""


async def test_a_held_entry_that_a_server_put_back_is_settled_in_its_new_place(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    """The server goes back to where the group was on its way while the trainer holds it: the entry
    that was held is no more, and another one comes."""
    async with flowing(recipe_of(tmp_path, model, valkey_url)) as river:
        take, put_back = river.training._queue.take, list[str]()
        raw, samples = river.client.raw, river.client.keys.samples

        async def went_back(limit: int, **named: Any) -> Any:
            deliveries = await take(limit if put_back else 1, **named)
            if deliveries and not put_back:
                [held] = deliveries
                await raw.eval(PUT_BACK, 1, samples, GROUP, held.entry_id)
                put_back.append(held.group_id)
            return deliveries

        river.training._queue.take = went_back  # type: ignore[method-assign]
        report = check_balance(await river.run())
    assert (len(put_back), report["trained_samples"]) == (1, 20)
    assert river.counts("queue/redelivered_total") == {"": 1}
    check_drained(river)


async def test_a_held_entry_whose_reading_a_server_forgot_is_still_held(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    """The server goes back to between the group's coming and its reading: the very entry that is
    held is read again."""
    async with flowing(recipe_of(tmp_path, model, valkey_url)) as river:
        take, forgotten = river.training._queue.take, list[str]()
        raw, samples = river.client.raw, river.client.keys.samples

        async def went_back(limit: int, **named: Any) -> Any:
            deliveries = await take(limit if forgotten else 1, **named)
            if deliveries and not forgotten:
                [held] = deliveries
                before = int(held.entry_id.partition("-")[0]) - 1
                await raw.xack(samples, GROUP, held.entry_id)
                await raw.xgroup_setid(samples, GROUP, f"{before}-0")
                forgotten.append(held.group_id)
            return deliveries

        river.training._queue.take = went_back  # type: ignore[method-assign]
        report = check_balance(await river.run())
    assert (len(forgotten), report["trained_samples"]) == (1, 20)
    assert report["groups"]["dropped"] == {}
    assert river.counts("queue/redelivered_total") == {"": 1}
    check_drained(river)


async def test_a_delivery_whose_reply_was_lost_is_trained_all_the_same(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    """The server holds the entry for the trainer, and no read of new ones brings it again."""
    recipe = recipe_of(tmp_path, model, valkey_url, trainer={"max_staleness": 4, "max_steps": 2})
    async with flowing(recipe) as river:
        take, stolen = river.training._queue.take, list[Any]()

        async def lossy(limit: int, **named: Any) -> Any:
            deliveries = await take(limit, **named)
            if deliveries and not stolen:
                stolen.extend(deliveries)
                for delivery in deliveries:  # as if it had never come, and the connection broke
                    river.training._queue._taken[river.client.keys.samples].discard(
                        delivery.entry_id
                    )
                river.trainers.reconnects += 1
                return []
            return deliveries

        river.training._queue.take = lossy  # type: ignore[method-assign]
        report = check_balance(await river.run(), trained=4)
    assert stolen
    assert report["groups"]["dropped"] == {}


async def test_a_stop_ends_early_and_without_a_report(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url, trainer={"max_steps": 1000})
    async with flowing(recipe) as river:
        running = asyncio.create_task(river.run())
        await until(lambda: len(river.announced) > 2 or running.done())
        river.lifecycle.stopping.set()
        assert await running is None
        outstanding = await river.client.raw.hlen(river.client.keys.outstanding)
        state = await river.client.raw.hget(river.client.keys.clock, "state")
    # What was not trained is still in the queue: nothing is acknowledged before it is used.
    assert outstanding > 0
    assert state == b"running"
    assert not (recipe.run_folder / "trainer.json").exists()
    assert not (recipe.run_folder / "model").exists()


@pytest.mark.parametrize("enabled", [True, False])
async def test_a_stop_is_heard_while_the_trainer_waits_for_others(
    valkey_url: str, tmp_path: Path, model: Path, enabled: bool
) -> None:
    """No generator comes: to serve the version that is to be evaluated, or to make a group."""
    recipe = recipe_of(tmp_path, model, valkey_url, evaluation={"enabled": enabled})
    async with flowing(recipe) as river:
        running = asyncio.create_task(river.training.run())
        phase = "waiting for generators to serve version 1" if enabled else "training"
        await until(lambda: river.lifecycle.phase == phase or running.done())
        river.lifecycle.stopping.set()
        assert await asyncio.wait_for(running, 30) is None


async def test_a_trainer_that_was_replaced_ends(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url, trainer={"max_steps": 1000})
    async with flowing(recipe) as river:
        running = asyncio.create_task(river.run())
        await until(lambda: len(river.announced) > 2 or running.done())
        await RunQueue(river.client).start(floor=1, recipe=recipe.identity())
        with pytest.raises(Fenced, match="attempt 1 of run r was replaced"):
            await running
    assert not (recipe.run_folder / "trainer.json").exists()


async def test_a_run_without_its_checkpoints_is_refused(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    """Version numbers would begin again, and groups in the queue name those of the old ones."""
    recipe = recipe_of(tmp_path, model, valkey_url, trainer={"max_steps": 1})
    async with flowing(recipe) as river:
        check_balance(await river.run(), trained=2)
    recipe.run_folder.rename(tmp_path / "old")
    for _ in range(2):
        async with flowing(recipe) as river:
            with pytest.raises(UserError, match=r"^run r is complete in the queue, and its check"):
                await river.run()
    await RunQueue(river.client).start(floor=1, recipe=recipe.identity(), mode="again")
    async with flowing(recipe) as river:
        with pytest.raises(UserError, match=r"^run r has begun in the queue, and its checkpoints"):
            await river.run()


async def test_a_run_of_another_recipe_is_refused(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url)
    async with flowing(recipe) as river:
        await RunQueue(river.client).start(floor=1, recipe="another")
        with pytest.raises(UserError, match=r"^run r exists in the queue with another recipe"):
            await river.run()


async def test_a_failure_beside_the_steps_ends_the_run(
    valkey_url: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: RunQueue) -> None:
        raise RuntimeError("the gauge is broken")

    monkeypatch.setattr(RunQueue, "gauge", broken)
    async with flowing(recipe_of(tmp_path, model, valkey_url)) as river:
        with pytest.raises(RuntimeError, match="the gauge is broken"):
            await river.run()
