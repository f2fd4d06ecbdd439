"""How many generators and scorers a run should have: what an autoscaler asks."""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, HTTPException, Path, Query
from sqlalchemy import Connection

from services.aggregator import fleet, scale
from services.aggregator.api.backend import Backend
from services.aggregator.api.models import Answer
from services.aggregator.api.parameters import WHOLE
from services.aggregator.api.problems import documented
from services.aggregator.api.runs import known_run
from services.aggregator.api.verdict import Evidence
from services.aggregator.series import RunRow
from services.common.config import Scorer

WINDOW_S = 300
"""Default seconds of a window: what noise there is averages out, and it is not long to wait."""

CALM_S = 3600
"""Default calm time: at most so often one replica fewer is tried."""

SCORER_WINDOW_S = 60
"""Default seconds within which the most groups at a time count."""

FULL_FRAC = 0.95
"""Of its capacity, from which the rollout queue holds scorers back."""

OWN_RUN = "-"
"""In place of a run's name; no run can be called so."""

RunName = Annotated[
    str, Path(description=f"A run, or `{OWN_RUN}` for the one that the aggregator's recipe names.")
]

WindowS = Annotated[int, Query(ge=10, le=86_400, description="Seconds that are looked at."), WHOLE]


class GeneratorScale(Answer):
    """How many generators there should be. Rates are of the window's steps."""

    run: str
    replicas: int
    """What there should be; 0 only when the run is over."""
    live: int
    """Replicas that have been heard of within the last minute."""
    reason: str
    """Why, in words."""
    producing: float | None
    """Replicas that served a version, on the average of the window; those still starting are not
    among them."""
    needed_groups_per_s: float | None
    """What the trainer would take if it never waited on an empty queue."""
    produced_groups_per_s: float | None
    """What the producing replicas made."""
    num_steps: int
    """Steps in the window."""
    unchanged_s: float
    """Seconds since a replica came or went."""
    evidence: list[Evidence]
    """The conditions for more replicas, with what was found."""


class ScorerScale(Answer):
    """How many scorers there should be."""

    run: str
    replicas: int
    """What there should be; 0 when no group waits and none is held."""
    live: int
    """Replicas that have been heard of within the last minute."""
    reason: str
    """Why, in words."""
    waiting_groups: float
    """Groups that wait for a scorer, as the trainer saw them last."""
    held_groups: float
    """Groups that scorers hold."""
    peak_groups: float | None
    """Most of both within the window; null where the trainer has not reported in it."""
    held_back: bool
    """Whether the rollout queue is full, so that scored groups cannot go on."""


def router(backend: Backend, *, clock: Callable[[], float]) -> APIRouter:
    """The endpoints that tell an autoscaler; `clock` is seconds since 1970."""
    routes = APIRouter(
        prefix="/api/v1/runs", tags=["scale"], responses=documented(401, 404, 422, 503)
    )

    @routes.get("/{run}/scale/generator", summary="How many generators a run should have")
    def scale_generator(
        run: RunName,
        window_s: WindowS = WINDOW_S,
        calm_s: Annotated[
            int,
            Query(
                ge=60,
                le=86_400,
                description="Seconds without a change or a wait after which one fewer is tried.",
            ),
            WHOLE,
        ] = CALM_S,
    ) -> GeneratorScale:
        now_s = clock()
        with backend.read() as connection:
            row = _known(connection, run, backend)
            seen = fleet.read_fleet(connection, row, service="generator", now_s=now_s)
            since_s = now_s - window_s
            window, replica_s = fleet.recent_window(connection, row, since_s=since_s)
            calm = None
            if seen.live > 1 and seen.unchanged_s >= calm_s:
                calm = fleet.read_calm(connection, row, calm_s=calm_s, now_s=now_s)
            over = fleet.is_over(connection, row, since_s=since_s)
            last_s = fleet.ended_s(connection, row)
        found = scale.generators(
            window,
            seen,
            replica_s=replica_s,
            quiet_s=0.0 if last_s is None else max(0.0, now_s - last_s),
            calm=calm,
            over=over,
        )
        return GeneratorScale(
            run=row.name,
            replicas=found.replicas,
            live=seen.live,
            reason=found.reason,
            producing=found.producing,
            needed_groups_per_s=found.needed_groups_per_s,
            produced_groups_per_s=found.produced_groups_per_s,
            num_steps=len(window.steps),
            unchanged_s=seen.unchanged_s,
            evidence=[
                Evidence.model_validate(each, from_attributes=True) for each in found.evidence
            ],
        )

    @routes.get("/{run}/scale/scorer", summary="How many scorers a run should have")
    def scale_scorer(
        run: RunName,
        window_s: WindowS = SCORER_WINDOW_S,
        max_groups: Annotated[
            int,
            Query(ge=1, le=100_000, description="Groups that a scorer takes: scorer.max_groups."),
            WHOLE,
        ] = Scorer().max_groups,
    ) -> ScorerScale:
        now_s = clock()
        with backend.read() as connection:
            row = _known(connection, run, backend)
            seen = fleet.read_fleet(connection, row, service="scorer", now_s=now_s)
            waiting, held = fleet.queue_now(connection, row)
            since_s = now_s - window_s
            peak = fleet.queue_peak(connection, row, since_s=since_s)
            fill = fleet.queue_fill(connection, row, since_s=since_s)
        held_back = fill is not None and fill >= FULL_FRAC
        found = scale.scorers(
            waiting=waiting,
            held=held,
            peak=peak,
            live=seen.live,
            max_groups=max_groups,
            held_back=held_back,
        )
        return ScorerScale(
            run=row.name,
            replicas=found.replicas,
            live=seen.live,
            reason=found.reason,
            waiting_groups=waiting,
            held_groups=held,
            peak_groups=peak,
            held_back=held_back,
        )

    return routes


def _known(connection: Connection, name: str, backend: Backend) -> RunRow:
    """Raises HTTPException 404."""
    if name == OWN_RUN:
        if backend.run is None:
            raise HTTPException(404, f"{OWN_RUN!r}: this aggregator has no recipe; name a run")
        name = backend.run
    return known_run(connection, name)
