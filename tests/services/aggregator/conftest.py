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


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path / 'metrics.sqlite'}")
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
