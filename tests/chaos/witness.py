"""What a trainer did to its weights, noted by a witness that knows neither book nor journal nor
ledger, and the line of weights that follows from it.

    {"attempt": 3, "restored": [1, 8]}                  attempt 3 begins with the weights that
                                                        attempt 1 had after its step 8
    {"attempt": 3, "step": 9, "groups": [...],          step 9 was made of these groups, and
     "entered": [...]}                                  samples of these entered the gradient
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    attempt: int
    step: int
    groups: tuple[str, ...]
    entered: frozenset[str] = frozenset()


class Note:
    """The file that a trainer's witness writes: each line is on disk before anything follows."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)

    def began(self, attempt: int, *, restored: Sequence[int] | None) -> None:
        """An attempt begins with a checkpoint's weights, or with the model's."""
        self._write({"attempt": attempt, "restored": restored and list(restored)})

    def stepped(self, step: Step) -> None:
        """The weights have changed."""
        self._write(
            {
                "attempt": step.attempt,
                "step": step.step,
                "groups": list(step.groups),
                "entered": sorted(step.entered),
            }
        )

    def _write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line | {"at_s": time.time()}).encode() + b"\n"
        assert os.write(self._descriptor, data) == len(data)
        os.fsync(self._descriptor)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines so far; none where no trainer has come so far."""
    if not path.exists():
        return []
    text = path.read_bytes()
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def steps(lines: Iterable[dict[str, Any]]) -> Iterator[Step]:
    """All steps, those that were lost included."""
    for line in lines:
        if "step" in line:
            yield Step(
                line["attempt"], line["step"], tuple(line["groups"]), frozenset(line["entered"])
            )


def line_of_weights(lines: Sequence[dict[str, Any]], *, last: int) -> list[Step]:
    """The steps whose effect is in the weights of attempt `last`, the first first.

    Example: attempt 1 made steps 1 to 10, attempt 2 began with what 1 had after 8 and made 9 to 12:
    1 to 8 of attempt 1, and 9 to 12 of attempt 2.
    """
    parent = {line["attempt"]: line["restored"] for line in lines if "restored" in line}
    made = list(steps(lines))
    line: list[Step] = []
    attempt, until = last, max((s.step for s in made if s.attempt == last), default=None)
    while True:
        restored = parent[attempt]
        begin = restored[1] if restored else 0
        of_it = [s for s in made if s.attempt == attempt and s.step > begin]
        line = [s for s in of_it if until is None or s.step <= until] + line
        if not restored:
            return line
        attempt, until = restored
