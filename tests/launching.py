"""`headrace run` in a process, and an aggregator on what it has measured."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]


@contextmanager
def launched(
    recipe: Path,
    *,
    folder: Path,
    run: str,
    settings: Mapping[str, Any],
    more: Sequence[str] = (),
    cwd: Path = ROOT,
) -> Iterator["subprocess.Popen[str]"]:
    """A run of `recipe` in `folder`/`run`, with `settings` and `more` `--set` texts; ended with the
    test."""
    arguments = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    arguments += [*more, f"folder={folder}", f"run={run}"]
    sets = [word for argument in arguments for word in ("--set", argument)]
    process = subprocess.Popen(
        [sys.executable, "-m", "services.launcher.cli", "run", str(recipe), *sets],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=cwd,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def metrics_of(folder: Path, run: str) -> Iterator[httpx.Client]:
    """An aggregator on a finished run's metrics."""
    announce = folder / f"announce.{run}.json"
    command = [sys.executable, "-m", "services.aggregator", str(folder / run / "recipe.toml")]
    process = subprocess.Popen(
        [*command, "--announce", str(announce), "--set", "aggregator.http_port=0"],
        stderr=subprocess.DEVNULL,
    )
    try:
        while not announce.exists():
            assert process.poll() is None
            time.sleep(0.1)
        port = json.loads(announce.read_text())["http_port"]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield client
    finally:
        announce.unlink(missing_ok=True)
        process.terminate()
        process.wait(20)
