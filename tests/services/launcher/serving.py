"""An application on loopback, and the command `headrace` that asks it."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from typer.testing import CliRunner

from services.launcher.cli import app

STYLE = re.compile(r"\x1b\[[0-9;]*m")
"""Bold and colours, as a terminal is told them."""


def serve(application: FastAPI) -> Iterator[str]:
    """The address of an application, on a free port of loopback."""
    config = uvicorn.Config(application, host="127.0.0.1", port=0, log_config=None, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def headrace(*arguments: str) -> str:
    """What the command prints where there is no terminal; its errors are raised."""
    done = CliRunner().invoke(app, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def on_a_terminal(*arguments: str, columns: int, typed: str = "") -> tuple[int, list[str]]:
    """Exit status and lines of the command on a terminal of so many columns, without styles."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (50, columns))
    # They would count for more than the terminal itself.
    environment = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES"}}
    process = subprocess.Popen(
        [sys.executable, "-m", "services.launcher.cli", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**environment, "TERM": "xterm"},
    )
    os.close(slave)
    os.write(master, typed.encode())
    shown = b""
    # A terminal whose other side is closed ends with an error on Linux, not with nothing.
    with contextlib.suppress(OSError):
        while chunk := os.read(master, 4096):
            shown += chunk
    os.close(master)
    text = STYLE.sub("", shown.decode())
    return process.wait(60), [line.rstrip() for line in text.splitlines()]
