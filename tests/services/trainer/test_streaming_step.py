"""A step that is forwarded while its groups come, on a real queue server with a real (tiny)
model."""

import asyncio
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.common.config import Data, Model, Recipe
from services.common.generation_config import Generation, Generator
from services.common.partials import Observation
from services.common.streams import Entry, Stage
from services.common.training_config import Optimizer, Trainer
from services.trainer import training
from services.trainer.checkpoint import Checkpoints
from services.trainer.forwarding import Forwarding
from services.trainer.intake import AdmittedGroup
from services.trainer.learner import Learner
from services.trainer.measure import BUDGET, StepTimes
from services.trainer.planner import Plan
from services.trainer.step import StepResult
from services.trainer.torch_thread import TorchThread
from services.trainer.types import Row, TrainSample
from tests.services.trainer.folders import make_folder
from tests.services.trainer.numerics import make_groups
from tests.services.trainer.river import River, flowing, flowing_as, recipe_of
from tests.services.trainer.test_training import check_balance, check_drained
from tests.waiting import until

A_GROUP_A_ROW = {"trained_token_budget": 6}
"""Two completions of three tokens fill a row."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def microbatches(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Of each that a learner forwards, the groups in it."""
    seen = list[list[str]]()
    accumulate = Learner.accumulate

    def spied(self: Learner, microbatch: Sequence[Row]) -> None:
        accumulate(self, microbatch)
        seen.append(sorted({s.group_id for row in microbatch for s in row.samples}))

    monkeypatch.setattr(Learner, "accumulate", spied)
    return seen


def groups_by_id(samples: Sequence[TrainSample]) -> list[AdmittedGroup]:
    found = dict[str, list[TrainSample]]()
    for sample in samples:
        found.setdefault(sample.group_id, []).append(sample)
    return [
        AdmittedGroup(group_id, tuple(each), zero_signal=False, staleness=0)
        for group_id, each in found.items()
    ]


async def a_step(
    folder: Path, groups: Sequence[AdmittedGroup], *, streamed: bool, path: Path
) -> tuple[StepResult, Plan, StepTimes, dict[str, torch.Tensor]]:
    """One step with rows of 60 tokens; the weights behind it."""
    recipe = Recipe(
        model=Model(path=str(folder)),
        data=Data(file="prompts.jsonl", epochs=1.0),
        generation=Generation(max_completion_tokens=8),
        generator=Generator(max_model_len=60),
        optimizer=Optimizer(learning_rate=1e-2),
        trainer=Trainer(device="cpu"),
    )
    with ThreadPoolExecutor(max_workers=1) as executor:
        thread, times = TorchThread(executor), StepTimes()
        learner = Learner(recipe)
        forwarding = Forwarding(learner, thread, times, skips_zero_signal=True)
        early = 0
        for group in groups:
            forwarding.add(group)
            if streamed:
                early += await forwarding.forward_ready()
        plan = await forwarding.forward_rest()
        result = await forwarding.finish()
        assert bool(early) == streamed
        learner.write_weights(path)
    return result, plan, times, load_file(path)


async def test_what_is_forwarded_early_gives_the_same_step(model: Path, tmp_path: Path) -> None:
    """Whatever the order in which groups come: denominators are those of the whole step."""
    samples = make_groups(seed=3, num_groups=9, generations=4, prompt=9, completion=7)
    groups = groups_by_id(samples)
    whole = await a_step(model, groups, streamed=False, path=tmp_path / "whole")
    for seed in range(3):
        random.Random(seed).shuffle(groups)
        part = await a_step(model, groups, streamed=True, path=tmp_path / f"part{seed}")
        for name in ("num_samples", "trained_tokens", "raw_tokens", "denominator"):
            assert getattr(part[0], name) == getattr(whole[0], name), name
        assert part[0].loss == pytest.approx(whole[0].loss, rel=1e-5)
        assert part[0].grad_norm == pytest.approx(whole[0].grad_norm, rel=1e-5)
        assert part[1].unique_tokens == whole[1].unique_tokens
        placed = [index for row in part[1].rows if not row.echo for index in row.samples]
        assert sorted(placed) == list(range(len(samples)))
        assert part[0].forwarded_tokens == sum(row.tokens for row in part[1].rows)
        for name, weight in whole[3].items():
            torch.testing.assert_close(part[3][name], weight, rtol=1e-4, atol=1e-5)


async def test_the_times_of_a_step_are_all_of_its_parts(model: Path, tmp_path: Path) -> None:
    groups = groups_by_id(make_groups(seed=5, num_groups=6, generations=4, prompt=9, completion=7))
    result, _, times, _ = await a_step(model, groups, streamed=True, path=tmp_path / "weights")
    assert times.fwd_bwd_s == result.fwd_bwd_s > times.fwd_s > 0
    assert times.data_s > 0
    assert times.rollout_wait_s == times.straggler_wait_s == 0


class Holding(River):
    """A scorer that keeps the last group of every step until the first has been forwarded."""

    seen: list[list[str]]
    given = 0

    async def _score_one(self, stage: Stage, entry: Entry) -> None:
        self.given += 1
        if self.given % 2 == 0:
            await until(lambda: len(self.seen) >= self.given - 1)
        await super()._score_one(stage, entry)


@pytest.mark.parametrize("stale", ["wait", "drop"])
async def test_the_first_micro_batch_does_not_wait_for_the_last_group(
    valkey_url: str, tmp_path: Path, model: Path, microbatches: list[list[str]], stale: str
) -> None:
    trainer = A_GROUP_A_ROW | {"stale": stale, "max_staleness": 0}
    recipe = recipe_of(tmp_path, model, valkey_url, trainer=trainer)
    async with flowing_as(Holding, recipe) as river:
        river.seen = microbatches
        report = check_balance(await river.run())
    check_drained(river)
    assert (report["steps"], report["trained_samples"]) == (5, 20)
    assert [len(groups) for groups in microbatches] == [1] * 10
    found = observed(river)
    assert found["batch/microbatches_per_step"] == dict.fromkeys(range(1, 6), 2.0)
    assert found["batch/samples_per_step"] == dict.fromkeys(range(1, 6), 4.0)
    # What was computed while groups were awaited is no wait: the parts stay disjoint.
    for step in range(2, 6):
        parts = sum(found.get(f"perf/{part}", {}).get(step, 0.0) for part in BUDGET)
        assert 0 <= found["perf/step_s"][step] - parts < 0.5 * found["perf/step_s"][step]


def observed(river: River) -> dict[str, dict[int, float]]:
    """Sums of observations by key and step."""
    found = dict[str, dict[int, float]]()
    for (key, _, step), partial in river.recorder.snapshot().items():
        if isinstance(partial, Observation):
            found.setdefault(key, {})[step] = partial.sum
    return found


async def test_a_stop_abandons_what_was_forwarded_and_the_groups_go_back(
    valkey_url: str, tmp_path: Path, model: Path, microbatches: list[list[str]]
) -> None:
    """The second group of the third step does not come: its first is forwarded, and the trainer is
    stopped. The next attempt finds the weights of the second step, and trains both."""
    never = asyncio.Event()

    class Stuck(River):
        given = 0

        async def _score_one(self, stage: Stage, entry: Entry) -> None:
            self.given += 1
            if self.given > 5:
                await never.wait()
            await super()._score_one(stage, entry)

    trainer = A_GROUP_A_ROW | {"max_staleness": 0}
    recipe = recipe_of(tmp_path, model, valkey_url, trainer=trainer)
    async with flowing_as(Stuck, recipe) as river:
        running = asyncio.create_task(river.run())
        await until(lambda: len(microbatches) == 5 or running.done())
        river.lifecycle.stopping.set()
        assert await running is None
        before = river.announced[-1]
        assert (before.step, len(river.training._book.outstanding)) == (2, 2)
    newest = Checkpoints(recipe.run_folder / "checkpoints", keep=3).newest()
    assert newest is not None
    assert newest.moment == (1, 2)
    [abandoned] = microbatches[4]
    async with flowing(recipe) as after:
        report = check_balance(await after.run())
    check_drained(after)
    assert after.announced[0].sha256 == before.sha256
    assert (report["steps"], report["trained_samples"]) == (5, 20)
    assert report["groups"]["dropped"] == {}
    assert report["groups"]["rolled_back"] == 0
    assert abandoned in {group for groups in microbatches[5:] for group in groups}


async def test_a_step_that_does_not_end_in_time_leaves_the_one_before_to_go_on_from(
    valkey_url: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has all its groups and is still being forwarded: no weight has been touched."""
    accumulate, begun, release = Learner.accumulate, threading.Semaphore(0), threading.Event()
    calls = 0

    def slow(self: Learner, microbatch: Sequence[Row]) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            begun.release()
            assert release.wait(60)
        accumulate(self, microbatch)

    monkeypatch.setattr(Learner, "accumulate", slow)
    monkeypatch.setattr(training, "STEP_ENDS_WITHIN_S", 0.05)
    recipe = recipe_of(tmp_path, model, valkey_url)
    async with flowing(recipe) as river:
        running = asyncio.create_task(river.run())
        await until(lambda: begun.acquire(blocking=False) or running.done())
        river.lifecycle.stopping.set()
        await until(lambda: river.lifecycle.phase == "writing a checkpoint" or running.done())
        release.set()
        assert await running is None
    newest = Checkpoints(recipe.run_folder / "checkpoints", keep=3).newest()
    assert newest is not None
    assert newest.moment == (1, 2)
    async with flowing(recipe) as after:
        report = check_balance(await after.run())
    assert (report["steps"], report["groups"]["rolled_back"]) == (5, 0)


async def test_a_sample_beyond_the_budgets_is_dropped_once_whenever_it_is_found(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    """With rows that fill at once it is found while others are still to come."""

    def decide(group_id: str, tries: int) -> str:
        return "long" if group_id.startswith("0.2.") and tries == 0 else ""

    recipe = recipe_of(tmp_path, model, valkey_url, trainer=A_GROUP_A_ROW)
    async with flowing(recipe, decide=decide) as river:
        report = check_balance(await river.run())
    assert report["groups"]["dropped"] == {"oversize": 1}
    assert river.counts("sample/dropped/") == {"oversize": 2}
    assert report["trained_samples"] == 20


@pytest.mark.parametrize("kind", ["", "zero", "long"])
async def test_samples_of_the_steps_add_up_to_those_of_the_report(
    valkey_url: str, tmp_path: Path, model: Path, kind: str
) -> None:
    """Also where groups are skipped for want of signal, or are beyond the budgets."""

    def decide(group_id: str, tries: int) -> str:
        return kind if int(group_id.split(".")[1]) % 3 == 0 and tries == 0 else ""

    async with flowing(recipe_of(tmp_path, model, valkey_url), decide=decide) as river:
        report: Any = await river.run()
    found = observed(river)
    assert sum(found["batch/samples_per_step"].values()) == report["trained_samples"]
    assert sum(found["batch/trained_tokens_per_step"].values()) == report["trained_tokens"]
    assert report["trained_tokens"] == 3 * report["trained_samples"]
