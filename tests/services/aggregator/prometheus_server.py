"""A real Prometheus in a folder of its own, on a free port of the loopback."""

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

START_S = 60.0
"""For a process to start and answer, on a busy machine."""

MISSING = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]

REASON = f"not installed: {', '.join(MISSING)} (Debian's package prometheus)"


@dataclass(frozen=True, slots=True)
class Api:
    """Prometheus' HTTP API somewhere: a real one, or ours."""

    url: str
    headers: Mapping[str, str]

    def data(self, path: str, **parameters: Any) -> Any:
        """The data of a good answer."""
        named = {name.replace("match", "match[]"): value for name, value in parameters.items()}
        response = httpx.get(
            f"{self.url}/api/v1/{path}", params=named, headers=dict(self.headers), timeout=30
        )
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["status"] == "success", answer
        return answer["data"]


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[int]:
    """An application over HTTP; its port."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started, "the application serves")
        yield int(listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(START_S)
        listening.close()
        assert not thread.is_alive()


def backfill(openmetrics: str, folder: Path) -> None:
    """Make a Prometheus' data of samples with times, in OpenMetrics' text."""
    source = folder / "samples.txt"
    source.write_text(openmetrics)
    arguments = ["tsdb", "create-blocks-from", "openmetrics", str(source), str(folder / "data")]
    made = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr


@contextlib.contextmanager
def prometheus(folder: Path, *, scraped_port: int, token: str) -> Iterator[Api]:
    """A Prometheus that scrapes an aggregator every second, on the data in `folder`."""
    configuration = folder / "prometheus.yml"
    configuration.write_text(
        f"""
global:
  scrape_interval: 1s
scrape_configs:
  - job_name: headrace
    authorization:
      credentials: {token}
    static_configs:
      - targets: ["127.0.0.1:{scraped_port}"]
"""
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={configuration}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=output,
            stderr=output,
        )
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/-/ready").status_code == 200
        return False

    try:
        wait_until(ready, "prometheus is ready")
        yield Api(url, {})
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Raises AssertionError when it does not hold within START_S."""
    deadline_s = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {START_S} s: {what}"
        time.sleep(0.1)
