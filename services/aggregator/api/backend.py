"""What the endpoints stand on: read connections, and the one thread that writes."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from sqlalchemy import Connection

from services.aggregator.intake import Intake
from services.aggregator.metric import Catalogue
from services.aggregator.retention import FOREVER_S
from services.aggregator.store import Store
from services.common.config import Ledger

T = TypeVar("T")


@dataclass(frozen=True)
class Backend:
    """The store, its catalogue, and its writer thread."""

    store: Store
    catalogue: Catalogue
    writer: ThreadPoolExecutor
    """One thread: the store has one writer."""
    keep_s: float = FOREVER_S
    """How long a run is kept after it was last heard of, where it says nothing itself."""
    stuck_after_s: float = Ledger().stuck_after_s
    """Groups in flight for longer are named."""
    run: str | None = None
    """The run of the aggregator's own recipe."""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server is to end: what would go on for ever ends too."""
    intake: Intake = field(default_factory=Intake)
    """What became of the batches that this process was sent."""

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection that sees one moment of the store; blocking, so for worker threads."""
        with self.store.engine.begin() as connection:
            yield connection

    async def write(self, work: Callable[[], T]) -> T:
        """Run blocking work in the writer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self.writer, work)
