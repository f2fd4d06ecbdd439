"""The ledger: where each group is, and lineage from steps and rows to groups and back."""

import time
from collections.abc import Callable
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, HTTPException, Path

from services.aggregator import group_ids, lineage
from services.aggregator.api.backend import Backend
from services.aggregator.api.models import Answer, moment
from services.aggregator.api.parameters import MAX_POSITION, WHOLE
from services.aggregator.api.problems import documented
from services.aggregator.api.runs import known_run
from services.aggregator.lineage import Account, Detail, InFlight, Listed
from services.aggregator.said import STATES

FORM = "a group's name is epoch.ordinal.attempt.try, or eval.N.attempt.row"

Group = Annotated[str, Path(description="epoch.ordinal.attempt.try, such as 0.17.1.1.")]
Row = Annotated[int, Path(ge=0, le=MAX_POSITION, description="Of the dataset, from 0."), WHOLE]
Step = Annotated[int, Path(ge=0, le=MAX_POSITION, description="An optimizer step."), WHOLE]


class GroupInFlight(Answer):
    """A group that has not ended."""

    group_id: str
    row_index: int
    state: str
    age_s: float
    """Seconds since it was dispatched."""
    in_state_s: float
    """Seconds since it came to this state."""
    holder: str | None
    """The process that works on it; null while it waits in a stream."""

    @classmethod
    def of(cls, found: InFlight) -> "GroupInFlight":
        """From the ledger's."""
        return cls.model_validate(found, from_attributes=True)


class Ledger(Answer):
    """Where all groups of a run are: dispatched = trained + rolled_back + dropped + given_up +
    in_flight. Numbers are exact, lists are bounded."""

    run: str
    dispatched: int
    """Groups that were heard of, those of evaluations apart."""
    trained: int
    rolled_back: int
    """Trained after the checkpoint that a later start of the trainer restored."""
    dropped: int
    given_up: int
    in_flight: int
    balanced: bool
    """The groups, counted one by one, are as many as their states say."""
    states: dict[str, int]
    """By the highest state that was said of a group."""
    dropped_reasons: dict[str, int]
    given_up_reasons: dict[str, int]
    given_up_groups: list[str]
    """The latest 100."""
    oldest: list[GroupInFlight]
    """The 20 groups that have been in flight longest."""
    stuck_after_s: float
    """`ledger.stuck_after_s`."""
    num_stuck: int
    """Groups in flight for longer."""
    stuck: list[GroupInFlight]
    """The 100 oldest of them."""
    num_pruned: int
    """Groups of which only the outcome is kept (`ledger.keep_groups`)."""
    evaluation: dict[str, int]
    """States of evaluation groups; they are in none of the sums."""

    @classmethod
    def of(cls, run: str, found: Account, *, stuck_after_s: float) -> "Ledger":
        """From the store's account."""
        counts = found.counts
        return cls(
            run=run,
            dispatched=found.dispatched,
            trained=counts.states["trained"],
            rolled_back=counts.states["rolled_back"],
            dropped=counts.states["dropped"],
            given_up=counts.states["given_up"],
            in_flight=counts.in_flight,
            balanced=found.balanced,
            states=counts.states,
            dropped_reasons=counts.reasons.get("dropped", {}),
            given_up_reasons=counts.reasons.get("given_up", {}),
            given_up_groups=list(found.given_up),
            oldest=[GroupInFlight.of(each) for each in found.oldest],
            stuck_after_s=stuck_after_s,
            num_stuck=found.num_stuck,
            stuck=[GroupInFlight.of(each) for each in found.stuck],
            num_pruned=found.archived,
            evaluation=counts.evaluation,
        )


class GroupOutcome(Answer):
    """A group, and what became of it."""

    group_id: str
    epoch: int
    attempt: int
    """The start of the trainer that dispatched it."""
    try_number: int
    """1 for the first dispatch of its prompt in this attempt."""
    row_index: int
    state: str
    reason: str
    """Why it was dropped or given up; of one trained, what is special."""
    step: int | None
    """The optimizer step that trained it, also where that was rolled back."""
    pruned: bool
    """Its events are not kept any more."""

    @classmethod
    def of(cls, found: Listed) -> "GroupOutcome":
        """From the ledger's."""
        return cls(
            group_id=str(found.group),
            epoch=found.group.epoch,
            attempt=found.group.attempt,
            try_number=found.group.try_number,
            row_index=found.row_index,
            state=found.state,
            reason=found.reason,
            step=found.step,
            pruned=not found.in_detail,
        )


class StateEvent(Answer):
    """A state that was said of a group. Times are the aggregator's."""

    state: str
    at: datetime
    """When it was first said."""
    worker: str
    """Who said so then."""
    again_at: datetime | None
    """When it was said last, if more than once: another worker took over, or the trainer
    restarted."""
    again_worker: str | None
    reason: str
    step: int | None


class Stages(Answer):
    """Seconds of each stage of a group's way; null where one of its ends was not said. Ends of
    different hosts are known to the delay of a message."""

    wait_for_generator_s: float | None
    generation_s: float | None
    wait_for_scorer_s: float | None
    scoring_s: float | None
    wait_for_trainer_s: float | None


class GroupDetail(GroupOutcome):
    """All that is known of a group."""

    events: list[StateEvent]
    """In rising order of states."""
    stages: Stages
    total_s: float | None
    """Seconds from dispatch to its end; null while it is in flight."""

    @classmethod
    def of_detail(cls, found: Detail) -> "GroupDetail":
        """From the ledger's."""
        events = []
        for number, said in sorted(found.history.items()):
            again = (said.last_s, said.last_worker) != (said.first_s, said.first_worker)
            events.append(
                StateEvent(
                    state=STATES[number],
                    at=moment(said.first_s),
                    worker=said.first_worker,
                    again_at=moment(said.last_s) if again else None,
                    again_worker=said.last_worker if again else None,
                    reason=said.reason,
                    step=said.step,
                )
            )
        return cls(
            **GroupOutcome.of(found.listed).model_dump(),
            events=events,
            stages=Stages(**found.stages),
            total_s=found.total_s,
        )


class RowGroups(Answer):
    """The groups of a row of the dataset."""

    run: str
    row_index: int
    num_groups: int
    groups: list[GroupOutcome]
    """By epoch, attempt and try; at most the last 10,000."""


class StepGroups(Answer):
    """The groups that an optimizer step trained; of a step that was made again after a restart, all
    of both times."""

    run: str
    step: int
    num_groups: int
    groups: list[GroupOutcome]
    """At most 10,000."""


def router(backend: Backend, *, clock: Callable[[], float] = time.time) -> APIRouter:
    """The endpoints of the ledger; `clock` tells seconds since 1970."""
    routes = APIRouter(
        prefix="/api/v1/runs", tags=["ledger"], responses=documented(401, 404, 422, 503)
    )

    @routes.get("/{run}/ledger", summary="Where all groups are, and whether that adds up")
    def show_ledger(run: str) -> Ledger:
        after_s = backend.stuck_after_s
        with backend.read() as connection:
            found = lineage.account(
                connection, known_run(connection, run), now_s=clock(), stuck_after_s=after_s
            )
        return Ledger.of(run, found, stuck_after_s=after_s)

    @routes.get("/{run}/groups/{group}", summary="The way of a group", responses=documented(410))
    def show_group(run: str, group: Group) -> GroupDetail:
        with backend.read() as connection:
            known = known_run(connection, run)
            named = group_ids.parse(group)
            if named is None:
                raise HTTPException(404, f"no group {group[:80]!r}; {FORM}")
            found = lineage.detail(connection, known, named)
        if found is None:
            raise HTTPException(404, f"group {group} was never heard of in run {run}")
        if isinstance(found, Listed):
            raise HTTPException(410, _pruned(found))
        return GroupDetail.of_detail(found)

    @routes.get("/{run}/rows/{row}", summary="What became of a row of the dataset")
    def show_row(run: str, row: Row) -> RowGroups:
        with backend.read() as connection:
            groups, number = lineage.of_row(connection, known_run(connection, run), row)
        if not groups:
            raise HTTPException(404, f"no group of row {row} was heard of in run {run}")
        listed = [GroupOutcome.of(each) for each in groups]
        return RowGroups(run=run, row_index=row, num_groups=number, groups=listed)

    @routes.get("/{run}/steps/{step}", summary="The groups that a step trained")
    def show_step(run: str, step: Step) -> StepGroups:
        with backend.read() as connection:
            known = known_run(connection, run)
            groups, number = lineage.of_step(connection, known, step)
            latest = None if groups else lineage.latest_step(connection, known)
        if not groups:
            until = "none has yet" if latest is None else f"the latest that has is step {latest}"
            raise HTTPException(404, f"step {step} trained no group of run {run}; {until}")
        listed = [GroupOutcome.of(each) for each in groups]
        return StepGroups(run=run, step=step, num_groups=number, groups=listed)

    return routes


def _pruned(found: Listed) -> str:
    said = [f"group {found.group} (row {found.row_index}) was {found.state.replace('_', ' ')}"]
    if found.step is not None:
        said.append(f"step {found.step}")
    if found.reason:
        said.append(found.reason)
    return f"{', '.join(said)}; its events were pruned (the recipe's ledger.keep_groups)"
