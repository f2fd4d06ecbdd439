"""Conversation slots of one replica, and where their time goes."""

import asyncio
import threading
import time


class Slots:
    """`total` slots; `async with slots:` holds one.

    Slot-seconds are split into busy, starved (free while no request waits: pacing or a slow
    trainer) and the rest. Read and reset by `drain()`, also from another thread.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.busy = 0
        self.starving = False
        self._semaphore = asyncio.Semaphore(total)
        self._lock = threading.Lock()
        self._since_s = time.monotonic()
        self._busy_s = self._starved_s = self._all_s = 0.0

    async def __aenter__(self) -> None:
        await self._semaphore.acquire()
        self._account()
        self.busy += 1

    async def __aexit__(self, *_: object) -> None:
        self._account()
        self.busy -= 1
        self._semaphore.release()

    def set_starving(self, starving: bool) -> None:
        """Say whether requests are waiting (False) or the last look found none (True)."""
        self._account()
        self.starving = starving

    def drain(self) -> tuple[float, float, float]:
        """(busy, starved, all) slot-seconds since the last call."""
        self._account()
        with self._lock:
            seen = self._busy_s, self._starved_s, self._all_s
            self._busy_s = self._starved_s = self._all_s = 0.0
        return seen

    def _account(self) -> None:
        with self._lock:
            now = time.monotonic()
            elapsed = now - self._since_s
            self._since_s = now
            self._busy_s += elapsed * self.busy
            self._all_s += elapsed * self.total
            if self.starving:
                self._starved_s += elapsed * (self.total - self.busy)
