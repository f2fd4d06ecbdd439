"""The figures of the course: as a table, and as JSON."""

import json
import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from tests.deploy.containers.course import Outcome
from tests.deploy.containers.images import LIGHT_MB, Size

LIGHT = ("scorer", "aggregator")


def too_big(sizes: dict[str, Size]) -> list[str]:
    """Light images that weigh more than they may."""
    return [
        f"the {name}'s image weighs {sizes[name].on_slim:.0f} MB on a slim base, over {LIGHT_MB}"
        for name in LIGHT
        if sizes[name].on_slim > LIGHT_MB
    ]


def image_table(sizes: dict[str, Size]) -> str:
    """What images weigh."""
    lines = ["image         here  layers  on slim   (MB, uncompressed)"]
    for name, size in sizes.items():
        lines.append(f"{name:<11}{size.total:7.0f} {size.layers:7.0f} {size.on_slim:8.0f}")
    return "\n".join(lines)


def course_table(outcome: Outcome) -> str:
    """What happened."""
    lines = ["", "phase                     s"]
    lines += [f"{name:<20}{seconds:7.0f}" for name, seconds in outcome.phases_s.items()]
    lines += ["", "stopped             status       s   grace"]
    lines += [
        f"{e['pod']:<20}{e['status']:6}{e['seconds']:8.1f}{e['grace_s']:8}" for e in outcome.ended
    ]
    lines += ["", "joined              served  trainer had"]
    lines += [f"{n:<20}{j['served']:6}{j['current']:13}" for n, j in outcome.joined.items()]
    lines += ["", "most memory         MiB"]
    lines += [f"{name:<20}{peak}" for name, peak in outcome.peak_mib.items()]
    lines += ["", "most failures of a probe in a row"]
    lines += [
        f"{name:<20}" + ", ".join(f"{kind} {number}" for kind, number in failing.items())
        for name, failing in outcome.most_failing.items()
    ]
    if outcome.ledger:
        names = ("dispatched", "trained", "rolled_back", "dropped", "given_up", "in_flight")
        book = ", ".join(f"{outcome.ledger[name]} {name}" for name in names)
        lines += ["", f"{outcome.steps} steps; {book}; balanced {outcome.ledger['balanced']}"]
        lines += [f"trained, counted step by step: {outcome.trained_by_hand}"]
    return "\n".join(lines)


def write(path: Path, sizes: dict[str, Size], outcome: Outcome, problems: list[str]) -> None:
    """deploy.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "images_mb": {
            name: {"total": round(s.total), "layers": round(s.layers), "on_slim": round(s.on_slim)}
            for name, s in sizes.items()
        },
        **asdict(outcome),
        "problems": problems,
    }
    path.write_text(json.dumps(figures, indent=2) + "\n")
