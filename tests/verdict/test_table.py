"""What a case comes to, from answers of the API."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.verdict import table
from tests.verdict.__main__ import well
from tests.verdict.cases import BY_NAME
from tests.verdict.course import Outcome, wrong

TOOL = BY_NAME["one tool"]


def answer(**changes: Any) -> dict[str, Any]:
    right = {
        "verdict": "environment-bound",
        "sentence": "environment-bound: …",
        "knob": "make the tool search faster, or …",
        "culprit": "the tool search",
        "replica": None,
        "share": 0.8,
        "step_s": 1.8,
        "step_s_at_speed_up": 1.0,
    }
    return {**right, **changes}


def outcome(*predicted: float, came: tuple[float, ...], problems: tuple[str, ...] = ()) -> Outcome:
    answers = [answer(step_s_at_speed_up=each) for each in predicted]
    return Outcome(TOOL, answers=answers, came=came, problems=list(problems))


def test_a_prediction_is_compared_by_the_medians_of_windows() -> None:
    """1.0, 9.0 and 1.1 s were predicted, 0.2, 1.0 and 1.5 s came: 1.1 against 1.0."""
    found = outcome(1.0, 9.0, 1.1, came=(0.2, 1.0, 1.5))
    assert (found.predicted_s, found.came_s) == (1.1, 1.0)
    assert found.error == pytest.approx(0.1)
    assert well(found)
    assert not well(outcome(1.3, came=(1.0,)))
    assert not well(outcome(1.0, came=(1.0,), problems=("the verdict is balanced",)))
    assert not well(Outcome(TOOL))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"verdict": "balanced"}, "the verdict is balanced, not environment-bound"),
        ({"culprit": "the tool clock"}, "the culprit is the tool clock"),
        ({"knob": "more generators"}, "the knob does not name make the tool search faster"),
        ({"replica": "generator-1"}, "the replica is generator-1, not None"),
    ],
)
def test_whatever_is_not_named_is_a_problem(changes: dict[str, Any], says: str) -> None:
    assert wrong(TOOL, answer()) == []
    (problem,) = wrong(TOOL, answer(**changes))
    assert says in problem


def test_figures_are_of_all_cases(tmp_path: Path) -> None:
    balanced = Outcome(BY_NAME["nothing"], answers=[answer(verdict="balanced", share=None)])
    bad = outcome(1.3, came=(1.0,), problems=("the culprit is None, not the tool search",))
    found = table.figures([outcome(1.1, came=(1.0,)), bad, balanced], seconds=12.4)
    assert (found["cases"], found["right"], found["predictions"]) == (3, 2, 2)
    assert found["prediction_error_max"] == pytest.approx(0.3)
    assert [row["prediction_error"] for row in found["rows"]] == [0.1, 0.3, None]
    text = table.text(found)
    assert "2 of 3 right; 2 predictions, at most 30% off" in text
    assert "one tool: the culprit is None, not the tool search" in text
    table.write(found, tmp_path / "made" / "verdict.json")
    assert json.loads((tmp_path / "made" / "verdict.json").read_text()) == found
