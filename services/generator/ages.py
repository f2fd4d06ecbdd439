"""Which groups have become too old to be used: their generation is cut off at once.

A group is as old as its oldest token. Once more versions have been published since than the
trainer admits, no step will ever take it, however soon it is finished.

waits_for: the trainer's announcements. unblocked_by: the trainer.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.generator.weights import Announcement, PolicyClient


class Ages:
    """The groups under way, and where in the line of published weights each began."""

    def __init__(self, client: PolicyClient) -> None:
        self._client = client
        self._began: dict[asyncio.Event, int] = {}

    @contextmanager
    def watched(self, *, began: int) -> Iterator[asyncio.Event]:
        """An event that is set once a group that began at this place is too old.

        The place is that of the version served when the group began: its first token is of this
        version or of a newer one.
        """
        too_old = asyncio.Event()
        self._began[too_old] = began
        if self._client.latest is not None:
            self._compare(self._client.latest)
        try:
            yield too_old
        finally:
            del self._began[too_old]

    async def follow(self) -> None:
        """Compare all with each new announcement, for ever."""
        latest = None
        while True:
            latest = await self._client.other_than(latest)
            self._compare(latest)

    def _compare(self, latest: Announcement) -> None:
        for too_old, began in self._began.items():
            if latest.publishes - began > latest.max_staleness:
                too_old.set()
