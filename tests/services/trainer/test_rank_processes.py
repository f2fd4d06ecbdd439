"""Ranks that end, and what becomes of the others: real processes, killed."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from services.common.background import guarded
from services.common.errors import UserError
from services.trainer.rank_ended import RankEnded
from services.trainer.rank_processes import RankProcesses
from tests.conftest import free_port
from tests.services.trainer.folders import make_folder
from tests.services.trainer.ranked import recipe_for
from tests.services.trainer.test_killed import (
    last_version,
    other_half,
    start_trainer,
    until_versions,
    write_recipe,
)
from tests.waiting import until

pytestmark = pytest.mark.timeout(180)


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children()


async def test_a_killed_rank_ends_what_runs_beside_it_with_its_status(tmp_path: Path) -> None:
    ranks = await RankProcesses.start(recipe_for(make_folder(tmp_path), ranks=3))
    try:
        first, second = (each.pid for each in ranks._processes.values())
        os.kill(second, signal.SIGKILL)
        with pytest.raises(RankEnded, match=r"^rank 2 ended with status -9; ") as raised:
            await ranks.beside(asyncio.sleep(60))
        assert raised.value.status == 1
        # Whoever waits for a rank that is gone sees a broken connection, maybe first.
        with pytest.raises(RankEnded, match=r"^rank 2 ended"):
            await ranks.beside(failing(ConnectionError("closed by peer")))
        with pytest.raises(UserError, match="yours"):
            await ranks.beside(failing(UserError("yours")))
    finally:
        await ranks.end()
    assert not psutil.pid_exists(first)


async def failing(error: Exception) -> None:
    raise error


async def test_a_failure_of_ones_own_stays_what_it_is_while_ranks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.rank_processes.SAID_WITHIN_S", 0.1)
    ranks = await RankProcesses.start(recipe_for(make_folder(tmp_path), ranks=2))
    try:
        with pytest.raises(ZeroDivisionError):
            await ranks.beside(failing(ZeroDivisionError()))
    finally:
        await ranks.end()
    alone = await RankProcesses.start(recipe_for(tmp_path))
    assert alone.place is None
    with pytest.raises(ZeroDivisionError):
        await alone.beside(failing(ZeroDivisionError()))
    await alone.end()


async def test_a_rank_that_finds_a_mistake_of_the_users_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = await RankProcesses.start(recipe_for(tmp_path / "nowhere", ranks=2))
    try:
        with pytest.raises(RankEnded) as raised:
            await ranks.beside(asyncio.sleep(60))
    finally:
        await ranks.end()
    assert raised.value.status == 2
    assert "error: model.path: " in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank 1", "rank 0", "asked to stop"])
async def test_ranks_end_as_a_whole(valkey_url: str, tmp_path: Path, victim: str) -> None:
    model = make_folder(tmp_path / "model")
    trainer, aggregator = free_port(), free_port()
    recipe = write_recipe(
        tmp_path, model, valkey_url, trainer=trainer, aggregator=aggregator, ranks=2
    )
    async with other_half(recipe) as (half, _):
        with (tmp_path / "log").open("wb") as log:
            process = await start_trainer(tmp_path, log)
        try:

            async def course() -> int:
                await until_versions(recipe, 3)
                [other] = children(process.pid)
                # A signal for all processes of a terminal or a pod is rank 0's to answer.
                other.send_signal(signal.SIGTERM)
                other.send_signal(signal.SIGINT)
                await until_versions(recipe, last_version(recipe) + 1)
                if victim == "rank 1":
                    other.kill()
                elif victim == "rank 0":
                    process.kill()
                else:
                    process.terminate()
                async with asyncio.timeout(60):
                    status = await process.wait()
                await until(lambda: not other.is_running())
                return status

            status = await guarded(course(), half.watch(), half.generate(), half.score())
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
    said = (tmp_path / "log").read_text()
    assert status == {"rank 1": 1, "rank 0": -9, "asked to stop": 0}[victim], said[-3000:]
    lost = "rank 1 ended with status -9; " in said
    assert lost == (victim == "rank 1"), said[-3000:]
    assert "Traceback" not in said, said[-3000:]
    if victim == "asked to stop":
        newest = max(
            recipe.run_folder.glob("checkpoints/1-*"), key=lambda path: path.stat().st_mtime
        )
        assert (newest / "rank-00001.safetensors").exists()
