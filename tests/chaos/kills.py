"""`python -m tests.chaos.kills`: the trainer killed at random moments of a short run of two epochs,
with the streams kept and with the streams lost. With `--ranks 2` it is one rank that is killed,
now this one and now that, and the trainer has to end with it.

Prints a table and writes benchmarks/results/kills.json. The exit status is 1 when a prompt was not
trained exactly once an epoch, the curve of steps has a gap, or the finished run was not left alone
by another start.
"""

import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import typer

from tests.chaos.judge import METRIC, gather, judge
from tests.chaos.pipeline import POLL_S, Pipeline
from tests.chaos.world import Plan, make_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

Streams = Literal["kept", "lost"]

PLAN = Plan(
    num_rows=40,
    epochs=2.0,
    groups_per_step=2,
    checkpoint_every_steps=3,
    num_failing=0,
    max_stale_tries=1000,
    seconds_a_completion=0.3,
)
"""40 steps; no prompt may be given up, whatever happens to its groups."""

LIFE_STEPS = 5
"""Most steps of an attempt that is killed. More than lie between two checkpoints; but with ten
lives at three steps of progress each, the run is not over before the last kill."""

PATIENCE_S = 180.0
"""For one life, or for what comes after the last."""

Say = Callable[[str], None]


@dataclass
class Outcome:
    """One run and its kills."""

    streams: Streams
    ranks: int = 1
    kills: int = 0
    killed_ranks: Sequence[int] = ()
    steps_at_kill: Sequence[int] = ()
    """Of the killed attempts each, how many steps it had made."""
    attempts: int = 0
    steps: int = 0
    dispatched: int = 0
    trained: int = 0
    rolled_back: int = 0
    dropped: int = 0
    given_up: int = 0
    trained_twice: int = 0
    not_once: int = 0
    """Prompts of an epoch that the line of weights that is left was trained on never, or again."""
    metric_gaps: int = 0
    """Steps that the curve lacks."""
    again_status: int | None = None
    """With which another start of the finished run ended."""
    seconds: float = 0.0
    problems: Sequence[str] = ()


async def killed(
    plan: Plan,
    folder: Path,
    *,
    model: Path,
    deaths: Sequence[Streams],
    seed: str,
    say: Say,
) -> Outcome:
    """A run whose trainer is killed so many times: what it came to. `deaths` says of each kill what
    becomes of the streams."""
    draw, begin_s = random.Random(seed), time.monotonic()
    outcome = Outcome(deaths[-1] if deaths else "kept", ranks=plan.ranks)
    async with Pipeline(plan, folder, model=model) as pipeline:
        await pipeline.start()
        lives: list[int] = []
        victims: list[int] = []
        for streams in deaths:
            # One rank after the other, the last first.
            victims.append(plan.ranks - 1 - len(victims) % plan.ranks)
            lives.append(await _kill(pipeline, streams, draw, rank=victims[-1]))
            say(f"rank {victims[-1]} killed after {lives[-1]} steps of its own, streams {streams}")
        outcome.kills, outcome.steps_at_kill = len(lives), lives
        outcome.killed_ranks = victims
        status = await pipeline.over(patience_s=PATIENCE_S)
        problems = [] if status == 0 else [f"the last trainer ended with {status}"]
        before = _left(pipeline)
        # A finished run started again.
        again = pipeline.trainer.start()
        async with asyncio.timeout(PATIENCE_S):
            await again.over.wait()
        outcome.again_status = again.ends[-1]
        if again.ends[-1] != 0 or _left(pipeline) != before:
            problems.append(f"a finished run started again ended with {again.ends[-1]}, or wrote")
        expected = Counter(1 if victim else -signal.SIGKILL for victim in victims) + Counter({0: 2})
        if (own := Counter(pipeline.trainer.ends)) != expected:
            problems.append(f"trainers ended with {dict(own)}")
        await pipeline.wind_down()
        evidence = await gather(pipeline)
        verdict = judge(evidence)
        trained = Counter(_prompts_of(evidence.groups))
        wanted = [f"{epoch}.{row}" for epoch, row in evidence.prompts]
        outcome.not_once = sum(trained[prompt] != 1 for prompt in wanted)
        outcome.problems = [*problems, *verdict.problems]
        if verdict.metric_gaps:
            lacking = set(range(1, verdict.steps + 1)) - set(evidence.metric_steps)
            outcome.problems = [*outcome.problems, f"{METRIC} lacks the steps {sorted(lacking)}"]
        if outcome.not_once:
            outcome.problems = [*outcome.problems, f"{outcome.not_once} prompts not trained once"]
    for name in ("steps", "attempts", "dispatched", "trained", "rolled_back", "given_up"):
        setattr(outcome, name, getattr(verdict, name))
    outcome.trained_twice, outcome.metric_gaps = verdict.trained_twice, verdict.metric_gaps
    outcome.dropped = sum(verdict.dropped.values())
    outcome.seconds = time.monotonic() - begin_s
    return outcome


async def _kill(pipeline: Pipeline, streams: Streams, draw: random.Random, *, rank: int) -> int:
    """Kill a rank of the present trainer at a moment of its life; how many steps it had made."""
    trainer = pipeline.trainer
    before = pipeline.num_steps
    async with asyncio.timeout(PATIENCE_S):
        await _until(lambda: trainer.running)
        if draw.random() < 0.2:
            # On its way to the first step: imports, the model, the checkpoint, the first version.
            await asyncio.sleep(draw.uniform(0.0, 8.0))
        else:
            steps = draw.randint(1, LIFE_STEPS)
            await _until(lambda: pipeline.num_steps - before >= steps or trainer.over.is_set())
            await asyncio.sleep(draw.uniform(0.0, 0.3))
        assert not trainer.over.is_set(), "the run was over before the last kill"
        trainer.held.clear()
        if rank:
            await _until(lambda: len(_other_ranks(trainer.pid)) >= rank)
            _other_ranks(trainer.pid)[rank - 1].kill()
        else:
            trainer.signal(signal.SIGKILL)
        await _until(lambda: not trainer.running)
    if streams == "lost":
        if draw.random() < 0.5:
            await pipeline.client.flushall()
        else:
            await pipeline.queue.kill()
            pipeline.queue.empty()
            await pipeline.queue.start()
    made = pipeline.num_steps - before
    trainer.held.set()
    return made


def _other_ranks(pid: int | None) -> list[psutil.Process]:
    """The processes of a trainer that are its ranks from 1 on, in their order."""
    children = psutil.Process(pid).children()
    ranks = [each for each in children if "services.trainer.rank" in each.cmdline()]
    return sorted(ranks, key=lambda each: (each.create_time(), each.pid))


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - they are other processes
        await asyncio.sleep(POLL_S / 5)


def _left(pipeline: Pipeline) -> dict[str, Any]:
    """What a start of a finished run must leave as it is."""
    folder = pipeline.recipe.run_folder
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    report = json.loads((folder / "trainer.json").read_text())
    return {"witness": pipeline.witnessed(), "report": report, "checkpoints": checkpoints}


def _prompts_of(groups: Sequence[Any]) -> list[str]:
    """Epoch and ordinal of each group that the ledger has as trained."""
    return [each["group_id"].rsplit(".", 2)[0] for each in groups if each["state"] == "trained"]


def text(outcomes: Sequence[Outcome]) -> str:
    """The table."""
    columns = (
        *("streams", "ranks", "kills", "attempts", "steps", "dispatched", "trained", "rolled_back"),
        *("dropped", "given_up", "trained_twice", "not_once", "metric_gaps", "again_status"),
    )
    lines = ["", " ".join(f"{name:>13}" for name in columns)]
    for each in outcomes:
        lines.append(" ".join(f"{getattr(each, name)!s:>13}" for name in columns))
        lines += [f"PROBLEM {problem}" for problem in each.problems]
    return "\n".join(lines)


async def run(
    *, kills: int, seed: int, folder: Path, ranks: int, which: Sequence[Streams]
) -> list[Outcome]:
    """A run for each of `which`, one after the other."""
    model = make_model(folder / "model")
    outcomes = []
    for streams in which:

        def say(line: str, streams: Streams = streams) -> None:
            print(f"streams {streams}: {line}", flush=True)

        outcomes.append(
            await killed(
                replace(PLAN, ranks=ranks),
                folder / streams,
                model=model,
                deaths=[streams] * kills,
                seed=f"{seed} {streams}",
                say=say,
            )
        )
    return outcomes


def main(
    kills: Annotated[int, typer.Option(help="Of each run.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 1,
    ranks: Annotated[int, typer.Option(help="Of the trainer.")] = 1,
    streams: Annotated[str, typer.Option(help="kept, lost, or both.")] = "both",
    folder: Annotated[Path | None, typer.Option(help="For the runs' files.")] = None,
    results: Annotated[Path | None, typer.Option(help="The figures, as JSON.")] = None,
) -> None:
    """Kill, judge, and tell."""
    which: dict[str, tuple[Streams, ...]] = {
        "both": ("kept", "lost"),
        "kept": ("kept",),
        "lost": ("lost",),
    }
    results = results or RESULTS / ("kills.json" if ranks == 1 else "kills_of_ranks.json")
    place = folder or Path(tempfile.mkdtemp(prefix="headrace-kills-"))
    outcomes = asyncio.run(
        run(kills=kills, seed=seed, folder=place, ranks=ranks, which=which[streams])
    )
    print(text(outcomes))
    well = not any(outcome.problems for outcome in outcomes)
    figures = {
        "kills": sum(outcome.kills for outcome in outcomes),
        "trained_twice": sum(outcome.trained_twice for outcome in outcomes),
        "not_once": sum(outcome.not_once for outcome in outcomes),
        "metric_gaps": sum(outcome.metric_gaps for outcome in outcomes),
        "well": well,
        "seed": seed,
        "runs": [asdict(outcome) for outcome in outcomes],
    }
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(figures, indent=2) + "\n")
    if well and folder is None:
        shutil.rmtree(place)
    elif not well:
        print(f"the files stay: {place}")
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    typer.run(main)
