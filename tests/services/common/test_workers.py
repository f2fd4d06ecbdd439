import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.common import workers
from services.common.workers import Pool
from tests.waiting import PATIENCE_S, until

HERE = "tests.services.common.worker_functions"
LONG_S = 60.0


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until_gone(*pids: int) -> None:
    await until(lambda: all(is_gone(pid) for pid in pids))


async def pids_written_to(path: Path) -> list[int]:
    await until(path.exists)
    return await asyncio.to_thread(lambda: [int(pid) for pid in path.read_text().split()])


@pytest.fixture
def no_child_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children()}
    yield
    assert {c.pid for c in psutil.Process().children() if not is_gone(c.pid)} <= before


async def test_values_survive_the_way_there_and_back(no_child_left: None) -> None:
    async with Pool(1) as pool:
        sent = {"text": "ü\ud800", "nested": [{"a": [1, 2.5, None, True]}], "inf": -math.inf}
        assert await pool.call(f"{HERE}:echo", sent, timeout_s=LONG_S) == sent
        nan, *rest = await pool.call(f"{HERE}:numbers", {}, timeout_s=LONG_S)
        assert math.isnan(nan)
        assert rest == [math.inf, -math.inf, None, True, 0.5, 7, True]
        assert rest[3] is True
        rows = await pool.call(f"{HERE}:array", {}, timeout_s=LONG_S)
        assert rows[0] == [1.0, 2.0]
        assert math.isnan(rows[1][1])


async def test_a_large_argument_and_answer_pass(no_child_left: None) -> None:
    async with Pool(1) as pool:
        sent = {"texts": ["x" * 1000] * 3000}
        assert await pool.call(f"{HERE}:echo", sent, timeout_s=LONG_S) == sent


async def test_what_user_code_prints_and_reads_leaves_the_channel_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with Pool(1) as pool:
        assert await pool.call(f"{HERE}:chatty", {}, timeout_s=LONG_S) == "''"
        assert await pool.call(f"{HERE}:echo", {"a": 1}, timeout_s=LONG_S) == {"a": 1}
    captured = capfd.readouterr()
    assert captured.out == ""
    for text in ("to stdout", "raw bytes", "from a child"):
        assert text in captured.err


async def test_an_exception_comes_back_with_the_users_traceback() -> None:
    async with Pool(1) as pool:
        first = await pool.call(f"{HERE}:pid", {}, timeout_s=LONG_S)
        with pytest.raises(workers.CallRaised, match="KeyError: 'no such thing'") as caught:
            await pool.call(f"{HERE}:fails", {}, timeout_s=LONG_S)
        assert 'raise KeyError("no such thing")' in caught.value.traceback_text
        assert "workers.py" not in caught.value.traceback_text
        with pytest.raises(workers.CallRaised, match="SystemExit: 4"):
            await pool.call(f"{HERE}:leaves", {}, timeout_s=LONG_S)
        with pytest.raises(workers.CallRaised, match="type object cannot be sent as JSON"):
            await pool.call(f"{HERE}:unsendable", {}, timeout_s=LONG_S)
        with pytest.raises(workers.CallRaised, match="unexpected keyword argument"):
            await pool.call(f"{HERE}:pid", {"x": 1}, timeout_s=LONG_S)
        assert await pool.call(f"{HERE}:pid", {}, timeout_s=LONG_S) == first


async def test_a_call_past_its_timeout_is_killed_and_its_place_filled(
    tmp_path: Path, no_child_left: None
) -> None:
    async with Pool(1) as pool:
        with pytest.raises(workers.CallTimedOut, match=r"within 0\.5 s"):
            await pool.call(f"{HERE}:endless", {"path": str(tmp_path / "pids")}, timeout_s=0.5)
        worker, child = await pids_written_to(tmp_path / "pids")
        await until_gone(worker, child)
        assert await pool.call(f"{HERE}:pid", {}, timeout_s=LONG_S) != worker


async def test_the_event_loop_runs_on_while_a_function_holds_the_gil() -> None:
    async with Pool(1) as pool:
        call = asyncio.create_task(pool.call(f"{HERE}:holds_the_gil", {}, timeout_s=0.5))
        turns = 0
        while not call.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(workers.CallTimedOut):
            await call
        assert turns > 1


async def test_a_process_that_ends_in_a_call_is_told_and_replaced() -> None:
    async with Pool(1) as pool:
        with pytest.raises(workers.WorkerDied, match="ended with status 3"):
            await pool.call(f"{HERE}:dies", {}, timeout_s=LONG_S)
        worker = await pool.call(f"{HERE}:pid", {}, timeout_s=LONG_S)
        # Killed while idle: the next call must not meet it.
        os.kill(worker, signal.SIGKILL)
        await until_gone(worker)
        await asyncio.sleep(0.05)
        assert await pool.call(f"{HERE}:pid", {}, timeout_s=LONG_S) != worker


async def test_a_cancelled_call_leaves_nothing_running(tmp_path: Path) -> None:
    async with Pool(1) as pool:
        path = tmp_path / "pids"
        call = asyncio.create_task(
            pool.call(f"{HERE}:endless", {"path": str(path)}, timeout_s=LONG_S)
        )
        pids = await pids_written_to(path)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until_gone(*pids)
        assert await pool.call(f"{HERE}:echo", {}, timeout_s=LONG_S) == {}


async def test_calls_run_side_by_side_up_to_the_size(tmp_path: Path) -> None:
    async with Pool(2) as pool:
        path = tmp_path / "go"
        waiting = [
            asyncio.create_task(
                pool.call(f"{HERE}:wait_for", {"path": str(path)}, timeout_s=LONG_S)
            )
            for _ in range(2)
        ]
        third = asyncio.create_task(pool.call(f"{HERE}:pid", {}, timeout_s=LONG_S))
        done, _ = await asyncio.wait({third}, timeout=0.2)
        assert not done
        path.touch()
        first, second = await asyncio.gather(*waiting)
        assert first != second
        assert await third in (first, second)


async def test_a_function_that_cannot_be_imported_is_told_at_start_and_at_the_call(
    no_child_left: None,
) -> None:
    with pytest.raises(workers.LoadFailed, match="No module named 'no_such_module'"):
        await Pool(2, preload=["no_such_module:f"]).start()
    async with Pool(1, preload=[HERE]) as pool:
        with pytest.raises(workers.LoadFailed, match="no_such_function"):
            await pool.call(f"{HERE}:no_such_function", {}, timeout_s=LONG_S)


async def test_close_ends_running_calls_and_every_process(
    tmp_path: Path, no_child_left: None
) -> None:
    pool = Pool(2)
    await pool.start()
    path = tmp_path / "pids"
    call = asyncio.create_task(pool.call(f"{HERE}:endless", {"path": str(path)}, timeout_s=LONG_S))
    pids = await pids_written_to(path)
    await pool.close()
    with pytest.raises(workers.WorkerDied):
        await call
    await until_gone(*pids)
    with pytest.raises(workers.WorkerDied, match="closed"):
        await pool.call(f"{HERE}:pid", {}, timeout_s=LONG_S)


PARENT = f"""
import asyncio, sys
from services.common.workers import Pool

async def main():
    async with Pool(2) as pool:
        await pool.call("{HERE}:endless", {{"path": sys.argv[1]}}, timeout_s=60)

asyncio.run(main())
"""


async def test_workers_end_with_a_service_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, str(path))
    pids = await pids_written_to(path)
    try:
        its_workers = [child.pid for child in psutil.Process(parent.pid).children()]
        assert len(its_workers) == 2
        assert pids[0] in its_workers
        parent.kill()
        await parent.wait()
        await until_gone(*its_workers)
    finally:
        # What the user's function started outlives a kill -9 of the service.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[1], signal.SIGKILL)


def test_a_worker_ends_with_its_input() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-m", "services.common.workers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.close()
    assert worker.wait(PATIENCE_S) == 0
    assert worker.stdout.read() == b""
    worker.stdout.close()
