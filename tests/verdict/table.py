"""What came of all cases: a table for people, and figures."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.verdict.course import WINDOWS, Outcome


def figures(outcomes: Sequence[Outcome], *, seconds: float) -> dict[str, Any]:
    """As they are written: counts, the largest error of a prediction, a row a case."""
    errors = [each.error for each in outcomes if each.error is not None]
    return {
        "cases": len(outcomes),
        "right": sum(each.right for each in outcomes),
        "prediction_error_max": round(max(errors), 3) if errors else None,
        "prediction_error_median": round(statistics.median(errors), 3) if errors else None,
        "predictions": len(errors),
        "windows": WINDOWS,
        "seconds": round(seconds),
        "rows": [_row(each) for each in outcomes],
    }


def _row(outcome: Outcome) -> dict[str, Any]:
    case, answers = outcome.case, outcome.answers
    return {
        "slowed": case.name,
        "right": outcome.right,
        "expected": case.says,
        "verdicts": [answer["verdict"] for answer in answers],
        "share": _rounded(
            statistics.median(answer["share"] or 0.0 for answer in answers) if answers else None
        ),
        "steps_of_a_window": case.window,
        "names": case.culprit or case.replica,
        "knob": answers[-1]["knob"] if answers else None,
        "step_s": _rounded(outcome.step_s if answers else None),
        "speed_up": case.speed_up if case.predicts else None,
        "predicted_s": _rounded(outcome.predicted_s),
        "came_s": _rounded(outcome.came_s),
        "prediction_error": _rounded(outcome.error),
        "problems": outcome.problems,
        "seconds": round(outcome.seconds),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def text(found: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{'slowed on purpose':<31}{'verdict':<19}{'names':<27}{'right':<7}{'share':>6}"
        f"{'s/step':>8}{'asked':>7}{'predicted':>11}{'came':>7}{'error':>7}"
    ]
    for row in found["rows"]:
        asked = "" if row["predicted_s"] is None else "free"
        if row["speed_up"]:
            asked = f"{row['speed_up']:g} x"
        said = sorted(set(row["verdicts"]), key=row["verdicts"].index)
        names = (row["names"] or "").removeprefix("the ")
        lines.append(
            f"{row['slowed']:<31}{', '.join(said):<19}{names:<27}"
            f"{'yes' if row['right'] else 'NO':<7}{_percent(row['share']):>6}"
            f"{_seconds(row['step_s']):>8}{asked:>7}{_seconds(row['predicted_s']):>11}"
            f"{_seconds(row['came_s']):>7}{_percent(row['prediction_error']):>7}"
        )
    lines += [
        "",
        f"{found['right']} of {found['cases']} right; {found['predictions']} predictions, at most "
        f"{_percent(found['prediction_error_max'])} off; {found['seconds']} s",
    ]
    lines += [f"{row['slowed']}: {each}" for row in found["rows"] for each in row["problems"]]
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def write(found: dict[str, Any], path: Path) -> None:
    """Write the figures as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")
