import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from services.common.background import Strays, guarded, unless, within
from tests.waiting import until


async def for_ever(ended: list[str] | None = None) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        if ended is not None:
            ended.append("ended")


async def then_one(body: Coroutine[Any, Any, None]) -> int:
    await body
    return 1


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


async def fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("broken")


async def test_the_body_ends_what_runs_beside_it() -> None:
    ended: list[str] = []
    assert await guarded(answer(), for_ever(ended), for_ever(ended)) == 42
    assert ended == ["ended", "ended"]


async def test_a_failure_beside_it_ends_the_body() -> None:
    ended: list[str] = []
    with pytest.raises(ValueError, match="broken"):
        await guarded(for_ever(ended), fail())
    assert ended == ["ended"]


async def test_a_failure_of_the_body_is_raised() -> None:
    with pytest.raises(ValueError, match="broken"):
        await guarded(fail(), for_ever())


async def test_an_event_cuts_off() -> None:
    event, ended = asyncio.Event(), list[str]()
    assert await unless(event, answer()) == 42
    asyncio.get_running_loop().call_soon(event.set)
    assert await unless(event, then_one(for_ever(ended))) is None
    assert ended == ["ended"]
    with pytest.raises(ValueError, match="broken"):
        await unless(asyncio.Event(), fail())


async def test_a_task_that_swallows_a_cancellation_ends_all_the_same() -> None:
    """redis-py does so: nested, the outer cancellation must not leave the inner task alone."""
    event, ended = asyncio.Event(), list[str]()

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await for_ever(ended)

    asyncio.get_running_loop().call_soon(event.set)
    assert await unless(event, guarded(then_one(for_ever()), stubborn())) is None
    assert ended == ["ended"]


async def test_a_stray_that_ignores_its_cancellation_is_not_waited_for() -> None:
    strays, go = Strays(), asyncio.Event()

    async def stubborn() -> None:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue
        raise ValueError("too late to be told")

    assert await strays.outcome(stubborn(), timeout_s=0.01) is None
    caller = asyncio.create_task(strays.outcome(stubborn(), timeout_s=60))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert len(strays) == 2
    go.set()
    await until(lambda: len(strays) == 0)


async def test_an_outcome_is_a_result_an_exception_or_a_cancellation_of_its_own() -> None:
    strays = Strays()

    async def cancels_itself() -> None:
        raise asyncio.CancelledError

    async def leaves() -> None:
        raise SystemExit(3)

    answered = await strays.outcome(answer(), timeout_s=60)
    assert answered is not None
    assert answered.result() == 42
    failed = await strays.outcome(fail(), timeout_s=60)
    assert failed is not None
    assert isinstance(failed.exception(), ValueError)
    cancelled = await strays.outcome(cancels_itself(), timeout_s=60)
    assert cancelled is not None
    assert cancelled.cancelled()
    left = await strays.outcome(leaves(), timeout_s=60)
    assert left is not None
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        left.result()
    assert len(strays) == 0


async def test_what_takes_too_long_is_cut_off_however_often_it_ignores_that() -> None:
    async def stubborn() -> int:
        for _ in range(3):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue
        return 1

    async def quick() -> int:
        return 0

    assert await within(60, quick()) == 0
    assert await within(0.01, stubborn()) is None
    assert len(asyncio.all_tasks()) == 1
