"""Readiness that tells whether what a service stands on answers. Liveness never depends on it."""

import asyncio
from collections.abc import Callable

from services.common.lifecycle import Lifecycle

LOOK_EVERY_S = 0.2
"""Far more often than probes ask."""


async def ready_while(state: Lifecycle, reached: Callable[[], bool]) -> None:
    """For ever: ready while `reached()` and not asked to stop.

    What is asked is what the service's own work has met last: a probe of its own could pass where
    the work does not.
    """
    while True:
        await state.set_ready(reached() and not state.stopping.is_set())
        await asyncio.sleep(LOOK_EVERY_S)
