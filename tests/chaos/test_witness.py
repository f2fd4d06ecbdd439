"""The line of weights, from what the witness of several attempts has noted."""

from pathlib import Path
from typing import Any

from tests.chaos import witness
from tests.chaos.witness import Note, Step


def began(attempt: int, restored: list[int] | None = None) -> dict[str, Any]:
    return {"attempt": attempt, "restored": restored}


def made(attempt: int, *steps: int) -> list[dict[str, Any]]:
    return [
        {"attempt": attempt, "step": step, "groups": [f"0.{step}.{attempt}.0"], "entered": []}
        for step in steps
    ]


def numbers(lines: list[dict[str, Any]], last: int) -> list[tuple[int, int]]:
    return [(step.attempt, step.step) for step in witness.line_of_weights(lines, last=last)]


def test_a_restored_checkpoint_cuts_the_steps_behind_it() -> None:
    lines = [began(1), *made(1, 1, 2, 3), began(2, [1, 2]), *made(2, 3, 4)]
    assert numbers(lines, 2) == [(1, 1), (1, 2), (2, 3), (2, 4)]
    assert numbers(lines, 1) == [(1, 1), (1, 2), (1, 3)]


def test_steps_of_a_replaced_trainer_that_still_runs_are_in_no_line() -> None:
    lines = [began(1), *made(1, 1, 2), began(2, [1, 2]), *made(1, 3), *made(2, 3), *made(1, 4)]
    assert numbers(lines, 2) == [(1, 1), (1, 2), (2, 3)]


def test_an_attempt_without_a_checkpoint_begins_anew() -> None:
    lines = [began(1), *made(1, 1), began(2), *made(2, 1, 2), began(3, [2, 1]), began(4, [2, 1])]
    assert numbers(lines, 4) == [(2, 1)]
    assert numbers(lines, 3) == [(2, 1)]


def test_what_is_noted_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "witness.jsonl"
    assert witness.read(path) == []
    note = Note(path)
    note.began(2, restored=(1, 4))
    step = Step(2, 5, ("0.1.2.0", "0.2.2.0"), frozenset({"0.1.2.0"}))
    note.stepped(step)
    with path.open("ab") as file:
        file.write(b'{"attempt": 2, "st')  # a line that is being written
    lines = witness.read(path)
    assert lines[0]["restored"] == [1, 4]
    assert list(witness.steps(lines)) == [step]
