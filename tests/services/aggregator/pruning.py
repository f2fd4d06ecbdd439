"""Reading the store, and archiving what maintenance would."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, select

from services.aggregator import ledger, schema
from services.aggregator.series import RunRow, find_run
from services.aggregator.store import Store


@contextmanager
def reading(store: Store) -> Iterator[tuple[Connection, RunRow]]:
    """A connection, and the run `demo`."""
    with store.engine.begin() as connection:
        run = find_run(connection, "demo")
        assert run is not None
        yield connection, run


def prune(store: Store, *, keep_groups: int) -> int:
    """Archive all that is too much; how many groups that were."""
    with store.rolling() as connection:
        assert connection is not None
        run_id = connection.scalars(select(schema.runs.c.id)).one()
        total = 0
        while number := ledger.prune(connection, run_id, keep_groups=keep_groups):
            total += number
        return total
