"""The verdict: which stage holds a run back, what to turn, and what is wrong beside it."""

import time
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query

from services.aggregator import wording
from services.aggregator.api.backend import Backend
from services.aggregator.api.models import Answer
from services.aggregator.api.parameters import WHOLE
from services.aggregator.api.problems import documented
from services.aggregator.api.runs import known_run
from services.aggregator.evidence import read_window
from services.aggregator.faults import Fault as Found
from services.aggregator.faults import FaultName, find_faults
from services.aggregator.rules import Compare, Name
from services.aggregator.symptoms import read_symptoms
from services.aggregator.verdict import DEFAULT_STEPS, Confidence, judge
from services.aggregator.verdict import Verdict as Judged
from services.aggregator.verdict_history import judge_history

MAX_STEPS = 1000
"""Most steps of a window."""

MAX_POINTS = 2000
"""Most windows of a history."""

DEFAULT_POINTS = 200

MAX_SPEED_UP = 1e6
"""Beyond this a stage is as good as free."""


class Evidence(Answer):
    """A condition of the verdict or of a fault, with what was measured."""

    key: str
    """The metric."""
    measure: str
    """What `value` is of it."""
    value: float | None
    """Null where it is absent; then the condition does not hold."""
    compare: Compare
    threshold: float | None
    """Null where it is itself measured, a step's groups, and absent."""
    holds: bool


class Stages(Answer):
    """Seconds that each stage needs for a step's groups, were it never to wait; null where it
    cannot be told."""

    training_s: float | None
    generation_s: float | None
    scoring_s: float | None


class Fault(Answer):
    """Something that is wrong, whatever the verdict."""

    name: FaultName
    sentence: str
    """The fault in words."""
    knob: str
    """What to look at, or to turn, with keys of the recipe."""
    evidence: list[Evidence]
    """What was found, each beyond its threshold."""

    @classmethod
    def of(cls, found: Found) -> "Fault":
        """From one that was found."""
        return cls.model_validate(found, from_attributes=True)


class Verdict(Answer):
    """Which stage holds a run back. Shares are 0 to 1."""

    run: str
    verdict: Name
    sentence: str
    """The verdict in words."""
    knob: str
    """What to turn next, with keys of the recipe."""
    culprit: str | None
    """What takes the time of a stage that users bring along: "the tool run", "the environment
    sandbox", "the reward function judge"; null for other verdicts."""
    replica: str | None
    """The replica of that stage that lags behind the others, such as generator-1; null for none."""
    share: float | None
    """Of a step, that the verdict costs."""
    confidence: Confidence | None
    """High: 20 steps or more, and the conditions hold in 80 % of them; medium: in more than half.
    Of what comes in lumps, versions and stragglers, a step is looked at with its neighbours. Low
    also where what is missing may have named a larger cost."""
    num_steps: int
    """Steps that were looked at."""
    first_step: int | None
    last_step: int | None
    step_s: float | None
    """Mean seconds of a step."""
    unaccounted_share: float | None
    """Of a step, that its parts leave unexplained."""
    stages: Stages | None
    step_s_if_free: float | None
    """Predicted seconds of a step, if what holds it back took no time: an upper bound of what can
    be gained."""
    speed_up: float | None
    """As asked."""
    step_s_at_speed_up: float | None
    """Predicted, if it were so many times as fast."""
    evidence: list[Evidence]
    """The verdict's conditions; without one that holds, all conditions of the table."""
    missing: list[str]
    """Metrics whose absence left something undecided."""
    faults: list[Fault]
    """What else is wrong, what spoils learning first."""

    @classmethod
    def of(cls, run: str, found: Judged, faults: tuple[Found, ...]) -> "Verdict":
        """From the verdict on a run, and its faults."""
        return cls(
            run=run,
            verdict=found.name,
            sentence=wording.sentence(found),
            knob=wording.knob(found),
            culprit=found.culprit,
            replica=None if found.lag is None else found.lag.replica,
            share=found.share,
            confidence=found.confidence,
            num_steps=found.num_steps,
            first_step=found.first_step,
            last_step=found.last_step,
            step_s=found.step_s,
            unaccounted_share=found.unaccounted_share,
            stages=Stages.model_validate(found.stages, from_attributes=True)
            if found.stages is not None
            else None,
            step_s_if_free=found.step_s_if_free,
            speed_up=found.speed_up,
            step_s_at_speed_up=found.step_s_at_speed_up,
            evidence=[
                Evidence.model_validate(each, from_attributes=True) for each in found.evidence
            ],
            missing=list(found.missing),
            faults=[Fault.of(each) for each in faults],
        )


class PastVerdict(Answer):
    """The verdict on one window of a history."""

    first_step: int
    last_step: int
    """Of the window's steps whose length is known."""
    verdict: Name
    share: float | None
    """Of a step, that the verdict costs."""
    confidence: Confidence | None
    step_s: float | None
    """Mean seconds of a step; null for fewer than 3."""

    @classmethod
    def of(cls, found: Judged) -> "PastVerdict":
        """From the verdict on a window."""
        assert found.first_step is not None
        assert found.last_step is not None, "a history has no window without a step"
        return cls(
            first_step=found.first_step,
            last_step=found.last_step,
            verdict=found.name,
            share=found.share,
            confidence=found.confidence,
            step_s=found.step_s,
        )


class VerdictHistory(Answer):
    """How the verdict has changed."""

    run: str
    window: int
    """Steps of a window: as asked, or more where the run is too long for so many points. Windows
    begin at multiples of it."""
    verdicts: list[PastVerdict]
    """Oldest first, of the last 20,000 steps."""


def router(backend: Backend, *, clock: Callable[[], float] = time.time) -> APIRouter:
    """The endpoints that judge a run; `clock` tells seconds since 1970."""
    routes = APIRouter(prefix="/api/v1/runs", tags=["verdict"], responses=documented(401, 422, 503))

    @routes.get("/{run}/verdict", summary="Which stage holds a run back", responses=documented(404))
    def show_verdict(
        run: str,
        window: Annotated[
            int, Query(ge=1, le=MAX_STEPS, description="The last so many steps."), WHOLE
        ] = DEFAULT_STEPS,
        speed_up: Annotated[
            float | None,
            Query(
                ge=1,
                le=MAX_SPEED_UP,
                description="Also predict a step with that stage so many times as fast.",
            ),
        ] = None,
    ) -> Verdict:
        with backend.read() as connection:
            known = known_run(connection, run)
            found = read_window(connection, known, num_steps=window)
            symptoms = read_symptoms(
                connection, known, found, now_s=clock(), stuck_after_s=backend.stuck_after_s
            )
        return Verdict.of(run, judge(found, speed_up=speed_up), find_faults(symptoms))

    @routes.get(
        "/{run}/verdict/history",
        summary="Which stage held a run back, and when",
        responses=documented(404),
    )
    def show_history(
        run: str,
        window: Annotated[
            int, Query(ge=1, le=MAX_STEPS, description="Judge so many steps at a time."), WHOLE
        ] = DEFAULT_STEPS,
        max_points: Annotated[
            int,
            Query(
                ge=1,
                le=MAX_POINTS,
                description="At most so many verdicts: the windows of a longer run are wider.",
            ),
            WHOLE,
        ] = DEFAULT_POINTS,
    ) -> VerdictHistory:
        with backend.read() as connection:
            found = judge_history(
                connection, known_run(connection, run), num_steps=window, max_points=max_points
            )
        verdicts = [PastVerdict.of(each) for each in found.verdicts]
        return VerdictHistory(run=run, window=found.width, verdicts=verdicts)

    return routes
