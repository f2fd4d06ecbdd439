"""Service processes of tests."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def service(command: Sequence[str], folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a service's command; its log is in `folder/log`, its ports in `folder/ports`."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--announce", str(folder / "ports")], stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
