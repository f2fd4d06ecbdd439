"""Where the trainer's seconds and a sample's seconds go, on a real queue server with a real (tiny)
model."""

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.partials import Observation
from services.common.streams import Entry, Stage
from services.trainer.measure import BUDGET
from services.trainer.run_queue import RunQueue
from tests.services.trainer.folders import make_folder
from tests.services.trainer.river import River, flowing, recipe_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def seconds(river: River, key: str) -> dict[int, float]:
    """By step, the sum of what was observed."""
    return {
        step: partial.sum
        for (found, _, step), partial in river.recorder.snapshot().items()
        if found == key and isinstance(partial, Observation)
    }


def mean(river: River, key: str) -> float:
    partials = [p for (found, _, _), p in river.recorder.snapshot().items() if found == key]
    observations = [p for p in partials if isinstance(p, Observation)]
    assert observations, key
    return sum(p.sum for p in observations) / sum(p.n for p in observations)


@pytest.fixture
def slow_optimizer(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, set[int]], None]:
    """Have AdamW sleep in some of its calls, counted from 1."""
    step = torch.optim.AdamW.step
    calls = 0

    def make(sleep_s: float, at: set[int]) -> None:
        def slow(self: Any, closure: Any = None) -> Any:
            nonlocal calls
            calls += 1
            if calls in at:
                time.sleep(sleep_s)
            return step(self, closure)

        monkeypatch.setattr(torch.optim.AdamW, "step", slow)

    return make


async def test_the_budget_of_every_step_adds_up(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    """Also of the last, after which an evaluation holds the trainer: that is no part of it."""
    recipe = recipe_of(tmp_path, model, valkey_url, evaluation={"enabled": True})
    async with flowing(recipe) as river:
        await river.run()
    lengths, unaccounted = seconds(river, "perf/step_s"), seconds(river, "perf/unaccounted_s")
    parts = {part: seconds(river, f"perf/{part}") for part in BUDGET}
    assert set(lengths) == set(unaccounted) == {2, 3, 4, 5}
    assert set(parts["eval_s"]) == {0, 6}
    for step, step_s in lengths.items():
        explained = math.fsum(of_step.get(step, 0.0) for of_step in parts.values())
        assert explained + unaccounted[step] == pytest.approx(step_s, rel=1e-9)
        assert 0 <= unaccounted[step] < 0.5 * step_s


async def test_the_optimizer_s_time_belongs_to_the_step_that_ran_it(
    valkey_url: str,
    tmp_path: Path,
    model: Path,
    slow_optimizer: Callable[[float, set[int]], None],
) -> None:
    """Slow in the third step and in the last, of which no later one could tell."""
    slow_optimizer(0.5, {3, 5})
    async with flowing(recipe_of(tmp_path, model, valkey_url)) as river:
        await river.run()
    found = seconds(river, "perf/optimizer_s")
    assert set(found) == {1, 2, 3, 4, 5}
    assert {step for step, taken_s in found.items() if taken_s >= 0.5} == {3, 5}
    lengths = seconds(river, "perf/step_s")
    assert all(lengths[step] >= found[step] for step in lengths)


async def test_a_starving_trainer_is_no_ageing_sample(
    valkey_url: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = River._score_one

    async def slow(self: River, stage: Stage, entry: Entry) -> None:
        await asyncio.sleep(0.3)
        await score(self, stage, entry)

    monkeypatch.setattr(River, "_score_one", slow)
    async with flowing(recipe_of(tmp_path, model, valkey_url)) as river:
        await river.run()
    assert mean(river, "perf/rollout_wait_s") > 0.3
    assert mean(river, "sample/time_in_queue_s") < 0.1


async def test_an_ageing_sample_is_no_starving_trainer(
    valkey_url: str,
    tmp_path: Path,
    model: Path,
    slow_optimizer: Callable[[float, set[int]], None],
) -> None:
    slow_optimizer(0.6, {1, 2, 3, 4, 5})
    async with flowing(recipe_of(tmp_path, model, valkey_url)) as river:
        await river.run()
    # Only the first step has to wait for its groups.
    waits = seconds(river, "perf/rollout_wait_s")
    assert max(waits[step] for step in (2, 3, 4, 5)) < 0.3
    assert mean(river, "sample/time_in_queue_s") > 0.3


async def test_a_wait_that_cannot_be_is_absent_and_counted(
    valkey_url: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a server whose clock was stepped forward: every wait is longer than the run."""
    start = RunQueue.start

    async def young(self: RunQueue, **named: Any) -> Any:
        begun = await start(self, **named)
        self._started_s = math.inf
        return begun

    monkeypatch.setattr(RunQueue, "start", young)
    async with flowing(recipe_of(tmp_path, model, valkey_url)) as river:
        await river.run()
    assert seconds(river, "sample/time_in_queue_s") == {}
    assert river.counts("queue/bad_wait_total") == {"": 10}


async def test_a_tombstone_is_no_sample_that_waited(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(
        tmp_path, model, valkey_url, data={"epochs": 0.2}, trainer={"max_steps": None}
    )
    async with flowing(recipe, decide=lambda *_: "failed") as river:
        await river.run()
    assert seconds(river, "sample/time_in_queue_s") == {}
    assert river.counts("queue/bad_wait_total") == {}
