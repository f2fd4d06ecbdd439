"""The verdict: which stage holds a run back, and what to turn."""

from typing import Annotated

from fastapi import APIRouter, Query

from services.aggregator import wording
from services.aggregator.api.backend import Backend
from services.aggregator.api.models import Answer
from services.aggregator.api.parameters import WHOLE
from services.aggregator.api.problems import documented
from services.aggregator.api.runs import known_run
from services.aggregator.evidence import read_window
from services.aggregator.rules import Compare, Name
from services.aggregator.verdict import DEFAULT_STEPS, Confidence, judge
from services.aggregator.verdict import Verdict as Judged

MAX_STEPS = 1000
"""Most steps of a window."""

MAX_SPEED_UP = 1e6
"""Beyond this a stage is as good as free."""


class Evidence(Answer):
    """A condition of the verdict, with what was measured."""

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


class Verdict(Answer):
    """Which stage holds a run back. Shares are 0 to 1."""

    run: str
    verdict: Name
    sentence: str
    """The verdict in words."""
    knob: str
    """What to turn next, with keys of the recipe."""
    share: float | None
    """Of a step, that the verdict costs."""
    confidence: Confidence | None
    """High: 20 steps or more, and the conditions hold in 80 % of them; medium: in more than
    half. Low also where what is missing may have named a larger cost."""
    num_steps: int
    """Steps that were looked at."""
    first_step: int | None
    last_step: int | None
    step_s: float | None
    """Median seconds of a step."""
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

    @classmethod
    def of(cls, run: str, found: Judged) -> "Verdict":
        """From the verdict on a run."""
        return cls(
            run=run,
            verdict=found.name,
            sentence=wording.sentence(found),
            knob=wording.knob(found),
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
        )


def router(backend: Backend) -> APIRouter:
    """The endpoint that judges a run."""
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
            found = read_window(connection, known_run(connection, run), num_steps=window)
        return Verdict.of(run, judge(found, speed_up=speed_up))

    return routes
