"""`python -m tests.chaos.rolling`: three scorers and three generators replaced one after another,
again and again, while a run goes on.

A round is a rolling restart of both: SIGTERM to one replica, its end awaited, another started in
its place and awaited until it is ready; then the next. Prints a table and writes
benchmarks/results/rolling.json. The exit status is 1 when a group was lost, delivered again or
trained twice, a replica did not end with status 0, or consumers of replicas that are gone are
still listed.
"""

import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from services.common.background import guarded
from services.common.queue import GROUP
from tests.chaos.judge import gather, judge
from tests.chaos.keeper import Keeper
from tests.chaos.pipeline import POLL_S, Pipeline
from tests.chaos.world import Plan, make_model
from tests.probes import is_healthy

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "rolling.json"

RETURNED = "~returned"
"""The consumer that stands for nobody: what was given back waits there."""

PROMPTS_A_ROUND = 80

QUICK_S, USUAL_S, SLOW_S = 0.2, 1.0, 25.0
"""A completion's mean time. The slow ones are not over within the ten seconds that a generator
takes to end, and are given back."""

AHEAD = 0.1
"""Share of the prompts that may be trained before the restarts have come as far: with more of them
completions are slow, so that the run goes on until the last restart, on any machine."""

PACE_EVERY_S = 0.5

PATIENCE_S = 180.0

Say = Callable[[str], None]


@dataclass
class Outcome:
    """One run and its rolling restarts."""

    rounds: int = 0
    restarts: int = 0
    given_back: int = 0
    """Groups that replicas which ended had in hand and could not finish."""
    not_zero: int = 0
    """Processes of replicas that ended otherwise than with status 0."""
    consumers: dict[str, list[str]] = field(default_factory=dict)
    """By stream, who was listed when the last round was over."""
    strangers: int = 0
    """Of those, consumers that are neither of a live replica nor RETURNED."""
    steps: int = 0
    dispatched: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    given_up: int = 0
    lost: int = 0
    """Groups of which the trainer learnt by comparing that they were gone."""
    delivered_again: int = 0
    trained_twice: int = 0
    unaccounted: int = 0
    longest_stop_s: float = 0.0
    seconds: float = 0.0
    problems: Sequence[str] = ()


def plan_of(rounds: int, *, scorers: int = 3, generators: int = 3) -> Plan:
    """A run that is under load for so many rounds."""
    num_rows = 40
    return Plan(
        num_rows=num_rows,
        epochs=PROMPTS_A_ROUND * rounds / num_rows,
        num_failing=0,
        num_without_signal=0,
        num_scorers=scorers,
        num_generators=generators,
        max_staleness=3,
        checkpoint_every_steps=10,
        # Nothing is taken over but what was given back.
        claim_after_s=60.0,
        max_work_s=600.0,
        max_stale_tries=1000,
        seconds_a_completion=USUAL_S,
    )


async def rolled(plan: Plan, folder: Path, *, model: Path, rounds: int, say: Say) -> Outcome:
    """A run with so many rounds: what it came to."""
    outcome, begin_s = Outcome(), time.monotonic()
    problems: list[str] = []
    async with Pipeline(plan, folder, model=model) as pipeline:
        for generator in pipeline.generators:
            generator.argv += ("--set", "generation.timeout_s=300")
        await pipeline.start()
        for worker in (*pipeline.scorers, *pipeline.generators):
            await _ready(pipeline, worker)
        await guarded(
            _rounds(pipeline, outcome, rounds, say), _keep_pace(pipeline, outcome, rounds)
        )
        if pipeline.trainer.over.is_set():
            problems.append("the run was over before the last round")
        outcome.consumers, outcome.strangers, complaints = await _listed(pipeline)
        problems += complaints
        pipeline.set_pace(QUICK_S)
        if (status := await pipeline.over(patience_s=PATIENCE_S)) != 0:
            problems.append(f"the trainer ended with {status}")
        await pipeline.wind_down()
        workers = (*pipeline.scorers, *pipeline.generators)
        outcome.not_zero = sum(status != 0 for worker in workers for status in worker.ends)
        outcome.given_back = sum(_given_back(worker.log) for worker in workers)
        outcome.delivered_again = await _counted(pipeline, "queue/redelivered_total")
        verdict = judge(await gather(pipeline))
    for name in ("steps", "dispatched", "trained", "given_up", "trained_twice", "unaccounted"):
        setattr(outcome, name, getattr(verdict, name))
    outcome.dropped = {reason: number for reason, number in verdict.dropped.items() if number}
    outcome.lost = outcome.dropped.get("lost", 0)
    outcome.seconds = time.monotonic() - begin_s
    outcome.problems = [*problems, *verdict.problems, *_complaints(outcome)]
    return outcome


def _complaints(outcome: Outcome) -> list[str]:
    wanted = ("not_zero", "lost", "delivered_again", "trained_twice", "unaccounted", "given_up")
    return [f"{name}: {getattr(outcome, name)}" for name in wanted if getattr(outcome, name)]


async def _rounds(pipeline: Pipeline, outcome: Outcome, rounds: int, say: Say) -> None:
    for number in range(rounds):
        await asyncio.gather(
            _roll(pipeline, pipeline.scorers, outcome),
            _roll(pipeline, pipeline.generators, outcome),
        )
        outcome.rounds += 1
        say(f"round {number + 1}: {pipeline.num_steps} steps so far")


async def _roll(pipeline: Pipeline, keepers: Sequence[Keeper], outcome: Outcome) -> None:
    """Replace all of one service, one after another."""
    for keeper in keepers:
        begin_s = time.monotonic()
        await keeper.stop(patience_s=PATIENCE_S)
        outcome.longest_stop_s = max(outcome.longest_stop_s, time.monotonic() - begin_s)
        (pipeline.folder / f"{keeper.name}.json").unlink()
        keeper.start()
        await _ready(pipeline, keeper)
        outcome.restarts += 1


async def _ready(pipeline: Pipeline, keeper: Keeper) -> None:
    announced = pipeline.folder / f"{keeper.name}.json"
    async with asyncio.timeout(PATIENCE_S):
        while not pipeline.trainer.over.is_set():
            if announced.exists() and await is_healthy(announced):
                return
            await asyncio.sleep(POLL_S)


async def _keep_pace(pipeline: Pipeline, outcome: Outcome, rounds: int) -> None:
    """Prompts no further than the restarts, and always some under way."""
    plan = pipeline.plan
    restarts = rounds * (plan.num_scorers + plan.num_generators)
    while True:
        made = next((line["step"] for line in pipeline.witnessed()[::-1] if "step" in line), 0)
        trained = made * plan.groups_per_step / plan.num_prompts
        due = AHEAD + (1 - 2 * AHEAD) * outcome.restarts / restarts
        pipeline.set_pace(SLOW_S if trained > due else USUAL_S)
        await asyncio.sleep(PACE_EVERY_S)


async def _listed(pipeline: Pipeline) -> tuple[dict[str, list[str]], int, list[str]]:
    """The consumers, how many of them are nobody's, and what is wrong with the lists; a replica is
    listed from its first read on, a moment after it has become ready."""
    for _ in range(50):
        consumers = await _consumers(pipeline)
        strangers, complaints = _strangers(pipeline, consumers)
        if not complaints:
            break
        await asyncio.sleep(POLL_S)
    return consumers, strangers, complaints


async def _consumers(pipeline: Pipeline) -> dict[str, list[str]]:
    """By stream that workers read, the consumers that XINFO CONSUMERS lists."""
    found = {}
    for name in ("requests", "eval_requests", "groups", "eval_groups"):
        listed = await pipeline.client.xinfo_consumers(getattr(pipeline.keys, name), GROUP)
        found[name] = sorted(each["name"].decode() for each in listed)
    return found


def _strangers(pipeline: Pipeline, consumers: dict[str, list[str]]) -> tuple[int, list[str]]:
    """How many consumers are nobody's, and what is wrong with the lists. A consumer's name is its
    replica's, and a word of the process's own."""
    strangers, wrong = 0, []
    for stream, listed in consumers.items():
        workers = pipeline.scorers if stream.endswith("groups") else pipeline.generators
        replicas = Counter(name.rpartition("-")[0] for name in listed if name != RETURNED)
        extra = replicas - Counter(worker.name for worker in workers)
        strangers += extra.total()
        if extra:
            wrong.append(f"{stream}: consumers of replicas that are gone: {dict(extra)}")
        if missing := {worker.name for worker in workers} - replicas.keys():
            wrong.append(f"{stream}: live replicas are not listed: {sorted(missing)}")
    return strangers, wrong


def _given_back(log: Path) -> int:
    """Groups that the processes of a replica gave back when they ended."""
    total = 0
    for line in log.read_text().splitlines():
        if line.startswith("{"):
            said = json.loads(line)
            if said.get("event") in ("given back", "drained"):
                total += said.get("groups", 0) + said.get("groups_given_back", 0)
    return total


async def _counted(pipeline: Pipeline, key: str) -> int:
    """The sum of a count over the whole run; 0 where it was never counted."""
    known = {each["key"] for each in (await pipeline.rest("metrics"))["metrics"]}
    if key not in known:
        return 0
    history = await pipeline.rest(f"metrics/{key}", axis="step", max_points=10_000, limit=10_000)
    return int(sum(point["value"] or 0 for point in history["points"]))


def text(outcome: Outcome) -> str:
    """The table."""
    lines = [""]
    for name, value in asdict(outcome).items():
        if name not in ("problems", "consumers"):
            lines.append(
                f"{name:<18}{value:.1f}" if isinstance(value, float) else f"{name:<18}{value}"
            )
    lines += [f"{stream:<18}{' '.join(listed)}" for stream, listed in outcome.consumers.items()]
    return "\n".join([*lines, *(f"PROBLEM {problem}" for problem in outcome.problems)])


def main(
    rounds: Annotated[int, typer.Option(help="Rolling restarts of all workers.")] = 20,
    folder: Annotated[Path | None, typer.Option(help="For the run's files.")] = None,
    results: Annotated[Path, typer.Option(help="The figures, as JSON.")] = RESULTS,
) -> None:
    """Roll, judge, and tell."""
    place = folder or Path(tempfile.mkdtemp(prefix="headrace-rolling-"))
    model = make_model(place / "model")

    def say(line: str) -> None:
        print(line, flush=True)

    outcome = asyncio.run(
        rolled(plan_of(rounds), place / "run", model=model, rounds=rounds, say=say)
    )
    print(text(outcome))
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    if outcome.problems:
        print(f"the files stay: {place}")
        sys.exit(1)
    if folder is None:
        shutil.rmtree(place)


if __name__ == "__main__":
    typer.run(main)
