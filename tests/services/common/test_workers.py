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
        assert "worker_process.py" not in caught.value.traceback_text
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
        [sys.executable, "-m", "services.common.worker_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.close()
    assert worker.wait(PATIENCE_S) == 0
    assert worker.stdout.read() == b""
    worker.stdout.close()


async def test_a_lease_keeps_its_process_and_what_calls_left_there(no_child_left: None) -> None:
    async with Pool(2) as pool:
        mine, others = await pool.lease(), await pool.lease()
        await mine.call(f"{HERE}:store", {"key": "a", "value": [1]}, timeout_s=LONG_S)
        assert await mine.call(f"{HERE}:stored", {"key": "a"}, timeout_s=LONG_S) == [1]
        assert await others.call(f"{HERE}:stored", {"key": "a"}, timeout_s=LONG_S) is None
        assert (pool.alive, pool.idle) == (2, 0)
        mine.release()
        mine.release()
        assert (pool.alive, pool.idle) == (2, 1)
        with pytest.raises(workers.WorkerDied, match="has been ended"):
            await mine.call(f"{HERE}:pid", {}, timeout_s=LONG_S)
        # Used last, used next; what is in it is still there.
        async with asyncio.timeout(LONG_S):
            again = await pool.lease()
        assert await again.call(f"{HERE}:stored", {"key": "a"}, timeout_s=LONG_S) == [1]
        again.discard()
        again.release()
        assert again.ended
        assert (pool.alive, pool.idle) == (1, 0)
        others.release()


async def test_a_lease_outlives_an_exception_and_no_timeout() -> None:
    async with Pool(1) as pool:
        lease = await pool.lease()
        with pytest.raises(workers.CallRaised, match=r"^ValueError: first line$") as caught:
            await lease.call(f"{HERE}:fails_at_length", {}, timeout_s=LONG_S)
        assert caught.value.text == "ValueError: first line\nsecond line"
        assert not lease.ended
        took: list[float] = []
        with pytest.raises(workers.CallTimedOut):
            await lease.call(f"{HERE}:endless", {}, timeout_s=0.3, took=took.append)
        assert lease.ended
        assert len(took) == 1
        with pytest.raises(workers.WorkerDied):
            await lease.call(f"{HERE}:pid", {}, timeout_s=LONG_S)
        lease.release()
        assert (pool.alive, pool.idle) == (0, 0)
        assert await pool.call(f"{HERE}:echo", {"a": 1}, timeout_s=LONG_S) == {"a": 1}
        assert (pool.alive, pool.idle) == (1, 1)


async def test_a_release_in_the_middle_of_a_call_ends_it() -> None:
    async with Pool(1) as pool:
        lease = await pool.lease()
        call = asyncio.create_task(lease.call(f"{HERE}:endless", {}, timeout_s=LONG_S))
        await asyncio.sleep(0)
        lease.release()
        with pytest.raises(workers.WorkerDied):
            await call
        assert await pool.call(f"{HERE}:echo", {}, timeout_s=LONG_S) == {}


async def test_a_burst_of_quick_calls_stays_on_the_ready_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # This machine may be busy: a burst must be over before that.
    monkeypatch.setattr(workers, "GROW_AFTER_S", LONG_S)
    async with Pool(200, ready=2) as pool:
        assert pool.alive == 2
        for _ in range(3):
            calls = (pool.call(f"{HERE}:pid", {}, timeout_s=LONG_S) for _ in range(100))
            assert len(set(await asyncio.gather(*calls))) <= 2
        assert (pool.alive, pool.idle) == (2, 2)


async def test_slow_calls_do_not_hold_up_quick_ones(tmp_path: Path, no_child_left: None) -> None:
    async with Pool(5, ready=1) as pool:
        path = tmp_path / "go"
        slow = [
            asyncio.create_task(
                pool.call(f"{HERE}:wait_for", {"path": str(path)}, timeout_s=LONG_S)
            )
            for _ in range(4)
        ]
        quick = await asyncio.gather(
            *(pool.call(f"{HERE}:pid", {}, timeout_s=LONG_S) for _ in range(20))
        )
        assert not any(task.done() for task in slow)
        assert len(set(quick)) == 1
        await until(lambda: pool.alive == 5)
        path.touch()
        assert len({*quick, *await asyncio.gather(*slow)}) == 5
        assert (pool.alive, pool.idle) == (5, 5)


async def test_no_more_than_the_size_and_first_come_first_served(tmp_path: Path) -> None:
    async with Pool(2, ready=1) as pool:
        path, order = tmp_path / "go", list[int]()
        slow = [
            asyncio.create_task(
                pool.call(f"{HERE}:wait_for", {"path": str(path)}, timeout_s=LONG_S)
            )
            for _ in range(2)
        ]
        await until(lambda: pool.alive == 2)

        async def take(number: int) -> None:
            lease = await pool.lease()
            order.append(number)
            await lease.call(f"{HERE}:pid", {}, timeout_s=LONG_S)
            lease.release()

        quick = [asyncio.create_task(take(number)) for number in range(10)]
        await asyncio.sleep(3 * workers.GROW_AFTER_S)
        assert order == []
        assert pool.alive == 2
        path.touch()
        await asyncio.gather(*slow, *quick)
        assert order == list(range(10))


async def test_it_serves_after_many_timeouts(no_child_left: None) -> None:
    async with Pool(4, ready=2) as pool:
        ended = await asyncio.gather(
            *(pool.call(f"{HERE}:endless", {}, timeout_s=0.05) for _ in range(24)),
            return_exceptions=True,
        )
        assert [type(each) for each in ended] == [workers.CallTimedOut] * 24
        assert (pool.alive, pool.idle) == (0, 0)
        served = await asyncio.gather(
            *(pool.call(f"{HERE}:echo", {"n": n}, timeout_s=LONG_S) for n in range(24))
        )
        assert served == [{"n": n} for n in range(24)]
        assert pool.alive == pool.idle
        assert 1 <= pool.alive <= 4


async def test_a_cancellation_leaks_nothing_wherever_it_comes() -> None:
    """In a call, in the wait for a worker, and in the turn of the loop in which one is handed
    over."""
    async with Pool(1) as pool:
        held = await pool.lease()
        waiting = [asyncio.create_task(pool.lease()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        held.release()
        waiting[1].cancel()
        lease = await waiting[2]
        assert [task.cancelled() for task in waiting] == [True, True, False]
        lease.release()
        assert (pool.alive, pool.idle) == (1, 1)
        for delay_s in (0, 0, 0.001, 0.01, 0.05, 0.2):
            calls = [
                asyncio.create_task(pool.call(f"{HERE}:nap", {"seconds": 0.02}, timeout_s=LONG_S))
                for _ in range(4)
            ]
            await asyncio.sleep(delay_s)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            # One may still be starting, for nobody.
            assert pool.alive == pool.idle <= 1
        assert await pool.call(f"{HERE}:echo", {}, timeout_s=LONG_S) == {}
        assert (pool.alive, pool.idle) == (1, 1)


async def test_who_waits_is_told_that_no_worker_can_be_started(tmp_path: Path) -> None:
    """Not left waiting: the module that all workers import is gone by the time of a
    replacement."""
    module = tmp_path / "passing.py"
    module.write_text("")
    sys.path.insert(0, str(tmp_path))
    try:
        async with Pool(3, ready=1, preload=["passing"]) as pool:
            module.unlink()
            held = await pool.lease()
            # One more is wanted and cannot be had, but this one comes back.
            second = asyncio.create_task(pool.lease())
            done, _ = await asyncio.wait({second}, timeout=4 * workers.GROW_AFTER_S)
            assert not done
            held.release()
            (await second).discard()
            with pytest.raises(workers.LoadFailed, match="No module named 'passing'"):
                await pool.call(f"{HERE}:pid", {}, timeout_s=LONG_S)
    finally:
        sys.path.remove(str(tmp_path))


async def test_who_waits_is_told_that_the_pool_is_closed() -> None:
    pool = Pool(2, ready=1)
    await pool.start()
    await pool.lease()
    waiting = [asyncio.create_task(pool.lease()) for _ in range(3)]
    await asyncio.sleep(1.5 * workers.GROW_AFTER_S)
    await pool.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    # A second worker may have been started just before.
    assert sum(isinstance(each, workers.WorkerDied) for each in results) >= 2
    assert (pool.alive, pool.idle) == (0, 0)
