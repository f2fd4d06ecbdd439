"""`python -m tests.verdict`: one stage after another is slowed in a pipeline of real processes, and
the verdict has to name it, and to say what comes when it is made faster.

Prints what the verdicts say, then a table, and writes benchmarks/results/verdict.json. The exit
status is 1 when a verdict was wrong or a prediction more than 20 % off; the folder of such a case
stays.
"""

import asyncio
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tests.verdict import table
from tests.verdict.cases import BY_NAME, CASES, Case
from tests.verdict.course import WITHIN, Outcome, live
from tests.verdict.world import make_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "verdict.json"


async def run(cases: Sequence[Case], folder: Path, *, at_once: int) -> list[Outcome]:
    """All cases, `at_once` at a time; what came of each, in their order."""
    model = make_model(folder / "model")
    begin_s = time.monotonic()
    waiting = iter(enumerate(cases))
    outcomes: dict[int, Outcome] = {}

    async def some() -> None:
        for number, case in waiting:

            def say(text: str, case: Case = case) -> None:
                print(f"{time.monotonic() - begin_s:6.0f} s  {case.name}: {text}", flush=True)

            place = folder / f"case-{number}"
            try:
                outcome = await live(case, place, model=model, say=say)
            except Exception as error:
                (place / "failure.txt").write_text("".join(traceback.format_exception(error)))
                outcome = Outcome(case, problems=[f"{type(error).__name__}: {error}"])
            outcomes[number] = outcome
            if well(outcome):
                shutil.rmtree(place)
            else:
                say(f"its folder stays: {place}")

    await asyncio.gather(*(some() for _ in range(at_once)))
    return [outcomes[number] for number in range(len(cases))]


def well(outcome: Outcome) -> bool:
    """Right, and predicted well enough where something was made faster."""
    predicted = not outcome.case.predicts or (outcome.error is not None and outcome.error <= WITHIN)
    return outcome.right and predicted


def main(
    only: Annotated[list[str] | None, typer.Option(help="Of these names; repeatable.")] = None,
    at_once: Annotated[int, typer.Option(help="Cases at a time; they slow each other.")] = 1,
    folder: Annotated[Path | None, typer.Option(help="For the pipelines' files.")] = None,
    results: Annotated[Path, typer.Option(help="The figures, as JSON.")] = RESULTS,
) -> None:
    """Slow, judge, make faster, compare."""
    place = folder or Path(tempfile.mkdtemp(prefix="headrace-verdict-"))
    cases = CASES if not only else [BY_NAME[name] for name in only]
    begin_s = time.monotonic()
    outcomes = asyncio.run(run(cases, place, at_once=at_once))
    figures = table.figures(outcomes, seconds=time.monotonic() - begin_s)
    print(table.text(figures))
    if not only:
        table.write(figures, results)
    good = all(map(well, outcomes))
    if good and folder is None:
        shutil.rmtree(place)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(main)
