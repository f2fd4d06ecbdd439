"""SIGTERM to each service as a process, under load: it stops taking, finishes what fits, gives the
rest back to be taken at once, tells what it has measured, and exits 0."""

import asyncio
import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.queue import GROUP
from tests.chaos import witness
from tests.chaos.keeper import Keeper
from tests.chaos.pipeline import Pipeline
from tests.chaos.world import Plan, make_model
from tests.probes import is_healthy
from tests.test_start_order import PATIENCE_S, eventually

pytestmark = pytest.mark.slow

PLAN = Plan(
    num_rows=40,
    epochs=99,
    num_generators=2,
    num_scorers=2,
    num_failing=0,
    num_without_signal=0,
    # Two groups are under way and no more: who is idle takes nothing that it does not take over.
    groups_per_step=2,
    max_staleness=0,
    claim_after_s=60.0,
    max_work_s=600.0,
)
"""A run that does not end by itself, in which nothing is taken over from a worker that merely
fell silent: only what was given back changes hands."""

GRACE_S = 30.0
"""The shortest grace of the deployments."""

SEED = int(os.environ.get("STOP_SEED", "1"))

Held = dict[str, tuple[str, int]]
"""By group, the consumer that holds its entry, and how often it was delivered."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("made") / "model")


def tells_only_at_the_end(keeper: Keeper) -> None:
    """Whatever the aggregator hears of this process it hears because of its end."""
    keeper.argv += ("--set", "recorder.flush_s=3600")


async def started(pipeline: Pipeline, *keepers: Keeper) -> None:
    """Start them, and wait until they are ready."""
    for keeper in keepers:
        keeper.start()

    async def ready(keeper: Keeper) -> bool:
        announced = pipeline.folder / f"{keeper.name}.json"
        return await asyncio.to_thread(announced.exists) and await is_healthy(announced)

    for keeper in keepers:
        await eventually(partial(ready, keeper))


async def held(pipeline: Pipeline, stream: str) -> Held:
    """Who holds which entries of a stream."""
    client: Any = pipeline.client
    found = {}
    for each in await client.xpending_range(stream, GROUP, "-", "+", 99):
        for _, fields in await client.xrange(stream, each["message_id"], each["message_id"]):
            deliveries = each["times_delivered"]
            found[fields[b"id"].decode()] = (each["consumer"].decode(), deliveries)
    return found


async def until_held(pipeline: Pipeline, stream: str, *, by: str, groups: set[str]) -> Held:
    """Once all of `groups` are held by consumers of the service `by`."""
    found: Held = {}

    async def ask() -> bool:
        nonlocal found
        found = await held(pipeline, stream)
        return groups <= {g for g, (who, _) in found.items() if who.startswith(f"{by}-")}

    await eventually(ask)
    return found


async def producers(pipeline: Pipeline) -> dict[str, Any]:
    """By name, who has sent metrics."""
    url = f"http://127.0.0.1:{pipeline.ports.http}/api/v1/runs/{PLAN.run}"
    async with httpx.AsyncClient() as client:
        answer = await client.get(url)
    if answer.status_code == 404:  # nobody has
        return {}
    return {each["producer"]: each for each in answer.raise_for_status().json()["producers"]}


async def handed_over(pipeline: Pipeline, stream: str, first: Keeper, second: Keeper) -> None:
    """`first` holds groups that it cannot finish, `second` nothing: stopped, the one gives back
    what the other takes at once, as if it had never been delivered."""
    before = await held(pipeline, stream)
    assert before
    assert {who.rpartition("-")[0] for who, _ in before.values()} == {first.name}
    assert first.name not in await producers(pipeline)
    assert await first.stop(patience_s=GRACE_S) == 0
    ended_s = time.monotonic()
    after = await until_held(pipeline, stream, by=second.name, groups=set(before))
    # A look for what was given back comes once a second.
    print(f"\n{len(before)} of {stream} taken {time.monotonic() - ended_s:.1f} s after the end")
    assert {deliveries for _, deliveries in (*before.values(), *after.values())} == {1}
    consumers = {each["name"] for each in await pipeline.client.xinfo_consumers(stream, GROUP)}
    assert not [name for name in consumers if name.startswith(f"{first.name}-".encode())]
    sent = (await producers(pipeline))[first.name]
    assert sent["missing_batches"] == 0
    log = first.log.read_text()
    assert '"phase": "draining"' in log
    assert f'"groups": {len(before)}' in log or f'"groups_given_back": {len(before)}' in log


async def test_what_a_generator_holds_another_takes_at_once(model: Path, tmp_path: Path) -> None:
    async with Pipeline(PLAN, tmp_path, model=model) as pipeline:
        first, second = pipeline.generators
        tells_only_at_the_end(first)
        for keeper in (first, second):
            keeper.argv += ("--set", "generation.timeout_s=600")
        pipeline.set_pace(600.0)
        await pipeline.queue.start()
        await started(pipeline, pipeline.aggregator, pipeline.trainer, first)
        await eventually(lambda: held(pipeline, pipeline.keys.requests))
        await started(pipeline, second)
        await handed_over(pipeline, pipeline.keys.requests, first, second)


async def test_what_a_scorer_holds_another_takes_at_once(model: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    function = "tests.services.scorer.reward_functions:waits_for_file"
    slow = f'[{{function="{function}",params={{path="{go}"}}}}]'
    async with Pipeline(PLAN, tmp_path, model=model) as pipeline:
        first, second = pipeline.scorers
        tells_only_at_the_end(first)
        for keeper in (first, second):
            keeper.argv += ("--set", f"rewards.functions={slow}", "--set", "rewards.timeout_s=600")
        await pipeline.queue.start()
        workers = (first, pipeline.generators[0])
        await started(pipeline, pipeline.aggregator, pipeline.trainer, *workers)

        async def both() -> bool:
            return len(await held(pipeline, pipeline.keys.groups)) == PLAN.groups_per_step

        await eventually(both)
        await started(pipeline, second)
        await handed_over(pipeline, pipeline.keys.groups, first, second)
        # The one that took them finishes within its grace what can be finished.
        steps = pipeline.num_steps
        go.touch()
        assert await second.stop(patience_s=GRACE_S) == 0
        assert 'groups_given_back": 0' in second.log.read_text()
        await pipeline.until_steps(steps + 1, patience_s=PATIENCE_S)
        assert pipeline.num_steps == steps + 1


async def test_a_trainer_and_an_aggregator_go_on_where_they_were(
    model: Path, tmp_path: Path
) -> None:
    plan = Plan(**(vars(PLAN) | {"max_staleness": 2, "checkpoint_every_steps": 1000}))
    async with Pipeline(plan, tmp_path, model=model) as pipeline:
        tells_only_at_the_end(pipeline.trainer)
        pipeline.set_pace(0.3)
        await pipeline.start()
        await pipeline.until_steps(3, patience_s=PATIENCE_S)
        assert await pipeline.aggregator.stop(patience_s=GRACE_S) == 0
        (pipeline.folder / "aggregator-0.json").unlink()
        await started(pipeline, pipeline.aggregator)
        steps = pipeline.num_steps
        await pipeline.until_steps(steps + 2)
        assert await pipeline.trainer.stop(patience_s=120.0) == 0
        made = list(witness.steps(pipeline.witnessed()))
        # All its steps are in the checkpoint that it wrote, the first one of this run.
        pipeline.trainer.start()
        await pipeline.until_steps(len(made) + 2, patience_s=PATIENCE_S)
        line = pipeline.witnessed()
        [_, again] = [each for each in line if "restored" in each]
        assert again["restored"] == [1, len(made)]
        assert [step.step for step in witness.steps(line)][: len(made) + 2] == list(
            range(1, len(made) + 3)
        )
        found = await producers(pipeline)
        assert "trainer-0" in found
        assert not [each for each in found.values() if each["missing_batches"]]
        await asyncio.gather(*(keeper.stop(patience_s=GRACE_S) for keeper in pipeline.keepers))
        assert {status for keeper in pipeline.keepers for status in keeper.ends} == {0}


async def test_without_the_queue_server_they_end_all_the_same(model: Path, tmp_path: Path) -> None:
    async with Pipeline(PLAN, tmp_path, model=model) as pipeline:
        await pipeline.start()
        await pipeline.until_steps(2, patience_s=PATIENCE_S)
        await pipeline.queue.kill()
        keepers = (pipeline.trainer, *pipeline.scorers, *pipeline.generators)
        ended = await asyncio.gather(*(keeper.stop(patience_s=GRACE_S) for keeper in keepers))
        assert ended == [0] * len(keepers)


async def test_at_any_moment_of_a_start(model: Path, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    async with Pipeline(PLAN, tmp_path, model=model) as pipeline:
        await pipeline.start()

        async def stop(keeper: Keeper, after_s: float) -> None:
            await asyncio.sleep(after_s)
            status = await keeper.stop(patience_s=GRACE_S)
            # Python itself ends by the signal until the service has said what to do instead.
            early = status == -signal.SIGTERM and '"phase"' not in keeper.log.read_text()
            assert status == 0 or early, (keeper.name, after_s, status)

        moments = [(keeper, chance.uniform(1.0, 15.0)) for keeper in pipeline.keepers]
        print("\n" + " ".join(f"{keeper.name} {after_s:.1f} s" for keeper, after_s in moments))
        await asyncio.gather(*(stop(keeper, after_s) for keeper, after_s in moments))
