"""Which of several aggregators watches a run: alerts fire once, and mirrors get each step once.

On PostgreSQL it is the one that holds an advisory lock, for as long as its connection lives; when
it ends, another takes over. A SQLite file has one aggregator anyway.
"""

import threading

from sqlalchemy import Connection, Engine, func, select
from sqlalchemy.exc import SQLAlchemyError

LEADING = 7_204_304
"""First half of the advisory lock's name; the second is the run's."""


class Leading:
    """A claim to watch something of a run. Blocking; threads wait for each other."""

    def __init__(self, engine: Engine, run: str, *, what: str) -> None:
        self._engine = engine
        self._name = f"{run}/{what}"
        self._asking = threading.Lock()
        self._connection: Connection | None = None

    def holds(self) -> bool:
        """Whether this process watches the run, which it tries to. Raises SQLAlchemyError when the
        database does not answer; then it does not."""
        if self._engine.dialect.name != "postgresql":
            return True
        with self._asking:
            return self._holds()

    def _holds(self) -> bool:
        try:
            if self._connection is not None:
                # A connection that has broken has lost the lock.
                self._connection.scalar(select(1))
                return True
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._connection = connection
            name = func.hashtext(self._name)
            if connection.scalar(select(func.pg_try_advisory_lock(LEADING, name))):
                return True
        except SQLAlchemyError:
            self._close()
            raise
        self._close()
        return False

    def close(self) -> None:
        """Give the claim up."""
        with self._asking:
            self._close()

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if not connection.invalidated:
            # Not back to the pool: the lock goes with the connection.
            connection.detach()
        connection.close()
