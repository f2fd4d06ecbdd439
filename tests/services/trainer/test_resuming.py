"""Runs whose trainer ends before them and starts again, on a real queue server with a real (tiny)
model."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from headrace.v1 import metrics_pb2 as wire
from safetensors.torch import load_file

from services.common.config import Recipe
from services.common.errors import UserError
from services.common.partials import Observation
from services.trainer.checkpoint import Checkpoints
from services.trainer.run_queue import RunQueue
from services.trainer.tensor_files import read_weights
from tests.services.trainer.folders import make_folder
from tests.services.trainer.full_disk import no_file_above
from tests.services.trainer.river import River, flowing, recipe_of
from tests.services.trainer.test_training import check_balance, check_drained
from tests.waiting import until

TWO_EPOCHS: dict[str, Any] = {
    "data": {"epochs": 2},
    "trainer": {"max_steps": None, "max_staleness": 1},
    "checkpoint": {"every_steps": 3},
}
"""28 groups in 14 steps."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def events(river: River, state: "wire.GroupState.ValueType") -> list[str]:
    return [each.group_id for each in river.recorder._events if each.state == state]


def add_prompt(recipe: Recipe) -> None:
    assert recipe.data.file is not None
    with Path(recipe.data.file).open("a") as file:
        file.write('{"prompt": "w1"}\n')


async def killed_at(recipe: Recipe, step: int) -> River:
    """An attempt that dies in the given step, without a word."""
    async with flowing(recipe) as river:
        running = asyncio.create_task(river.run())
        await until(lambda: river.lifecycle.details.get("step") == str(step) or running.done())
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return river


async def stopped_at(recipe: Recipe, step: int) -> River:
    """An attempt that is asked to stop in the given step."""
    async with flowing(recipe) as river:
        running = asyncio.create_task(river.run())
        await until(lambda: river.lifecycle.details.get("step") == str(step) or running.done())
        river.lifecycle.stopping.set()
        assert await running is None
        return river


def moments(recipe: Recipe) -> list[str]:
    folder = recipe.run_folder / "checkpoints"
    return sorted(path.name for path in folder.iterdir() if path.name[0].isdigit())


def newest(recipe: Recipe) -> Any:
    return Checkpoints(recipe.run_folder / "checkpoints", keep=3).newest()


async def test_a_killed_trainer_goes_on_from_its_checkpoint(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url, **TWO_EPOCHS)
    first = await killed_at(recipe, 8)
    trained = events(first, wire.GROUP_STATE_TRAINED)
    assert (first.lifecycle.details["checkpoint"], len(trained)) == ("step 6", 14)
    announced = first.announced[-1]
    async with flowing(recipe) as river:
        report = check_balance(await river.run(), trained=28)
    check_drained(river)
    assert report["steps"] == 14
    assert report["attempts"] == 2
    assert report["groups"]["rolled_back"] == 2
    assert river.lifecycle.details["attempt"] == "2"
    # The restored weights come at once, under a number of their own.
    assert river.announced[0].version == announced.version + 1
    assert (river.announced[0].step, river.announced[0].attempt) == (6, 2)
    at_checkpoint = next(v for v in first.announced if v.step == 6)
    assert river.announced[0].sha256 == at_checkpoint.sha256
    # Steps go on at 7, also in metrics: none is missing, and none of attempt 1 is hidden.
    steps = {step for key, attempt, step in river.recorder.snapshot() if key == "loss"}
    assert steps == set(range(7, 15))
    assert {attempt for _, attempt, _ in river.recorder.snapshot()} == {2}
    # Each prompt of both passes was trained once in the line that is left.
    rolled_back = events(river, wire.GROUP_STATE_ROLLED_BACK)
    assert rolled_back == trained[12:]
    kept = [*trained[:12], *events(river, wire.GROUP_STATE_TRAINED)]
    prompts = {group_id.rsplit(".", 2)[0] for group_id in kept}
    assert len(prompts) == 28
    assert report["groups"]["trained"] == 28
    # Groups of attempt 1 that were under way are trained by attempt 2.
    assert any(group_id.split(".")[2] == "1" for group_id in kept[12:])


async def test_with_the_queue_lost_too_it_goes_on_all_the_same(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url, **TWO_EPOCHS)
    first = await killed_at(recipe, 5)
    async with flowing(recipe) as river:
        await river.client.raw.flushall()
        await river.client.create_groups()
        report = check_balance(await river.run(), trained=28)
    assert river.lifecycle.details["attempt"] == "2"
    assert report["groups"]["rolled_back"] == 2
    assert report["groups"]["dropped"]["attempt_ended"] >= 1
    assert "0.6.1.0" not in events(river, wire.GROUP_STATE_TRAINED)
    assert len(events(first, wire.GROUP_STATE_TRAINED)) == 8


async def test_a_trainer_that_dies_before_its_first_checkpoint_begins_again(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url)
    await killed_at(recipe, 3)
    async with flowing(recipe) as river:
        report = check_balance(await river.run())
    assert (report["steps"], report["groups"]["rolled_back"]) == (5, 4)
    assert river.announced[0].version > 2
    assert [v.step for v in river.announced] == [0, 1, 2, 3, 4, 5]


async def test_a_stopped_trainer_loses_nothing(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    """SIGTERM writes a checkpoint at the step that was reached."""
    recipe = recipe_of(tmp_path, model, valkey_url, **TWO_EPOCHS)
    first = await stopped_at(recipe, 5)
    reached = len(events(first, wire.GROUP_STATE_TRAINED)) // 2
    assert f"1-{reached}" in moments(recipe)
    second = await stopped_at(recipe, reached + 1)  # before or after one more step
    async with flowing(recipe) as river:
        report = check_balance(await river.run(), trained=28)
    assert (report["steps"], report["groups"]["rolled_back"], report["attempts"]) == (14, 0, 3)
    assert events(second, wire.GROUP_STATE_ROLLED_BACK) == []


async def test_a_complete_run_started_again_does_nothing(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    """C37: no step, no version, no generation; the weights stay as they are. Only how its groups
    ended is said again: the aggregator may have been away at the end."""
    recipe = recipe_of(tmp_path, model, valkey_url, trainer={"exit_when_done": True})
    async with flowing(recipe) as river:
        report = check_balance(await river.run())
    weights = recipe.run_folder / "model" / "model.safetensors"
    before, written_ns = weights.read_bytes(), weights.stat().st_mtime_ns
    said: list[wire.GroupEvent] = []
    async with flowing(recipe) as river:
        river.recorder.event = said.append  # type: ignore[method-assign, assignment]
        assert await river.training.run() == report
        assert river.lifecycle.phase == "complete"
        assert await river.client.raw.hget(river.client.keys.clock, "attempt") == b"1"
    assert (weights.read_bytes(), weights.stat().st_mtime_ns) == (before, written_ns)
    assert (recipe.run_folder / "checkpoints" / "attempts" / "2").exists() is False
    saved = read_weights(newest(recipe).folder)
    for name, tensor in load_file(weights).items():
        assert torch.equal(tensor, saved[name])
    trained = [event.step for event in said if event.state == wire.GROUP_STATE_TRAINED]
    assert trained == sorted([1, 2, 3, 4, 5] * 2)


async def test_a_complete_run_that_stays_up_serves_its_last_version(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url)
    async with flowing(recipe) as river:
        report = check_balance(await river.run())
    last = river.announced[-1]
    async with flowing(recipe) as river:
        watching = asyncio.create_task(river.watch())
        assert await river.training.run() == report
        await until(lambda: river.version)
        watching.cancel()
        assert (river.lifecycle.phase, river.lifecycle.ready) == ("complete", True)
    assert {(v.version, v.sha256, v.attempt) for v in river.announced} == {
        (last.version, last.sha256, 1)
    }
    # A generator that joins gets what its load-path proof needs, though nothing is trained.
    assert river.announced[-1].canary.perturbed_logprobs


async def test_a_longer_run_goes_on(valkey_url: str, tmp_path: Path, model: Path) -> None:
    """C37: ten groups are trained; with a target of twenty exactly ten more are."""
    async with flowing(recipe_of(tmp_path, model, valkey_url)) as river:
        check_balance(await river.run())
    longer = recipe_of(tmp_path, model, valkey_url, trainer={"max_steps": 10})
    async with flowing(longer) as river:
        report = check_balance(await river.run(), trained=20)
    check_drained(river)
    assert report["steps"] == 10
    assert len(events(river, wire.GROUP_STATE_TRAINED)) == 20  # ten of them said again
    assert len(set(events(river, wire.GROUP_STATE_TRAINED))) == 20
    assert river.announced[0].step == 5
    assert report["versions_published"] == 6 + 1 + 5


async def test_a_trainer_killed_at_the_very_end_ends_the_run(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    """All steps are done and its report is missing."""
    recipe = recipe_of(tmp_path, model, valkey_url, evaluation={"enabled": True})
    async with flowing(recipe) as river:
        report = check_balance(await river.run())
    (recipe.run_folder / "trainer.json").unlink()
    async with flowing(recipe) as river:
        again = check_balance(await river.run())
    check_drained(river)
    assert (again["steps"], again["attempts"]) == (5, 2)
    assert again["eval_reward_before"] == report["eval_reward_before"] == 0.5
    assert [v.step for v in river.announced] == [5]


async def test_another_experiment_of_the_same_name_is_refused_with_the_difference(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url)
    await killed_at(recipe, 2)
    other = recipe.model_copy(
        update={
            "loss": recipe.loss.model_copy(update={"clip_low": 0.1}),
            "trainer": recipe.trainer.model_copy(update={"seed": 7}),
        }
    )
    async with flowing(other) as river:
        with pytest.raises(UserError) as refused:
            await river.run()
    assert (
        "has another recipe (loss.clip_low: 0.2 before, 0.1 now; trainer.seed: 0 before, 7 now); "
        "choose another run name, or start over with --fresh"
    ) in str(refused.value)


async def test_other_data_under_the_same_name_is_refused(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url)
    await stopped_at(recipe, 3)
    add_prompt(recipe)
    async with flowing(recipe) as river:
        with pytest.raises(UserError, match=r"other data \(data\.num_rows: 14 before, 15 now\)"):
            await river.run()


async def test_a_server_that_loses_everything_costs_groups_and_no_step(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    """FLUSHALL in the middle: the trainer is not fenced, and goes on by itself."""
    recipe = recipe_of(tmp_path, model, valkey_url, **TWO_EPOCHS)
    async with flowing(recipe) as river:
        running = asyncio.create_task(river.run())
        await until(lambda: river.lifecycle.details.get("step") == "4" or running.done())
        await river.client.raw.flushall()
        report = check_balance(await running, trained=28)
    assert report["groups"]["dropped"]["lost"] >= 1
    assert (report["attempts"], report["steps"], report["groups"]["rolled_back"]) == (1, 14, 0)
    check_drained(river)


async def test_a_second_trainer_takes_over_and_the_first_writes_no_checkpoint(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url, **TWO_EPOCHS)
    async with flowing(recipe) as first:
        running = asyncio.create_task(first.run())
        await until(lambda: "checkpoint" in first.lifecycle.details or running.done())
        async with flowing(recipe) as second:
            report = check_balance(await second.run(), trained=28)
        with pytest.raises(Exception, match=r"attempt 1 .*was replaced"):
            await running
    assert report["attempts"] == 2
    assert [name for name in moments(recipe) if name.startswith("2-")]
    assert newest(recipe).moment == (2, 14)


async def test_a_full_disk_does_not_end_the_run(
    valkey_url: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url, **TWO_EPOCHS)
    size = (model / "model.safetensors").stat().st_size
    async with flowing(recipe) as river:
        running = asyncio.create_task(river.run())
        await until(lambda: river.lifecycle.details.get("checkpoint") == "step 3" or running.done())
        with no_file_above(int(size * 1.5)):  # versions fit, checkpoints do not
            await until(lambda: "failed" in river.lifecycle.details["checkpoint"] or running.done())
            said = river.lifecycle.details["checkpoint"]
        report = check_balance(await running, trained=28)
    assert said.startswith("step 3; failed at step ")
    assert "CHECKPOINT FAILED, the run goes on" in capsys.readouterr().out
    assert report["steps"] == 14
    assert newest(recipe).step == 14  # there was room again


async def test_a_broken_checkpoint_costs_steps_and_nothing_else(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url, **TWO_EPOCHS)
    await killed_at(recipe, 8)
    (recipe.run_folder / "checkpoints" / "1-6" / "state.json").write_text("{")
    async with flowing(recipe) as river:
        report = check_balance(await river.run(), trained=28)
    assert (report["steps"], report["groups"]["rolled_back"]) == (14, 8)
    assert "broken-1-6" in [p.name for p in (recipe.run_folder / "checkpoints").iterdir()]
    assert river.announced[0].step == 3


async def test_checkpoints_are_measured_and_few_are_kept(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    changes = TWO_EPOCHS | {"checkpoint": {"every_steps": 3, "keep": 2}}
    recipe = recipe_of(tmp_path, model, valkey_url, **changes)
    async with flowing(recipe) as river:
        check_balance(await river.run(), trained=28)
    held = {
        step: partial.sum
        for (key, _, step), partial in river.recorder.snapshot().items()
        if key == "perf/checkpoint_s" and isinstance(partial, Observation)
    }
    # Each belongs to the step that it holds up.
    assert sorted(held) == [4, 7, 10, 13, 15]
    assert moments(recipe) == ["1-12", "1-14"]
    journal = recipe.run_folder / "checkpoints" / "journal"
    assert sorted(path.name for path in journal.iterdir()) == ["1-12.jsonl", "1-14.jsonl"]
    state = json.loads((recipe.run_folder / "checkpoints" / "1-14" / "state.json").read_text())
    assert Counter(kind for kind, *_ in state["said"]) == {"trained": 28}


async def test_evaluations_of_an_earlier_attempt_are_thrown_away(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url, evaluation={"enabled": True})
    async with flowing(recipe) as river:
        raw, keys = river.client.raw, river.client.keys
        await RunQueue(river.client).start(floor=1, recipe=recipe.identity())
        await raw.xadd(keys.eval_requests, {"id": "eval.0-0.1.0", "n": "1", "data": b""})
        await raw.xadd(keys.evals, {"id": "eval.0-0.1.1", "data": b""})
        await raw.xreadgroup("hr", "trainer-1", {keys.evals: ">"})
        await RunQueue(river.client).start(floor=1, recipe=recipe.identity())
        assert [await raw.xlen(key) for key in (keys.eval_requests, keys.evals)] == [0, 0]
        assert (await raw.xpending(keys.evals, "hr"))["pending"] == 0
