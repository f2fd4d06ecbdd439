"""How a service lives and ends: signals and exit statuses in real processes, the rest in this."""

import asyncio
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.common import lifecycle
from services.common.errors import FENCED_STATUS, Fenced, UserError
from services.common.lifecycle import Lifecycle

ROOT = Path(__file__).parents[3]

PROGRAM = """
import asyncio, sys
from services.common import lifecycle
from services.common.errors import Fenced, UserError

async def main(state):
{body}

sys.exit(lifecycle.run(lambda: lifecycle.Lifecycle(service="scorer", replica="1"), main))
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a service whose main() has the given body; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(body: str, *, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
        program = PROGRAM.format(body=lines)
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def said(process: subprocess.Popen[str]) -> str:
    """The next line of its stdout."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


# How a process ends


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_main_drain_and_exit_0(start: Start, number: signal.Signals) -> None:
    process = start(
        """
print("up", flush=True)
await state.stopping.wait()
print(state.phase, flush=True)
"""
    )
    assert said(process) == "up"
    process.send_signal(number)
    out, err = process.communicate()
    assert (process.returncode, out.strip()) == (0, "draining")
    assert [json.loads(line)["phase"] for line in err.splitlines()] == ["draining"]


def test_a_second_signal_ends_the_process_at_once(start: Start) -> None:
    process = start(
        """
print("up", flush=True)
await state.stopping.wait()
print("stopping", flush=True)
await asyncio.sleep(3600)
"""
    )
    assert said(process) == "up"
    process.terminate()
    assert said(process) == "stopping"
    process.terminate()
    process.communicate()
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ("return", 0, ""),
        ("raise UserError('queue.url: no server at h:1; start one')", 2, "error: queue.url: no"),
        ("raise Fenced('attempt 2 has taken over')", FENCED_STATUS, "error: attempt 2 has taken"),
    ],
)
def test_expected_ends_have_a_status_and_one_line(
    start: Start, body: str, status: int, error: str
) -> None:
    process = start(body)
    _, err = process.communicate()
    assert process.returncode == status
    assert err.startswith(error)
    assert len(err.splitlines()) == (1 if error else 0)


def test_any_other_error_is_a_traceback_in_the_log_and_status_1(start: Start) -> None:
    process = start("raise RuntimeError('gone wrong')")
    _, err = process.communicate()
    assert process.returncode == 1
    line = json.loads(err)
    assert (line["event"], line["level"]) == ("failed", "error")
    assert "Traceback" in line["exception"]
    assert "gone wrong" in line["exception"]


def test_a_terminal_sees_the_traceback_without_local_variables(start: Start) -> None:
    """Local variables hold tokens."""
    mine, theirs = pty.openpty()
    try:
        process = start(
            "token = 'Bearer ' + 's3cret'.upper()\nraise RuntimeError('gone wrong')", stderr=theirs
        )
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # how a terminal says that the other side is gone
            while chunk := os.read(mine, 65536):
                shown += chunk
    finally:
        os.close(mine)
    process.communicate()
    assert process.returncode == 1
    assert b"RuntimeError: gone wrong" in shown
    assert b"S3CRET" not in shown


def test_errors_of_a_task_group_are_seen_through(capsys: pytest.CaptureFixture[str]) -> None:
    mistake, crash = UserError("run = 'A': use lower case"), RuntimeError("crash")
    nested = ExceptionGroup("tasks", [ExceptionGroup("inner", [mistake, mistake])])
    assert lifecycle.exit_status(nested) == 2
    assert capsys.readouterr().err == "error: run = 'A': use lower case\n"
    assert lifecycle.exit_status(ExceptionGroup("tasks", [mistake, crash])) == 1
    fenced = ExceptionGroup("tasks", [crash, Fenced("attempt 2 has taken over")])
    assert lifecycle.exit_status(fenced) == FENCED_STATUS
    assert capsys.readouterr().err == "error: attempt 2 has taken over\n"


def test_several_mistakes_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert lifecycle.exit_status(UserError("a: wrong\nb: wrong")) == 2
    assert capsys.readouterr().err == "error: a: wrong\nerror: b: wrong\n"


# State


async def test_listeners_hear_of_changes_and_only_of_changes() -> None:
    state, heard = Lifecycle(service="trainer"), []

    async def listen(ready: bool) -> None:
        heard.append(ready)

    state.on_ready_change(listen)
    for ready in (False, True, True, False):
        await state.set_ready(ready)
    assert heard == [True, False]


def test_a_snapshot_says_what_and_since_when() -> None:
    state = Lifecycle(service="generator", replica="2")
    state.details["served_version"] = "7"
    first = state.snapshot()
    assert (first.service, first.producer, first.ready) == ("generator", "generator-2", False)
    assert (first.phase, first.details) == ("starting", {"served_version": "7"})

    state.enter("loading")
    begun = state.snapshot()
    state.enter("loading")
    later = state.snapshot()
    assert later.phase == "loading"
    # Entering the phase that it is in does not begin it again.
    assert later.uptime_s - later.phase_s == pytest.approx(begun.uptime_s - begun.phase_s)
    assert first.uptime_s <= begun.uptime_s - begun.phase_s


async def test_a_sleep_ends_when_the_service_is_asked_to_stop() -> None:
    state = Lifecycle(service="scorer")
    assert not await state.stopped_within(0.001)
    sleeping = asyncio.create_task(state.stopped_within(3600))
    await asyncio.sleep(0)
    state.stopping.set()
    assert await sleeping
    assert await state.stopped_within(3600)


@pytest.mark.parametrize(
    ("host", "replica"),
    [("generator-7d9f-x2", "generator-7d9f-x2"), ("My_Host.local", "my-host-local"), ("_", "0")],
)
def test_a_replicas_name_fits_everywhere(
    monkeypatch: pytest.MonkeyPatch, host: str, replica: str
) -> None:
    monkeypatch.setenv("HOSTNAME", host)
    assert lifecycle.default_replica() == replica


# Announcing


def test_an_announcement_is_whole_or_absent(tmp_path: Path) -> None:
    path, done = tmp_path / "scorer.json", threading.Event()
    path.write_text(json.dumps({"port": -1, "padding": ""}))
    seen: list[int] = []

    def read() -> None:
        while not done.is_set():
            seen.append(json.loads(path.read_text())["port"])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for port in range(300):
            lifecycle.announce(str(path), port=port, padding="x" * 100_000)
    finally:
        done.set()
        reader.join()
    assert seen == sorted(seen)
    assert list(tmp_path.iterdir()) == [path]
    lifecycle.announce(None, port=1)


def test_a_place_that_cannot_be_written_is_a_users_mistake(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "scorer.json"
    with pytest.raises(UserError, match=r"--announce .*scorer\.json: cannot be written: No such"):
        lifecycle.announce(str(path), port=1)
