import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from services.common.background import guarded, unless


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
