"""What is left of a run: summary.json, and the table at its end.

The trainer's account (trainer.json) is taken as it is; the launcher adds what the aggregator knows
over the whole run and how long everything took.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from services.launcher.errors import RunFailed
from services.launcher.figures import ABSENT, clock, fraction, number, percent, whole
from services.launcher.folder import RunFolder
from services.launcher.metrics_client import MetricsClient, Point

SHARE = 0.1
"""First and last rewards are means over this share of the steps."""

MIN_SHARE = 0.01
"""Smaller parts of a step are not in the table; summary.json has them all."""

EVAL_NOTE = (
    "eval_before and eval_after are greedy accuracy over the evaluation rows; with "
    "evaluation.every_expression these are every expression of the task, training's among them: "
    "accuracy on the task, not generalisation"
)


def read_trainer_report(path: Path) -> dict[str, Any]:
    """The trainer's account; a number that is not finite reads as null. Raises RunFailed when it is
    not there."""
    try:
        report = json.loads(path.read_text(), parse_constant=lambda _: None)
    except FileNotFoundError:
        raise RunFailed(f"the trainer ended without writing {path}") from None
    assert isinstance(report, dict)
    return report


def first_and_last(points: Sequence[Point]) -> tuple[float | None, float | None]:
    """Means over the first and the last SHARE of the steps that have a value, at least one step
    each.

    Example: rewards 0.1, 0.2, …, 2.0 over 20 steps -> (0.15, 1.95).
    """
    values = [point.value for point in points if point.value is not None]
    if not values:
        return None, None
    number_of = max(1, round(len(values) * SHARE))
    return sum(values[:number_of]) / number_of, sum(values[-number_of:]) / number_of


async def compose(
    report: Mapping[str, Any],
    metrics: MetricsClient,
    *,
    run: str,
    wall_s: float,
    restarts: Mapping[str, int],
) -> dict[str, Any]:
    """The summary of a run whose workers have ended and sent their last metrics."""
    reward_first, reward_last = first_and_last(await metrics.history("reward", reduce="mean"))
    tokens = await metrics.history("rollout/generated_tok_s", reduce="sum")
    return {
        "run": run,
        "complete": True,
        **report,
        "reward_first": reward_first,
        "reward_last": reward_last,
        "generated_tokens": round(sum(point.value or 0.0 for point in tokens)),
        "wall_s": round(wall_s, 1),
        "restarts": dict(restarts),
        "note": EVAL_NOTE,
    }


def write(summary: Mapping[str, Any], path: Path) -> None:
    """Write summary.json by a rename, so that a half-written one never says complete."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    temporary.rename(path)


def table(summary: Mapping[str, Any], folder: RunFolder) -> RenderableType:
    """The end of a run on the terminal."""
    rows = Table(title=f"run {summary['run']}: complete", title_justify="left", show_header=False)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    groups = summary.get("groups", {})
    for name, value in (
        ("steps", whole(summary.get("steps"))),
        ("wall time", clock(summary.get("wall_s"))),
        ("generated tokens", whole(summary.get("generated_tokens"))),
        ("trained", _trained(summary)),
        ("reward", _change(summary, "reward_first", "reward_last")),
        ("eval", _change(summary, "eval_before", "eval_after")),
        ("a step", _budget(summary)),
        ("groups", _ledger(groups)),
        ("policy versions", whole(summary.get("versions_published"))),
        ("max staleness", whole(summary.get("staleness_max"))),
        ("log-probability gap", _gap(summary)),
    ):
        rows.add_row(name, value)
    if any(summary.get("restarts", {}).values()):
        times = [f"{name} {count}x" for name, count in summary["restarts"].items() if count]
        rows.add_row("restarted", ", ".join(times))
    places = Table.grid(padding=(0, 2, 0, 0))
    places.add_row("summary", str(folder.summary))
    places.add_row("model", str(folder.path / "model"))
    places.add_row("logs", str(folder.logs))
    places.add_row("metrics", f"headrace aggregator {folder.recipe} serves them again")
    return Group(rows, places)


def _change(summary: Mapping[str, Any], before: str, after: str) -> str:
    first, last = summary.get(before), summary.get(after)
    text = f"{fraction(first)} → {fraction(last)}"
    return text if first is None or last is None else f"{text}  ({last - first:+.2f})"


def _trained(summary: Mapping[str, Any]) -> str:
    samples, rate = summary.get("trained_samples"), summary.get("samples_per_s")
    tokens = summary.get("trained_tokens")
    return f"{whole(samples)} samples, {whole(tokens)} tokens ({number(rate)} samples/s)"


def _budget(summary: Mapping[str, Any]) -> str:
    """Median seconds, then the parts that take 1 % or more, largest first."""
    parts = summary.get("time_budget") or {}
    total_s = sum(value for value in parts.values() if value)
    shares = {name: (value or 0.0) / total_s for name, value in parts.items()} if total_s else {}
    shown = [
        f"{name.removesuffix('_s').replace('_', ' ')} {percent(share)}"
        for name, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= MIN_SHARE
    ]
    return ": ".join(
        [f"{number(summary.get('step_s_median'))} s", *filter(None, [", ".join(shown)])]
    )


def _ledger(groups: Mapping[str, Any]) -> str:
    dropped = groups.get("dropped") or {}
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items()))
    counts = {name: whole(value) for name, value in groups.items() if isinstance(value, int)}
    get = counts.get
    text = (
        f"{get('dispatched', ABSENT)} dispatched = {get('trained', ABSENT)} trained"
        f" + {get('rolled_back', ABSENT)} rolled back"
        f" + {whole(sum(dropped.values()))} dropped{f' ({reasons})' if reasons else ''}"
        f" + {get('given_up', ABSENT)} given up + {get('in_flight', ABSENT)} in flight"
    )
    twice = groups.get("trained_twice")
    return text if not twice else f"{text}; {twice} trained twice"


def _gap(summary: Mapping[str, Any]) -> str:
    gap, tokens = summary.get("max_logprob_gap"), summary.get("gap_tokens")
    if gap is None:
        return ABSENT
    return f"at most {number(gap)} between trainer and engine over {whole(tokens)} tokens"
