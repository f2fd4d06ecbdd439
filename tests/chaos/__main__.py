"""`python -m tests.chaos`: faults by the hundred into pipelines of real processes.

Prints what happens, then a table, and writes benchmarks/results/chaos.json. The exit status is 1
when a promise was broken; the folder of such a pipeline stays, and the command that repeats it is
shown. Faults, pipelines and moments follow from the seed, as far as a busy machine lets them.
"""

import asyncio
import itertools
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from tests.chaos import faults, table
from tests.chaos.course import Life, live, plan_of
from tests.chaos.world import make_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "chaos.json"


def kinds_of(number: int, *, seed: int, num_faults: int) -> list[str]:
    """The faults of pipeline `number`: over all pipelines each kind comes equally often."""
    kinds = list(faults.FAULTS)
    random.Random(f"kinds {seed}").shuffle(kinds)
    start = number * num_faults
    chosen = list(itertools.islice(itertools.cycle(kinds), start, start + num_faults))
    random.Random(f"order {seed} {number}").shuffle(chosen)
    return chosen


async def run(
    numbers: list[int], *, seed: int, num_faults: int, at_once: int, minutes: float, folder: Path
) -> list[Life]:
    """All pipelines, `at_once` at a time; none is begun when the time is up."""
    model = make_model(folder / "model")
    begin_s = time.monotonic()
    waiting = iter(numbers)
    lives: list[Life] = []

    async def some() -> None:
        for number in waiting:
            if time.monotonic() - begin_s > minutes * 60:
                print(f"pipeline {number} is not begun: {minutes:g} minutes are over", flush=True)
                continue
            own = f"{seed}/{number}"

            def say(text: str, number: int = number) -> None:
                at_s = time.monotonic() - begin_s
                print(f"{at_s:6.0f} s  pipeline {number:2}  {text}", flush=True)

            life = await live(
                plan_of(own, number),
                kinds_of(number, seed=seed, num_faults=num_faults),
                folder / f"pipeline-{number}",
                model=model,
                seed=own,
                say=say,
            )
            lives.append(life)
            say(table.in_a_line(life))
            for problem in life.problems:
                say(f"PROBLEM {problem}")
            if life.well:
                shutil.rmtree(life.folder)
            else:
                say(
                    f"its folder stays: {life.folder}; repeat it: python -m tests.chaos "
                    f"--seed {seed} --faults {num_faults} --only {number}"
                )

    await asyncio.gather(*(some() for _ in range(at_once)))
    return lives


def main(
    pipelines: Annotated[int, typer.Option(help="Pipelines in all.")] = 20,
    num_faults: Annotated[int, typer.Option("--faults", help="Of each pipeline.")] = 11,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 1,
    at_once: Annotated[int, typer.Option(help="Pipelines at a time.")] = 2,
    minutes: Annotated[float, typer.Option(help="No pipeline is begun after it.")] = 25.0,
    only: Annotated[int | None, typer.Option(help="One pipeline, by its number.")] = None,
    folder: Annotated[Path | None, typer.Option(help="For the pipelines' files.")] = None,
    results: Annotated[Path, typer.Option(help="The figures, as JSON.")] = RESULTS,
) -> None:
    """Inject faults, judge, and tell."""
    place = folder or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    numbers = [only] if only is not None else list(range(pipelines))
    begin_s = time.monotonic()
    lives = asyncio.run(
        run(
            numbers,
            seed=seed,
            num_faults=num_faults,
            at_once=at_once,
            minutes=minutes,
            folder=place,
        )
    )
    figures = table.figures(lives, seed=seed, seconds=time.monotonic() - begin_s)
    print(table.text(figures))
    if only is None:
        table.write(figures, results)
    well = all(life.well for life in lives) and len(lives) == len(numbers)
    if well and folder is None:
        shutil.rmtree(place)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    typer.run(main)
