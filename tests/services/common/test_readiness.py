"""Readiness that follows whether what a service stands on answers."""

import asyncio

from services.common.lifecycle import Lifecycle, cancel
from services.common.readiness import ready_while
from tests.waiting import until


async def test_readiness_follows_until_the_service_is_asked_to_stop() -> None:
    state, reached = Lifecycle("scorer"), True
    following = asyncio.create_task(ready_while(state, lambda: reached))
    await until(lambda: state.ready)
    reached = False
    await until(lambda: not state.ready)
    reached = True
    await until(lambda: state.ready)
    state.stopping.set()
    await until(lambda: not state.ready)
    await cancel(following)
