"""Slots, and where their time goes, by a clock of the test."""

import asyncio
from types import SimpleNamespace

import pytest

from services.generator import slots as module
from services.generator.slots import Slots


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


async def test_no_more_than_total_hold_a_slot() -> None:
    slots = Slots(2)
    most = 0

    async def work() -> None:
        nonlocal most
        async with slots:
            most = max(most, slots.busy)
            await asyncio.sleep(0)

    await asyncio.gather(*(work() for _ in range(9)))
    assert (most, slots.busy) == (2, 0)


async def test_a_slot_comes_back_from_work_that_fails_or_is_cancelled() -> None:
    slots = Slots(1)

    async def fail() -> None:
        async with slots:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()

    async def hang() -> None:
        async with slots:
            await asyncio.Event().wait()

    holding, waiting = asyncio.create_task(hang()), asyncio.create_task(hang())
    await asyncio.sleep(0)
    waiting.cancel()
    holding.cancel()
    await asyncio.wait({holding, waiting})
    async with slots:
        assert slots.busy == 1
    assert slots.busy == 0


async def test_slot_seconds_are_busy_starved_or_neither(clock: Clock) -> None:
    """4 slots: 10 s with one busy, 5 s with one busy while no request waits, 5 s idle so."""
    slots = Slots(4)
    async with slots:
        clock.now += 10
        slots.set_starving(True)
        clock.now += 5
    clock.now += 5
    assert slots.drain() == (15.0, 5 * 3 + 5 * 4, 80.0)
    assert slots.drain() == (0.0, 0.0, 0.0)
    slots.set_starving(False)
    clock.now += 1
    assert slots.drain() == (0.0, 0.0, 4.0)
