"""One case from the start of its services to the comparison of what was predicted with what came.

start -> settle -> three windows, judged -> make it faster -> settle -> three windows, timed
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.verdict.cases import Case
from tests.verdict.world import GROUPS_PER_STEP, SleepingPipeline

WINDOWS = 3
"""Of each state of a run; medians are over them."""

SETTLE_STEPS = 4
"""Beyond those that may be under way, until what was before is trained."""

POLL_S = 0.25

STEPS_WITHIN_S = 150.0
"""Longest wait for a window's steps; the first ones come after the services have started."""

WITHIN = 0.20
"""How far a prediction may be off."""

BALANCE = (0.055, 0.09)
"""Where the trainer's share of waiting is brought to when nothing is to be slow: within the 5 to
10 % of which no rule says anything."""

FREE = 1e6
"""Asked as a speed-up, the end of what is to blame."""

Say = Callable[[str], None]


@dataclass
class Outcome:
    """What came of a case."""

    case: Case
    answers: Sequence[Mapping[str, Any]] = ()
    """Of the API, on each window before anything was made faster."""
    came: Sequence[float] = ()
    """Seconds of a step in each window afterwards."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """Before: the median of the windows."""
        return float(statistics.median(answer["step_s"] for answer in self.answers))

    @property
    def predicted_s(self) -> float | None:
        """The median of the windows' predictions; None where nothing was made faster."""
        if not self.case.predicts:
            return None
        found = [answer["step_s_at_speed_up"] for answer in self.answers]
        return statistics.median(found) if found and None not in found else None

    @property
    def came_s(self) -> float | None:
        """Afterwards: the median of the windows."""
        return statistics.median(self.came) if self.came else None

    @property
    def error(self) -> float | None:
        """Of the prediction, as a share of what came."""
        if self.predicted_s is None or not self.came_s:
            return None
        return abs(self.predicted_s - self.came_s) / self.came_s

    @property
    def right(self) -> bool:
        """Whether every window's verdict is the right one, in all that it has to name."""
        return not self.problems and bool(self.answers)


async def live(
    case: Case, folder: Path, *, model: Path, say: Say, windows: int = WINDOWS, faster: bool = True
) -> Outcome:
    """Run one case, or without `faster` only the part of it that is slow. Raises TimeoutError where
    the run stands still."""
    outcome, begin_s = Outcome(case), time.monotonic()
    pipeline = SleepingPipeline(
        folder,
        model=model,
        sections=case.sections,
        seconds=case.sleeps,
        num_generators=case.num_generators,
        num_scorers=case.num_scorers,
        max_staleness=case.max_staleness,
    )
    async with pipeline:
        await pipeline.start()
        last = await _until(pipeline, case.max_staleness + SETTLE_STEPS)
        if case.says == "balanced":
            last = await _balance(case, pipeline, last, say)
        outcome.answers = await _windows(
            case, pipeline, last, windows=windows, speed_up=case.speed_up or FREE, say=say
        )
        outcome.problems = [text for answer in outcome.answers for text in wrong(case, answer)]
        if faster and case.predicts:
            outcome.came = await _faster(case, pipeline, windows=windows, say=say)
    outcome.seconds = time.monotonic() - begin_s
    return outcome


async def _faster(case: Case, pipeline: SleepingPipeline, *, windows: int, say: Say) -> list[float]:
    """Make it faster; what a step takes then, in each window."""
    pipeline.sleep(case.then)
    if case.then_recipe:
        await pipeline.restart(case.then_recipe)
    settled = await _last_step(pipeline) + pipeline.recipe.trainer.max_staleness + SETTLE_STEPS
    last = await _until(pipeline, settled)
    answers = await _windows(case, pipeline, last, windows=windows, speed_up=FREE, say=say)
    return [answer["step_s"] for answer in answers]


def wrong(case: Case, answer: Mapping[str, Any]) -> list[str]:
    """What a verdict says otherwise than the case has it."""
    found = []
    if answer["verdict"] != case.says:
        found.append(f"the verdict is {answer['verdict']}, not {case.says}: {answer['sentence']}")
    for name in case.knob:
        if name not in answer["knob"]:
            found.append(f"the knob does not name {name}: {answer['knob']}")
    if case.culprit is not None and answer["culprit"] != case.culprit:
        found.append(f"the culprit is {answer['culprit']}, not {case.culprit}")
    if answer["replica"] != case.replica:
        found.append(f"the replica is {answer['replica']}, not {case.replica}")
    return found


async def _windows(
    case: Case,
    pipeline: SleepingPipeline,
    last: int,
    *,
    windows: int,
    speed_up: float,
    say: Say,
) -> list[dict[str, Any]]:
    """The verdicts on so many windows of the case's steps, all after step `last`."""
    answers = []
    for _ in range(windows):
        last = await _until(pipeline, last + case.window)
        answer = await pipeline.verdict(window=case.window, speed_up=speed_up)
        say(f"steps {answer['first_step']}-{answer['last_step']}: {answer['sentence']}")
        answers.append(answer)
    return answers


async def _balance(case: Case, pipeline: SleepingPipeline, last: int, say: Say) -> int:
    """Slow the trainer until it waits for as much of a step as BALANCE says; the last step."""
    low, high = BALANCE
    for _ in range(6):
        last = await _until(pipeline, last + case.window)
        answer = await pipeline.verdict(window=case.window)
        share = _waits(answer)
        say(f"the trainer waits {share:.1%} of {answer['step_s']:.2f} s")
        if low <= share <= high:
            break
        missing_s = (share - (low + high) / 2) * answer["step_s"]
        pipeline.sleep({"training": pipeline.seconds["training"] + missing_s})
        last = await _until(pipeline, last + GROUPS_PER_STEP)
    return last


def _waits(answer: Mapping[str, Any]) -> float:
    found = [each["value"] for each in answer["evidence"] if each["key"] == "perf/rollout_wait_s"]
    # A verdict of another kind has conditions without it.
    return float(found[0]) if found and found[0] is not None else 0.0


async def _until(pipeline: SleepingPipeline, step: int) -> int:
    """Wait until the length of a step is known; the last of which it is. Raises TimeoutError."""
    async with asyncio.timeout(STEPS_WITHIN_S):
        while (last := await _last_step(pipeline)) < step:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(POLL_S)
        return last


async def _last_step(pipeline: SleepingPipeline) -> int:
    """0 before the aggregator knows of any."""
    try:
        answer = await pipeline.verdict(window=1)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.NOT_FOUND:
            raise
        return 0
    except httpx.ConnectError:
        return 0  # it starts
    last: int | None = answer["last_step"]
    return last or 0
