"""What a pipeline's run came to, by three accounts that do not know of each other: the witness of
the weights, the trainer's own record on disk, and the aggregator's ledger.

    every prompt of every epoch      trained once in the line of weights that is left, or given up
    dispatched                       = trained + rolled back + dropped + given up, nothing in flight
    steps                            1, 2, 3, ... without a gap
    the three accounts               say the same

Pure but for `gather`. Times are nowhere in it.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.trainer.checkpoint import NAME, STATE
from services.trainer.dispatch import prompt_of
from services.trainer.done import DoneSet, Prompt
from services.trainer.journal import records_since
from tests.chaos import witness
from tests.chaos.pipeline import Pipeline
from tests.chaos.rewards import NO_SIGNAL
from tests.chaos.world import rows_of, scored_of

CAUGHT_UP_WITHIN_S = 20.0
"""The aggregator hears the last events of services that have ended before this."""

METRIC = "perf/fwd_bwd_s"
"""Recorded of every step."""


@dataclass(frozen=True)
class Evidence:
    """All that is judged."""

    num_rows: int
    num_prompts: int
    without_signal: frozenset[int]
    """Rows whose groups need not enter the gradient."""
    witnessed: Sequence[dict[str, Any]]
    report: Mapping[str, Any]
    """trainer.json."""
    book: Mapping[str, Any]
    """Of the newest checkpoint."""
    given_up: frozenset[str]
    """Groups given up, by checkpoint and journal."""
    ledger: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    """Of all rows, as the ledger lists them."""
    scored: Mapping[int, int]
    """Calls of the reward function, by row."""
    metric_steps: Sequence[int]
    """Steps of which the aggregator has METRIC."""

    @property
    def prompts(self) -> list[Prompt]:
        """All that had to come to an end."""
        return [divmod(number, self.num_rows) for number in range(self.num_prompts)]


@dataclass(frozen=True)
class Verdict:
    """The account of a run. It is well when `problems` is empty."""

    dispatched: int
    trained: int
    rolled_back: int
    dropped: Mapping[str, int]
    given_up: int
    steps: int
    attempts: int
    trained_twice: int
    """Prompts too many in the line that is left, by whichever account says most."""
    unaccounted: int
    """Groups and prompts of which no account says what became of them."""
    metric_gaps: int
    """Steps of which no metric is left: what a trainer that is killed had not sent yet."""
    problems: Sequence[str] = ()


async def gather(pipeline: Pipeline) -> Evidence:
    """Everything about a run that is over, its workers ended and its aggregator up."""
    recipe, plan = pipeline.recipe, pipeline.plan
    report: dict[str, Any] = json.loads((recipe.run_folder / "trainer.json").read_text())
    ledger = await _settled_ledger(pipeline, dispatched=report["groups"]["dispatched"])
    checkpoints = recipe.run_folder / "checkpoints"
    moment, state = _newest(checkpoints)
    ended = [line[:2] for line in state["said"]]
    ended += [[each.kind, each.group_id] for each in records_since(checkpoints / "journal", moment)]
    rows = rows_of(plan)
    groups: list[Mapping[str, Any]] = []
    for row in range(plan.num_rows):
        groups += (await pipeline.rest(f"rows/{row}"))["groups"]
    history = await pipeline.rest(f"metrics/{METRIC}", axis="step", max_points=10_000, limit=10_000)
    scored = scored_of(recipe)
    return Evidence(
        num_rows=plan.num_rows,
        num_prompts=plan.num_prompts,
        without_signal=frozenset(
            number for number, row in enumerate(rows) if row["trap"] == NO_SIGNAL
        ),
        witnessed=pipeline.witnessed(),
        report=report,
        book=state["book"],
        given_up=frozenset(group for kind, group in ended if kind == "given_up"),
        ledger=ledger,
        groups=groups,
        scored=Counter(map(int, scored.read_text().split())) if scored.exists() else {},
        metric_steps=[int(point["x"]) for point in history["points"]],
    )


async def _settled_ledger(pipeline: Pipeline, *, dispatched: int) -> dict[str, Any]:
    """The ledger once it has heard of all groups, or as it is after CAUGHT_UP_WITHIN_S."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + CAUGHT_UP_WITHIN_S
    while True:
        ledger: dict[str, Any] = await pipeline.rest("ledger")
        settled = ledger["in_flight"] == 0 and ledger["dispatched"] == dispatched
        if settled or loop.time() > deadline_s:
            return ledger
        await asyncio.sleep(0.3)


def _newest(checkpoints: Path) -> tuple[tuple[int, int], dict[str, Any]]:
    """The newest checkpoint's moment and state."""
    named = [NAME.fullmatch(path.name) for path in checkpoints.iterdir()]
    moment = max((int(name[1]), int(name[2])) for name in named if name)
    path = checkpoints / f"{moment[0]}-{moment[1]}" / STATE
    state: dict[str, Any] = json.loads(path.read_text())
    return moment, state


def judge(evidence: Evidence) -> Verdict:
    """Hold the accounts against the promise, and against each other."""
    last = max(line["attempt"] for line in evidence.witnessed)
    line = witness.line_of_weights(evidence.witnessed, last=last)
    by_witness = Counter(prompt_of(group) for step in line for group in step.groups)
    by_ledger = Counter(
        prompt_of(group["group_id"]) for group in evidence.groups if group["state"] == "trained"
    )
    given_up = {g["group_id"] for g in evidence.groups if g["state"] == "given_up"}
    gone = {prompt_of(group) for group in given_up}
    done = DoneSet(evidence.book["done"])
    prompts = evidence.prompts

    twice = [sum(count - 1 for count in by.values()) for by in (by_witness, by_ledger)]
    both = {prompt for prompt in gone if by_witness[prompt]}
    endless = {
        prompt
        for prompt in prompts
        if prompt not in done
        or not (by_witness[prompt] or prompt in gone)
        or not (by_ledger[prompt] or prompt in gone)
    }
    ledger, groups = evidence.ledger, evidence.report["groups"]
    ended = sum(ledger[name] for name in ("trained", "rolled_back", "dropped", "given_up"))
    astray = abs(ledger["dispatched"] - ended - ledger["in_flight"]) + ledger["in_flight"]
    verdict = Verdict(
        dispatched=groups["dispatched"],
        trained=groups["trained"],
        rolled_back=groups["rolled_back"],
        dropped=dict(groups["dropped"]),
        given_up=groups["given_up"],
        steps=evidence.report["steps"],
        attempts=evidence.report["attempts"],
        trained_twice=max(*twice, groups["trained_twice"]),
        unaccounted=len(endless) + astray,
        metric_gaps=len(set(range(1, evidence.report["steps"] + 1)) - set(evidence.metric_steps)),
    )
    problems = [
        *_mistakes_of_the_line(evidence, line),
        *_differences(evidence, line, given_up=given_up),
    ]
    if verdict.trained_twice:
        often = sorted(p for by in (by_witness, by_ledger) for p, count in by.items() if count > 1)
        problems.append(f"trained twice: {often}")
    if endless:
        problems.append(f"prompts with no end: {sorted(endless)}")
    if astray:
        problems.append(f"the ledger misses {astray} groups: {dict(ledger)}")
    if both:
        problems.append(f"prompts trained and given up: {sorted(both)}")
    if strange := (by_witness.keys() | by_ledger.keys() | gone) - set(prompts):
        problems.append(f"prompts that the run does not have: {sorted(strange)}")
    return replace(verdict, problems=problems)


def _mistakes_of_the_line(evidence: Evidence, line: Sequence[witness.Step]) -> Iterator[str]:
    """What is wrong with the steps that the witness saw."""
    numbers = [step.step for step in line]
    if numbers != list(range(1, evidence.report["steps"] + 1)):
        yield f"the line's steps are {numbers}, the report says {evidence.report['steps']}"
    for step in line:
        if strange := step.entered - set(step.groups):
            yield f"step {step.step}: samples of {sorted(strange)} entered, which are not its own"
    row_of = {group["group_id"]: group["row_index"] for group in evidence.groups}
    outside = [group for step in line for group in step.groups if group not in step.entered]
    if idle := [g for g in outside if row_of.get(g) not in evidence.without_signal]:
        yield f"trained, and none of their samples entered the gradient: {idle}"


def _differences(
    evidence: Evidence, line: Sequence[witness.Step], *, given_up: set[str]
) -> Iterator[str]:
    """Where the accounts disagree."""
    ledger, groups = evidence.ledger, evidence.report["groups"]
    if not ledger["balanced"]:
        yield "the ledger does not balance"
    for name in ("dispatched", "trained", "rolled_back", "given_up", "in_flight"):
        if ledger[name] != groups[name]:
            yield f"{name}: {ledger[name]} by the ledger, {groups[name]} by the trainer"
    dropped = {reason: number for reason, number in groups["dropped"].items() if number}
    if ledger["dropped_reasons"] != dropped:
        yield f"dropped: {ledger['dropped_reasons']} by the ledger, {dropped} by the trainer"
    seen = {(group, step.step) for step in line for group in step.groups}
    said = {(g["group_id"], g["step"]) for g in evidence.groups if g["state"] == "trained"}
    if seen != said:
        yield (
            f"trained by the witness alone: {sorted(seen - said)}, by the ledger alone: "
            f"{sorted(said - seen)}"
        )
    if not evidence.given_up <= given_up:
        yield f"given up by the trainer alone: {sorted(evidence.given_up - given_up)}"
    unscored = {
        group["row_index"]
        for group in evidence.groups
        if group["state"] == "trained" and not evidence.scored.get(group["row_index"])
    }
    if unscored:
        yield f"rows trained and never scored: {sorted(unscored)}"
