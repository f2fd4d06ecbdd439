"""A real store in a folder of the test's own, and ways to fill and ask it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.ingest import Ingest
from services.aggregator.store import Store
from tests.services.aggregator import postgres

BOTH_DATABASES = (
    *("test_ingest", "test_history", "test_rollup", "test_changes"),
    *("test_archive", "test_ledger", "test_lineage", "test_trace_store"),
)
"""Modules whose tests run once on each database: where the store itself is tested."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`database` in those modules."""
    module = metafunc.module.__name__.rpartition(".")[2]
    if "database" in metafunc.fixturenames and module in BOTH_DATABASES:
        metafunc.parametrize("database", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a PostgreSQL server, up to the database's name."""
    programs = postgres.binaries()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed")
    with postgres.server(programs) as url:
        yield url


@pytest.fixture
def postgres_url(postgres_server: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a PostgreSQL database of the test's own."""
    with postgres.database(postgres_server, f"test_{abs(hash(request.node.nodeid))}") as url:
        yield url


@pytest.fixture
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database: SQLite, or as the test is parametrised."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return f"sqlite:///{tmp_path / 'metrics.sqlite'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    opened = Store.open(database)
    yield opened
    opened.close()


@pytest.fixture
def ingest(store: Store) -> Ingest:
    return Ingest(store)


@pytest.fixture
def backend(store: Store) -> Iterator[Backend]:
    with ThreadPoolExecutor(1) as writer:
        yield Backend(store, CATALOGUE, writer)


@pytest.fixture
def client(backend: Backend) -> httpx.AsyncClient:
    """The REST application, asked in process."""
    transport = httpx.ASGITransport(create_app(backend))
    return httpx.AsyncClient(transport=transport, base_url="http://aggregator")
