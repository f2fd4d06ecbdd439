"""A run in which one group takes much longer than all others."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from headrace.v1 import rollout_pb2

from services.common.background import guarded
from services.common.partials import Observation
from services.common.streams import Entry, Stage
from tests.services.trainer.folders import make_folder
from tests.services.trainer.river import River, flowing_as, recipe_of
from tests.waiting import until

SLOW = "0.0.1.0"
"""The first group of the first prompt."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


class Straggling(River):
    """Its generator holds one group, which began with the first version, until it is let go."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.let_go = asyncio.Event()
        self.held: asyncio.Task[None] | None = None

    async def _generate_one(self, stage: Stage, entry: Entry) -> None:
        if entry.group_id == SLOW:
            request = rollout_pb2.RolloutRequest.FromString(entry.data)
            self.held = asyncio.create_task(self._late(stage, entry, began=self.current_version()))
            assert not request.evaluation
            return
        await super()._generate_one(stage, entry)

    async def _late(self, stage: Stage, entry: Entry, *, began: int) -> None:
        await self.let_go.wait()
        self._decide = lambda group_id, _: began if group_id == SLOW else ""
        await super()._generate_one(stage, entry)

    async def let_go_at(self, version: int) -> None:
        """When it is served; then nothing, for ever."""
        await until(lambda: self.version >= version)
        self.let_go.set()
        await asyncio.Event().wait()

    def waits(self) -> dict[int, float]:
        """perf/straggler_wait_s by step."""
        return {
            step: partial.sum
            for (key, _, step), partial in self.recorder.snapshot().items()
            if key == "perf/straggler_wait_s" and isinstance(partial, Observation)
        }


def recipe(folder: Path, model: Path, url: str, **trainer: Any) -> Any:
    return recipe_of(folder, model, url, trainer={"max_staleness": 1, "max_steps": 5, **trainer})


async def test_a_step_waits_for_a_group_that_would_be_stale_in_the_next(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    """Version 1 may be one behind: step 1 goes on without the slow group, and step 2 holds a seat
    for it while others are there."""
    async with flowing_as(Straggling, recipe(tmp_path, model, valkey_url)) as river:

        async def let_go() -> None:
            await until(lambda: hasattr(river.training, "_intake"))
            intake = river.training._intake
            await until(lambda: bool(intake._waiting))
            assert intake.number == 2
            for _ in range(20):  # nothing else happens
                await asyncio.sleep(0.01)
            assert intake.number == 2
            assert SLOW in river.training._book.outstanding
            river.let_go.set()
            await asyncio.Event().wait()

        report = await guarded(river.run(), let_go())
    assert report is not None
    assert (report["groups"]["trained"], report["staleness_max"]) == (10, 1)
    assert report["groups"]["dropped"].keys() <= {"run_ended"}
    waits = river.waits()
    assert sorted(waits) == [1, 2, 3, 4, 5]
    assert waits[2] >= 0.2
    assert waits[1] == 0.0


async def test_a_step_waits_no_longer_than_it_may(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    async with flowing_as(Straggling, recipe(tmp_path, model, valkey_url, overdue_s=0.3)) as river:
        report = await guarded(river.run(), river.let_go_at(3))
    assert report is not None
    assert report["groups"]["trained"] == 10
    assert report["groups"]["dropped"]["stale"] == 1
    assert river.waits()[2] >= 0.3
    prompts = {request.group_id.rsplit(".", 2)[0] for request in river.requests}
    assert "0.0" in prompts, "it came again"


async def test_a_run_may_go_on_without_what_is_late(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    async with flowing_as(Straggling, recipe(tmp_path, model, valkey_url, stale="drop")) as river:
        report = await guarded(river.run(), river.let_go_at(3))
    assert report is not None
    assert report["groups"]["trained"] == 10
    assert report["groups"]["dropped"]["stale"] == 1
    assert river.waits() == dict.fromkeys([1, 2, 3, 4, 5], 0.0)
