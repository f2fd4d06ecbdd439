"""The figures of many pipelines: as a table, and as JSON."""

import json
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from tests.chaos.course import Injected, Life

COUNTS = ("dispatched", "trained", "rolled_back", "given_up", "trained_twice", "unaccounted")


def in_a_line(life: Life) -> str:
    """One pipeline's end, in a line."""
    found = life.verdict
    if found is None:
        return f"NO VERDICT after {life.seconds:.0f} s and {len(life.injected)} faults"
    return (
        f"{'well' if life.well else 'NOT WELL'} after {life.seconds:.0f} s and "
        f"{len(life.injected)} faults: {found.steps} steps, {found.attempts} attempts, "
        f"{found.dispatched} groups = {found.trained} trained + {found.rolled_back} rolled back + "
        f"{sum(found.dropped.values())} dropped + {found.given_up} given up; "
        f"twice {found.trained_twice}, unaccounted {found.unaccounted}"
    )


def figures(lives: Sequence[Life], *, seed: int, seconds: float) -> dict[str, Any]:
    """What chaos.json holds. A pipeline without a verdict has all its prompts unaccounted."""
    by_kind: defaultdict[str, list[Injected]] = defaultdict(list)
    for injected in (each for life in lives for each in life.injected):
        by_kind[injected.kind].append(injected)
    beside = [each for found in by_kind.values() for each in found if each.beside_deaths]
    verdicts = [life.verdict for life in lives if life.verdict is not None]
    totals: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
    dropped: Counter[str] = Counter()
    for verdict in verdicts:
        totals.update({name: getattr(verdict, name) for name in COUNTS})
        dropped.update(verdict.dropped)
    totals["unaccounted"] += sum(life.plan.num_prompts for life in lives if life.verdict is None)
    crashes: Counter[str] = Counter()
    for life in lives:
        crashes.update(life.crashes)
    return {
        "faults": sum(len(life.injected) for life in lives),
        "pipelines": len(lives),
        "pipelines_not_well": sum(not life.well for life in lives),
        **totals,
        "dropped": dict(dropped),
        "steps": sum(verdict.steps for verdict in verdicts),
        "attempts": sum(verdict.attempts for verdict in verdicts),
        "metric_gaps": sum(verdict.metric_gaps for verdict in verdicts),
        "longest_stall_s": round(
            max((each.stall_s for life in lives for each in life.injected), default=0.0), 1
        ),
        "by_fault": {
            kind: _row(found, [each for each in found if not each.beside_deaths])
            for kind, found in sorted(by_kind.items())
        },
        "beside_deaths": _row(beside, beside),
        "crashes": dict(crashes.most_common()),
        "problems": [problem for life in lives for problem in life.problems],
        "seconds": round(seconds),
        "seed": seed,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _row(found: Sequence[Injected], timed: Sequence[Injected]) -> dict[str, Any]:
    """How often, and the times of those `timed`."""
    stalls = [each.stall_s for each in timed]
    return {
        "injected": len(found),
        "mean_stall_s": round(mean(stalls), 1) if stalls else None,
        "longest_stall_s": round(max(stalls), 1) if stalls else None,
        "mean_lasted_s": round(mean(each.lasted_s for each in timed), 1) if timed else None,
    }


def text(found: dict[str, Any]) -> str:
    """The table by fault, and the account over all pipelines."""
    lines = [
        "",
        f"{'fault':<22}{'injected':>9}{'stood still: mean s':>21}{'longest s':>11}{'lasted s':>10}",
    ]
    rows = found["by_fault"] | {"(beside a killer) *": found["beside_deaths"]}
    for kind, row in rows.items():
        mean_s, longest_s, lasted_s = (
            "-" if row[name] is None else f"{row[name]:.1f}"
            for name in ("mean_stall_s", "longest_stall_s", "mean_lasted_s")
        )
        lines.append(f"{kind:<22}{row['injected']:>9}{mean_s:>21}{longest_s:>11}{lasted_s:>10}")
    reasons = ", ".join(f"{number} {reason}" for reason, number in found["dropped"].items())
    lines += [
        "* of the faults above, while a prompt killed the workers that took it; their times are "
        "in no row above",
        "",
        f"{found['faults']} faults in {found['pipelines']} pipelines, {found['seconds']} s; "
        f"longest stall {found['longest_stall_s']} s",
        f"{found['dispatched']} groups dispatched = {found['trained']} trained + "
        f"{found['rolled_back']} rolled back + {sum(found['dropped'].values())} dropped "
        f"({reasons}) + {found['given_up']} given up",
        f"{found['steps']} steps of the lines that are left, {found['attempts']} attempts; of "
        f"{found['metric_gaps']} steps no metric is left",
        f"trained twice {found['trained_twice']}, unaccounted {found['unaccounted']}, "
        f"pipelines not well {found['pipelines_not_well']}",
    ]
    lines += [f"{number} x {crash}" for crash, number in found["crashes"].items()]
    return "\n".join(lines)


def write(found: dict[str, Any], path: Path) -> None:
    """Write the figures as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")
