"""The life of one pipeline: from its start through its faults to the verdict."""

import asyncio
import itertools
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.common.lifecycle import cancel
from tests.chaos.faults import FAULTS
from tests.chaos.judge import Verdict, gather, judge
from tests.chaos.pipeline import POLL_S, Pipeline
from tests.chaos.world import Plan

RECOVERY_S = 120.0
"""A run that has not made a step for so long after a fault was lifted is stuck."""

END_S = 240.0
"""For what is left of the run after the last fault."""

PACES_S = (0.4, 0.9, 2.5, 5.0)
"""A completion's mean time, from where prompts are plenty for the faults that are left to where
they are few."""

PACE_EVERY_S = 0.5

LAST_PACE_S = 0.1
"""After the last fault."""

USERS_MISTAKE = 2
"""The status that no fault may lead to."""

Say = Callable[[str], None]


class Stuck(AssertionError):
    """The run does not go on."""


@dataclass(frozen=True)
class Injected:
    """One fault, and how long the run stood still."""

    kind: str
    detail: str
    lasted_s: float
    stall_s: float
    """Longest time without an optimizer step from the moment of the fault to the first step after
    it was lifted."""
    beside_deaths: bool = False
    """Workers died of a prompt meanwhile: the stall is not the fault's alone."""


@dataclass
class Life:
    """What became of one pipeline."""

    plan: Plan
    folder: Path
    injected: list[Injected] = field(default_factory=list)
    present: str = "its start"
    """What it is at."""
    verdict: Verdict | None = None
    problems: list[str] = field(default_factory=list)
    crashes: Counter[str] = field(default_factory=Counter)
    """Processes that ended by themselves, with an error: how often, by service and why."""
    seconds: float = 0.0

    @property
    def well(self) -> bool:
        """Whether everything is as promised."""
        return self.verdict is not None and not self.problems


def plan_of(seed: str, number: int) -> Plan:
    """A pipeline's shape, drawn by its seed."""
    draw = random.Random(f"plan {seed}")
    plan = Plan(
        seed=draw.randrange(1 << 30),
        run=f"chaos-{number}",
        num_rows=draw.randint(56, 80),
        epochs=draw.choice([2.0, 2.0, 1.5, 1.75]),
        groups_per_step=draw.choice([2, 2, 3]),
        max_staleness=draw.choice([2, 3, 4]),
        checkpoint_every_steps=draw.choice([2, 3, 4]),
        claim_after_s=draw.choice([1.5, 2.0]),
        max_stale_tries=draw.choice([4, 8, 20]),
        num_failing=draw.choice([0, 1, 2]),
        num_without_signal=draw.choice([0, 2]),
        seconds_a_completion=PACES_S[1],
    )
    # A row that kills its generators costs as many starts as it has deliveries and tries.
    kind = draw.choice(["", "", "generator", "scorer"])
    if kind == "generator":
        return replace(plan, num_generator_killers=1, max_deliveries=2, max_tries=1)
    return replace(plan, num_scorer_killers=1) if kind == "scorer" else plan


async def live(
    plan: Plan, kinds: Sequence[str], folder: Path, *, model: Path, seed: str, say: Say
) -> Life:
    """Start a pipeline, do all `kinds` of faults to it one after another, and judge it at its
    end."""
    life = Life(plan, folder)
    begin_s = time.monotonic()
    try:
        async with Pipeline(plan, folder, model=model) as pipeline:
            try:
                await _live(life, pipeline, kinds, random.Random(f"faults {seed}"), say)
            finally:
                _note_crashes(life, pipeline)
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        (folder / "failure.txt").write_text(text)
        life.problems.append(f"{type(error).__name__} at {life.present}: {error}")
    life.seconds = time.monotonic() - begin_s
    return life


async def _live(
    life: Life, pipeline: Pipeline, kinds: Sequence[str], draw: random.Random, say: Say
) -> None:
    await pipeline.start()
    await _advanced(pipeline, since_s=time.time())
    pacing = asyncio.create_task(_keep_pace(life, pipeline, len(kinds)))
    try:
        await _inject_all(life, pipeline, kinds, draw, say)
    finally:
        await cancel(pacing)
    life.present = "its end"
    pipeline.set_pace(LAST_PACE_S)
    status = await pipeline.over(patience_s=END_S)
    if status != 0:
        life.problems.append(f"the last trainer ended with {status}")
        return
    for name, ended in (await pipeline.wind_down()).items():
        if ended != 0:
            say(f"{name} ended with {ended} at SIGTERM")
    evidence = await gather(pipeline)
    life.verdict = judge(evidence)
    life.problems += life.verdict.problems
    if (ended := await pipeline.aggregator.stop()) != 0:
        life.problems.append(f"the aggregator ended with {ended} at SIGTERM")


async def _inject_all(
    life: Life, pipeline: Pipeline, kinds: Sequence[str], draw: random.Random, say: Say
) -> None:
    for number, kind in enumerate(kinds):
        await asyncio.sleep(draw.uniform(0.2, 1.2))
        if pipeline.trainer.over.is_set():
            life.problems.append(f"the run was over before {len(kinds) - number} of its faults")
            break
        life.present = kind
        injected = await _inject(pipeline, kind, draw)
        life.injected.append(injected)
        say(f"{kind}: {injected.detail}; stood still {injected.stall_s:.1f} s")


async def _inject(pipeline: Pipeline, kind: str, draw: random.Random) -> Injected:
    begin_s, deaths = time.time(), pipeline.deaths
    async with asyncio.timeout(RECOVERY_S):
        detail = await FAULTS[kind](pipeline, draw)
    lifted_s = time.time()
    times = await _advanced(pipeline, since_s=lifted_s)
    marks = [begin_s, *(at_s for at_s in times if begin_s < at_s)]
    gaps = [after - before for before, after in itertools.pairwise(marks)]
    return Injected(
        kind,
        detail,
        lasted_s=lifted_s - begin_s,
        stall_s=max(gaps, default=0.0),
        beside_deaths=pipeline.deaths > deaths,
    )


async def _advanced(pipeline: Pipeline, *, since_s: float) -> list[float]:
    """Wait for a step after `since_s`; the times of all steps. Raises Stuck."""
    try:
        async with asyncio.timeout(RECOVERY_S):
            while True:
                times = [line["at_s"] for line in pipeline.witnessed() if "step" in line]
                if (times and times[-1] > since_s) or pipeline.trainer.over.is_set():
                    return times
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise Stuck(f"no step for {RECOVERY_S:g} s") from None


async def _keep_pace(life: Life, pipeline: Pipeline, num_faults: int) -> None:
    """Slower when prompts are few for the share of faults that is left, quicker when they are many:
    the run must be under load when the last one comes."""
    plan = pipeline.plan
    while True:
        made = next((line["step"] for line in pipeline.witnessed()[::-1] if "step" in line), 0)
        prompts_left = 1 - made * plan.groups_per_step / plan.num_prompts
        faults_left = 1 - len(life.injected) / num_faults
        quick, planned, slow, slowest = PACES_S
        if prompts_left < faults_left:
            pipeline.set_pace(slow if prompts_left > 0.7 * faults_left else slowest)
        else:
            pipeline.set_pace(quick if prompts_left > 1.4 * faults_left else planned)
        await asyncio.sleep(PACE_EVERY_S)


def _note_crashes(life: Life, pipeline: Pipeline) -> None:
    for keeper in pipeline.keepers:
        for status, why in keeper.crashes:
            life.crashes[f"{keeper.name.split('-')[0]} ended with {status}: {why[:200]}"] += 1
            if status == USERS_MISTAKE:
                life.problems.append(f"{keeper.name} ended with status {status}: {why[:300]}")
