"""Ends the run's process groups when the launcher is gone, however it went: nothing outlives a
SIGKILL of it.

A process of its own, standard library only: `python -I -S guard.py`. Its standard input is a pipe
that only the launcher holds open: a line `+GROUP` adds a process group, `-GROUP` forgets one, and
the end of the pipe means that the launcher has ended. Killing by group also ends processes that a
service started itself: an engine's core does not notice that its parent was killed, and
PR_SET_PDEATHSIG reaches direct children only.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def follow(lines: Iterable[str]) -> set[int]:
    """The groups that are still there when the lines end."""
    groups: set[int] = set()
    for line in lines:
        number = int(line[1:])
        if line[0] == "+":
            groups.add(number)
        else:
            groups.discard(number)
    return groups


def main() -> None:
    """Wait for the launcher's end, then kill what it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group in follow(sys.stdin):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
