"""The line of a log that says why a process ended."""

import json
import re
from pathlib import Path
from typing import Any

TAIL_BYTES = 64 << 10
"""How much of the end of a log is read."""

EXCEPTION_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Fault)\b.*")
"""The last line of a Python traceback: `module.SomeError: what happened`."""


def last_error(log: Path, *, since_byte: int = 0) -> str:
    """What ended the process that wrote `log` from `since_byte` on, in one line; "" when it is
    empty.

    The last of the strongest kind that is there: `error: …` lines and JSON lines with an exception
    (event, then the exception's last line); tracebacks; JSON lines of level error; any line. So
    what a dying interpreter complains about afterwards does not hide why it died.
    """
    lines = _tail(log, since_byte)
    for kind in (_verdict, _exception, _logged_error, str.strip):
        for line in reversed(lines):
            found = kind(line)
            if found:
                return found
    return ""


def user_error(log: Path, *, since_byte: int = 0) -> str | None:
    """What the last `error: …` line says, without the prefix."""
    for line in reversed(_tail(log, since_byte)):
        if line.startswith("error: "):
            return line.removeprefix("error: ").strip()
    return None


def _tail(log: Path, since_byte: int) -> list[str]:
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(since_byte, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()]


def _verdict(line: str) -> str | None:
    if line.startswith("error: "):
        return line.removeprefix("error: ").strip()
    entry = _json_error(line)
    exception = [text for text in str(entry.get("exception", "")).splitlines() if text.strip()]
    return f"{entry.get('event', '')}: {exception[-1].strip()}" if exception else None


def _exception(line: str) -> str | None:
    return line.strip() if EXCEPTION_LINE.fullmatch(line.strip()) else None


def _logged_error(line: str) -> str | None:
    event = _json_error(line).get("event")
    return None if event is None else str(event)


def _json_error(line: str) -> dict[str, Any]:
    """A JSON log line of level error; empty for any other line."""
    if not line.startswith("{"):
        return {}
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    is_error = isinstance(entry, dict) and entry.get("level") in ("error", "critical")
    return entry if is_error else {}
