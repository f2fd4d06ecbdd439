"""Traced conversations: from a reward curve, a step or a version to what was said."""

from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Path, Query

from services.aggregator import trace_store
from services.aggregator.api.backend import Backend
from services.aggregator.api.parameters import MAX_POSITION, WHOLE
from services.aggregator.api.problems import documented
from services.aggregator.api.rollout_models import RolloutDetail, RolloutPage, RolloutSummary
from services.aggregator.api.runs import known_run
from services.aggregator.traces import MAX_NAME

MAX_LIMIT = 200
"""Conversations of one page."""

Version = Annotated[
    int | None,
    Query(ge=0, le=MAX_POSITION, description="The oldest policy version of the group."),
    WHOLE,
]
Step = Annotated[
    int | None,
    Query(ge=0, le=MAX_POSITION, description="The optimizer step that trained the group."),
    WHOLE,
]
Function = Annotated[
    str | None,
    Query(
        max_length=MAX_NAME,
        description="A reward function that did not abstain; the range is then of its reward.",
    ),
]
Reward = Annotated[
    float | None,
    Query(
        allow_inf_nan=False,
        description="An end of the range of rewards, which belongs to it: of `function`, else of "
        "the weighted sum.",
    ),
]
Tool = Annotated[
    str | None, Query(max_length=MAX_NAME, description="A tool that the conversation called.")
]
End = Annotated[
    Literal["stop", "length", "context", "turns", "time"] | None,
    Query(description="Why the conversation ended."),
]
PageToken = Annotated[
    str | None,
    Query(
        pattern="^[0-9]{1,15}$",
        description="The answer's next_page_token, with the same filters; without it the newest.",
    ),
]
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Conversations of a page."), WHOLE]
RolloutId = Annotated[
    str, Path(description="group_id/generation, such as 0.17.1.1/3; the slash may be %2F.")
]


def router(backend: Backend) -> APIRouter:
    """The endpoints of traced conversations."""
    routes = APIRouter(
        prefix="/api/v1/runs", tags=["rollouts"], responses=documented(401, 404, 422, 503)
    )

    @routes.get("/{run}/rollouts", summary="Traced conversations, the newest first")
    def list_rollouts(
        run: str,
        version: Version = None,
        step: Step = None,
        function: Function = None,
        reward_min: Reward = None,
        reward_max: Reward = None,
        tool: Tool = None,
        end: End = None,
        page_token: PageToken = None,
        limit: Limit = 50,
    ) -> RolloutPage:
        wanted = trace_store.Wanted(
            version=version,
            step=step,
            function=function,
            reward_min=reward_min,
            reward_max=reward_max,
            tool=tool,
            end=end,
        )
        before = None if page_token is None else int(page_token)
        with backend.read() as connection:
            known = known_run(connection, run)
            # One more than is shown tells whether there is a next page.
            found = trace_store.newest(connection, known, wanted, before=before, limit=limit + 1)
            shown = found[:limit]
            groups = trace_store.outcomes(connection, known, (each.group_id for each in shown))
        return RolloutPage(
            run=run,
            rollouts=[RolloutSummary.of(each, groups.get(each.group_id)) for each in shown],
            next_page_token=str(shown[-1].id) if len(found) > limit else None,
        )

    @routes.get("/{run}/rollouts/{rollout_id:path}", summary="A traced conversation, whole")
    def show_rollout(run: str, rollout_id: RolloutId) -> RolloutDetail:
        with backend.read() as connection:
            known = known_run(connection, run)
            found = trace_store.find(connection, known, rollout_id)
            if found is None:
                raise HTTPException(
                    404,
                    f"no trace of conversation {rollout_id[:80]!r} is kept of run {run}; few are "
                    "traced, and old ones make room for new ones (the recipe's [traces])",
                )
            kept, trace = found
            groups = trace_store.outcomes(connection, known, [kept.group_id])
        return RolloutDetail.whole(kept, trace, groups.get(kept.group_id))

    return routes
