"""The scorer: groups of rollouts in, scored samples out. Wiring only; the arithmetic is in the
modules beside it.

waits_for: groups in the `groups` stream, room in the `samples` stream, a free worker for each sync
reward function. unblocked_by: generators, the trainer.
"""

import asyncio
import time
import uuid
from typing import Any

import grpc
import structlog
from headrace.v1 import metrics_pb2, rollout_pb2, scorer_pb2, scorer_pb2_grpc

from services.common import grpc_kit, lifecycle, queue, secret_keys, workers
from services.common.background import guarded, unless, within
from services.common.command import Invocation
from services.common.config import Recipe
from services.common.errors import UserError
from services.common.readiness import ready_while
from services.common.recorder import Recorder
from services.common.streams import Entry, Stage
from services.scorer import rewards, scoring, traces, wire

DRAIN_S = 10.0
"""What is begun may finish within it after SIGTERM; the rest is given back to the queue."""

STOP_TAKING_S = 2.0
"""A take under way may end within it after SIGTERM; it takes longer only while the queue server is
away.
"""

GIVE_BACK_S = 5.0
"""To give back what is held; past it the queue's takeover does the same, later."""


class Scorer:
    """Scores groups with the recipe's reward functions: those of the queue, and those that a caller
    asks about.
    """

    def __init__(
        self, recipe: Recipe, *, judges: rewards.Judges, recorder: Recorder, producer: str
    ) -> None:
        self._recipe, self._judges, self._recorder = recipe, judges, recorder
        self._producer = producer
        self._complaints = scoring.Complaints(recorder)
        self.busy = scoring.BusyClock(
            places=recipe.scorer.max_groups, workers=recipe.rewards.workers
        )

    async def work(self, entry: Entry, stage: Stage) -> None:
        """Take one entry to its end: handed off, a tombstone, or the dead letters. Returns early
        when it is lost.
        """
        try:
            group = wire.read_group(entry.data, group_id=entry.group_id)
            conversations = wire.read_conversations(group)
        except wire.Malformed as error:
            await stage.refuse(entry, reason=str(error))
            return
        evaluation = entry.evaluation
        # An advantage is relative: a lone survivor of a group has nothing to be compared with.
        if len(group.rollouts) < (1 if evaluation else 2):
            await stage.tombstone(entry, reason="failed")
            return
        if not evaluation:
            self._event(group, metrics_pb2.GROUP_STATE_SCORING)
            if entry.wait_s is not None:
                self._recorder.observe("rollout/score_wait_s", entry.wait_s)
        begun_s = time.monotonic()
        try:
            with self.busy.busy():
                judgement = await unless(
                    entry.lost,
                    scoring.score(
                        conversations,
                        judges=self._judges,
                        recipe=self._recipe,
                        evaluation=evaluation,
                    ),
                )
        except rewards.RewardError as error:
            await stage.refuse(entry, reason=str(error))
            return
        if judgement is None:
            return
        for function, verdict in zip(self._judges.functions, judgement.verdicts, strict=True):
            if not function.is_async:
                self.busy.worked(verdict.seconds or 0.0)
        if not evaluation:
            self._recorder.observe("rollout/score_s", time.monotonic() - begun_s)
            scoring.record_seconds(judgement, self._recorder)
        self._complaints.of(judgement, group_id=entry.group_id)
        if await self._finish(entry, stage, group, judgement) == "done" and not evaluation:
            # Only now: had the claim been lost, another scorer would record the same group.
            scoring.record(judgement, self._recorder)

    async def _finish(
        self,
        entry: Entry,
        stage: Stage,
        group: rollout_pb2.RolloutGroup,
        judgement: scoring.Judgement,
    ) -> str:
        """Hand a judged group on; the outcome."""
        if not entry.evaluation and not judgement.enough:
            return await stage.tombstone(entry, reason="unscored")
        scored = wire.write_scored(group, judgement, scorer=self._producer)
        if entry.evaluation:
            return await stage.hand_off(
                entry, data=scored.SerializeToString(), n=len(scored.rollouts)
            )
        if not scored.samples:
            return await stage.tombstone(entry, reason="no_trained_tokens")
        outcome = await stage.hand_off(
            entry, data=scored.SerializeToString(), n=len(scored.samples)
        )
        if outcome == "done":
            self._event(group, metrics_pb2.GROUP_STATE_SCORED)
            # Only now: had the claim been lost, another scorer would send the same traces.
            traces.send(group, scored, settings=self._recipe.traces, recorder=self._recorder)
        return outcome

    async def score_now(self, group: rollout_pb2.RolloutGroup) -> scorer_pb2.ScoreResponse:
        """Score one group outside the queue; nothing is recorded. Raises wire.Malformed or
        rewards.RewardError.
        """
        wire.check_group(group)
        judgement = await scoring.score(
            wire.read_conversations(group),
            judges=self._judges,
            recipe=self._recipe,
            evaluation=group.request.evaluation,
        )
        scored = wire.write_scored(group, judgement, scorer=self._producer)
        return scorer_pb2.ScoreResponse(scored=scored)

    def _event(
        self, group: rollout_pb2.RolloutGroup, state: metrics_pb2.GroupState.ValueType
    ) -> None:
        request = group.request
        self._recorder.event(
            metrics_pb2.GroupEvent(
                group_id=request.group_id, row_index=request.row_index, state=state
            )
        )


class Servicer(scorer_pb2_grpc.ScorerServiceServicer):  # type: ignore[misc,unused-ignore]
    """ScorerService over gRPC."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    async def Score(self, request: scorer_pb2.ScoreRequest, context: Any) -> Any:
        """Score one group now; INVALID_ARGUMENT for a broken group, FAILED_PRECONDITION for a
        broken function.
        """
        try:
            return await self._scorer.score_now(request.group)
        except wire.Malformed as error:
            code, reason, message = grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_GROUP", str(error)
        except rewards.RewardError as error:
            code, reason, message = grpc.StatusCode.FAILED_PRECONDITION, "BAD_REWARDS", str(error)
        await grpc_kit.abort(context, code, reason, message)


async def run_stage(
    scorer: Scorer, stage: Stage, state: lifecycle.Lifecycle, *, max_groups: int
) -> None:
    """Take and score groups, `max_groups` at a time, until the service is asked to stop; then
    drain.

    Anything that a group's work raises ends the service: what cannot be worked on has been refused
    before that.
    """
    stopping = asyncio.create_task(state.stopping.wait())
    running: set[asyncio.Task[None]] = set()
    try:
        while not stopping.done():
            if len(running) >= max_groups:
                await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            else:
                for entry in await take(stage, stopping, limit=max_groups - len(running)):
                    running.add(asyncio.create_task(scorer.work(entry, stage)))
            running = _still_running(running)
            if not stopping.done():
                state.enter("the run is done" if stage.clock.state == "done" else "scoring")
        if running:
            await asyncio.wait(running, timeout=DRAIN_S)
            running = _still_running(running)
    finally:
        for task in (*running, stopping):
            task.cancel()
        await asyncio.gather(*running, stopping, return_exceptions=True)
        num_returned = await within(GIVE_BACK_S, stage.give_back())
        if num_returned is None:
            structlog.get_logger().warning("the queue server is away: groups were not given back")
        else:
            structlog.get_logger().info("drained", groups_given_back=num_returned)


async def take(stage: Stage, stopping: "asyncio.Task[Any]", *, limit: int) -> list[Entry]:
    """stage.take(), cut off only when the service stops while the queue server is away."""
    task = asyncio.create_task(stage.take(limit))
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        await asyncio.wait({task}, timeout=STOP_TAKING_S)
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return []


def _still_running(tasks: "set[asyncio.Task[None]]") -> "set[asyncio.Task[None]]":
    """Those not done; raises what a finished one raised."""
    for task in tasks:
        if task.done():
            task.result()
    return {task for task in tasks if not task.done()}


async def main(invocation: Invocation, state: lifecycle.Lifecycle) -> None:
    """Run the service until it is asked to stop. Raises UserError for a user's mistake."""
    recipe = invocation.recipe
    functions = rewards.resolve(recipe.rewards)
    channel = grpc_kit.sync_channel(recipe.network.aggregator, recipe.network)
    recorder = Recorder(
        run=recipe.run,
        producer=state.producer,
        service=state.service,
        settings=recipe.recorder,
        channel=channel,
    )
    pool = workers.Pool(recipe.rewards.workers, preload=rewards.preload(recipe.rewards, functions))
    judges = rewards.Judges(functions, pool, timeout_s=recipe.rewards.timeout_s)
    scorer = Scorer(recipe, judges=judges, recorder=recorder, producer=state.producer)
    add = scorer_pb2_grpc.add_ScorerServiceServicer_to_server
    served = await grpc_kit.serve(
        recipe.network, state, [(add, Servicer(scorer), "headrace.v1.ScorerService")]
    )
    try:
        lifecycle.announce(
            invocation.announce, grpc_port=served.port, health_port=served.health_port
        )
        client = await unless(state.stopping, prepare(recipe, state, pool))
        if client is not None:
            # From here on: a service that only waited has nothing to tell the aggregator.
            scorer.busy.take()
            scorer.busy.take_load()
            recorder.before_flush(
                lambda: recorder.ratio("rollout/scorer_busy_frac", *scorer.busy.take())
            )
            recorder.before_flush(
                lambda: recorder.ratio("rollout/scorer_load_frac", *scorer.busy.take_load())
            )
            stage = Stage(
                client,
                name="groups",
                consumer=f"{state.producer}-{uuid.uuid4().hex[:8]}",
                settings=recipe.queue,
                capacity=recipe.samples_capacity,
                recorder=recorder,
            )
            async with stage:
                working = run_stage(scorer, stage, state, max_groups=recipe.scorer.max_groups)
                await guarded(working, ready_while(state, lambda: not client.outages.lasts))
            await client.close()
    finally:
        await state.set_ready(False)
        await served.stop(1.0)
        await pool.close()
        # It waits for the aggregator's answer: not on the event loop.
        await asyncio.to_thread(recorder.close)
        channel.close()


async def prepare(
    recipe: Recipe, state: lifecycle.Lifecycle, pool: workers.Pool
) -> queue.QueueClient:
    """Reach the queue server and start the workers, saying what is waited for. Raises UserError."""
    client = await queue.connect(
        secret_keys.queue_url(recipe.queue),
        run=recipe.run,
        claim_after_s=recipe.queue.claim_after_s,
        waiting=state.enter,
        details=state.details,
    )
    state.enter("starting the workers of the reward functions")
    try:
        await pool.start()
    except workers.LoadFailed as error:
        raise UserError(
            f"rewards.functions: a function fails to import in a worker process: {error}"
        ) from error
    return client
