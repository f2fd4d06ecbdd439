"""The generator service: wiring of queue, engine, policy and gRPC.

waits_for: requests, room in `groups`, policy versions. unblocked_by: the trainer, the scorers.
"""

import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import structlog
from google.protobuf.message import DecodeError
from headrace.v1 import generator_pb2_grpc, metrics_pb2, policy_pb2_grpc, rollout_pb2

from services.common import adapter_files, grpc_kit, queue, secret_keys
from services.common.background import unless, within
from services.common.command import Invocation
from services.common.config import Recipe
from services.common.lifecycle import Lifecycle, announce, cancel
from services.common.recorder import Recorder
from services.common.streams import Entry, Stage
from services.generator import engine_environment, wire
from services.generator.ages import Ages
from services.generator.base_weights import engine_folder
from services.generator.conversation import Generates, Setting
from services.generator.equipment import equipped
from services.generator.group import MIN_GROUP, Group, GroupRunner
from services.generator.servicer import Servicer
from services.generator.serving import Loads, Serving
from services.generator.slots import Slots
from services.generator.template import ChatTemplate
from services.generator.traces import Tracing
from services.generator.weight_group import member_of
from services.generator.weight_peers import PeerServicer
from services.generator.weights import PolicyClient

DRAIN_S = 10.0
"""After SIGTERM: what finishes within this is handed off, the rest is given back."""

GIVE_BACK_S = 5.0
"""Longest time that giving back may take at the end."""

FIRST_ANSWER_S = 600.0
"""The first request of an engine compiles; one that has not been answered by then is hung."""

PROBE_EVERY_S = 20.0
"""How often the engine is asked for one token."""

PROBE_DEADLINE_S = 120.0
"""An engine that has not answered by then is hung: the process ends and is started anew."""


class RunningEngine(Generates, Loads, Protocol):
    """All that a replica needs of its engine; see engine.py."""

    async def check(self, timeout_s: float) -> None:
        """Return when the engine has answered; raise when it is dead or hung."""
        ...

    def shutdown(self) -> None:
        """End the engine's processes."""
        ...


StartEngine = Callable[[Path, Recipe], Awaitable[RunningEngine]]
"""Starts an engine, with dummy weights, on a folder with the model's configuration."""


class Replica:
    """One generator: takes requests, runs groups, hands them off."""

    def __init__(
        self, invocation: Invocation, lifecycle: Lifecycle, *, importing: Awaitable[StartEngine]
    ) -> None:
        self._recipe: Recipe = invocation.recipe
        self._invocation, self._lifecycle, self._importing = invocation, lifecycle, importing
        self._groups: set[asyncio.Task[None]] = set()
        self._starting: set[Entry] = set()
        """Taken, and not yet begun by the runner."""
        self._handing: set[Entry] = set()
        """Finished, and on their way to the next stream."""
        self._servicer = Servicer(lambda: lifecycle.phase)

    async def run(self) -> bool:
        """Start, serve until asked to stop, drain. Whether it came so far as to serve."""
        recipe, lifecycle = self._recipe, self._lifecycle
        peers = PeerServicer()
        register: list[tuple[Any, Any, str]] = [
            (
                generator_pb2_grpc.add_GeneratorServiceServicer_to_server,
                self._servicer,
                "headrace.v1.GeneratorService",
            ),
            (
                policy_pb2_grpc.add_PolicyServiceServicer_to_server,
                peers,
                "headrace.v1.PolicyService",
            ),
        ]
        served = await grpc_kit.serve(recipe.network, lifecycle, register)
        announce(
            self._invocation.announce,
            grpc_port=served.port,
            health_port=served.health_port,
            pid=os.getpid(),
        )
        recorder = Recorder(
            run=recipe.run,
            producer=lifecycle.producer,
            service="generator",
            settings=recipe.recorder,
            channel=grpc_kit.sync_channel(recipe.network.aggregator, recipe.network),
        )
        channel = grpc_kit.channel(recipe.network.trainer, recipe.network)
        client = PolicyClient(
            channel,
            generator=lifecycle.producer,
            network=recipe.network,
            recorder=recorder,
            port=served.port,
        )
        peers.open(client.find_file)
        try:
            body = asyncio.create_task(self._body(client, recorder))
            stop = asyncio.create_task(lifecycle.stopping.wait())
            await asyncio.wait({body, stop}, return_when=asyncio.FIRST_COMPLETED)
            if body.done():
                stop.cancel()
            elif not lifecycle.ready and not self._groups:
                await cancel(body)  # still starting: nothing is held
                return False
            await body
            return True
        finally:
            await asyncio.to_thread(recorder.close)
            await client.close()
            await channel.close(None)
            await served.stop(1.0)

    async def _body(self, client: PolicyClient, recorder: Recorder) -> None:
        recipe, lifecycle = self._recipe, self._lifecycle
        lifecycle.enter(f"waiting for the trainer at {recipe.network.trainer}")
        folder = await client.model_files(model_cache())
        template = ChatTemplate(folder)
        async with equipped(recipe, template) as equipment:
            lifecycle.enter("importing vLLM")
            start_engine = await self._importing
            equipment.check_formats()
            async with engine_folder(folder, client, lifecycle.enter) as place:
                lifecycle.enter("starting the engine")
                engine = await start_engine(place, recipe)
            setting = equipment.setting(engine)
            await self._with_engine(setting, engine, client, recorder)

    async def _with_engine(
        self, setting: Setting, engine: RunningEngine, client: PolicyClient, recorder: Recorder
    ) -> None:
        recipe, lifecycle = self._recipe, self._lifecycle
        watch = asyncio.create_task(client.watch())
        try:
            lifecycle.enter("compiling the first request")
            await engine.check(FIRST_ANSWER_S)
            serving = Serving(
                *(engine, client, recorder),
                dtype=recipe.model.dtype,
                details=lifecycle.details,
                group=member_of(recipe, engine, client),
            )
            self._ages = Ages(client)
            trainer = recipe.trainer
            self._tracing = Tracing(
                recipe.traces,
                groups_per_version=trainer.groups_per_step * trainer.weight_sync_steps,
                spell=setting.template.spell,
            )
            begin = asyncio.create_task(serving.start(lifecycle.enter))
            try:
                # A watch that ends has failed: no version would ever come.
                await asyncio.wait({begin, watch}, return_when=asyncio.FIRST_COMPLETED)
                (begin if begin.done() else watch).result()
            finally:
                await cancel(begin)
            slots = Slots(recipe.generator.max_inflight)
            runner = GroupRunner(setting, slots, recorder)
            self._servicer.open_with(runner, setting.template, serving)
            await self._serve(runner, slots, serving, engine, recorder, watch)
        finally:
            self._servicer.close()
            await cancel(watch)
            engine.shutdown()

    async def _serve(
        self,
        runner: GroupRunner,
        slots: Slots,
        serving: Serving,
        engine: RunningEngine,
        recorder: Recorder,
        watch: "asyncio.Task[None]",
    ) -> None:
        recipe, lifecycle = self._recipe, self._lifecycle
        settings = recipe.queue
        connection = await queue.connect(
            secret_keys.queue_url(settings),
            run=recipe.run,
            claim_after_s=settings.claim_after_s,
            waiting=lifecycle.enter,
            details=lifecycle.details,
        )
        stage = Stage(
            connection,
            name="requests",
            consumer=f"{lifecycle.producer}-{uuid.uuid4().hex[:8]}",
            settings=settings,
            capacity=settings.groups_capacity,
            recorder=recorder,
        )
        recorder.before_flush(_sampler(recorder, slots, serving))
        try:
            async with stage:
                await self._until_stopped(stage, runner, slots, serving, engine, recorder, watch)
        finally:
            await connection.close()

    async def _until_stopped(
        self,
        stage: Stage,
        runner: GroupRunner,
        slots: Slots,
        serving: Serving,
        engine: RunningEngine,
        recorder: Recorder,
        watch: "asyncio.Task[None]",
    ) -> None:
        lifecycle = self._lifecycle
        follow = asyncio.create_task(serving.follow(lambda: self._give_back(stage)))
        ageing = asyncio.create_task(self._ages.follow())
        probe = asyncio.create_task(_probe(engine))
        take = asyncio.create_task(self._take(stage, runner, slots, serving, recorder))
        stop = asyncio.create_task(lifecycle.stopping.wait())
        try:
            done, _ = await asyncio.wait(
                {follow, ageing, probe, take, watch, stop}, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done - {stop}:
                task.result()  # raises what ended it
            self._servicer.close()
            await cancel(take)  # first: who is seen not to be ready takes nothing any more
            await lifecycle.set_ready(False)
            if self._groups:
                await asyncio.wait(self._groups, timeout=DRAIN_S)
        finally:
            await cancel(take)  # before: it would take again, and be listed again
            # Where the queue server is away its takeover does the same, later.
            await within(GIVE_BACK_S, self._give_back(stage))
            await cancel(follow, ageing, probe, take, stop, *self._groups)

    async def _take(
        self, stage: Stage, runner: GroupRunner, slots: Slots, serving: Serving, recorder: Recorder
    ) -> None:
        """Take requests while slots are free and the served version is current enough.

        A slot counts as free when no conversation holds or awaits it, so that a group's last
        conversation does not keep the slots of the others idle. While the next stream is full, no
        more finished groups pile up here than fill the slots once.
        """
        num = self._recipe.generation.num_generations
        while True:
            failed = [
                task
                for task in self._groups
                if task.done() and not task.cancelled() and task.exception()
            ]
            for task in failed:
                task.result()
            self._groups = {task for task in self._groups if not task.done()}
            # The clock tells of a new attempt sooner than a broken stream is open again.
            ready = serving.may_take_work and serving.attempt >= stage.clock.attempt
            await self._lifecycle.set_ready(ready)
            self._lifecycle.details.update(
                served_version=str(serving.version),
                behind=str(serving.behind),
                inflight=str(slots.busy),
            )
            free = slots.total - runner.unfinished - len(self._starting) * num
            if len(self._handing) * num >= slots.total:
                free = 0
            if not ready or free < 1:
                self._lifecycle.enter("generating" if ready else "catching up with the policy")
                slots.set_starving(False)
                await asyncio.sleep(0.005 if ready else 0.1)
                continue
            self._lifecycle.enter("generating")
            entries = await stage.take(
                max(1, -(-free // num)), version=serving.version_to_begin_with
            )
            slots.set_starving(not entries)
            for entry in entries:
                self._starting.add(entry)
                work = self._work(stage, entry, runner, serving, recorder)
                self._groups.add(asyncio.create_task(work))

    async def _work(
        self, stage: Stage, entry: Entry, runner: GroupRunner, serving: Serving, recorder: Recorder
    ) -> None:
        """One entry from request to hand-off; cancelled when the claim is lost."""
        try:
            await unless(entry.lost, self._group(stage, entry, runner, serving, recorder))
        finally:
            self._starting.discard(entry)
            self._handing.discard(entry)

    async def _group(
        self, stage: Stage, entry: Entry, runner: GroupRunner, serving: Serving, recorder: Recorder
    ) -> None:
        try:
            request = rollout_pb2.RolloutRequest.FromString(entry.data)
        except DecodeError as error:
            await stage.refuse(entry, reason=f"request does not parse: {error}")
            return
        if entry.wait_s is not None and not entry.evaluation:
            recorder.observe("rollout/request_wait_s", entry.wait_s)
        if entry.evaluation:
            group = await self._generate(stage, entry, request, runner)
            if group is not None:
                await self._hand_off(stage, entry, request, group, serving, recorder)
            return
        self._event(recorder, request, metrics_pb2.GROUP_STATE_GENERATING)
        with self._ages.watched(began=serving.publishes) as too_old:
            generating = self._generate(stage, entry, request, runner, too_old)
            group = await unless(too_old, generating)
            if group is not None:
                handing = self._hand_off(stage, entry, request, group, serving, recorder)
                await unless(too_old, handing)
            # What was cut off within a hand-off may have been handed off: this then says so.
            if too_old.is_set() and not entry.lost.is_set():
                await stage.tombstone(entry, reason="stale")

    async def _generate(
        self,
        stage: Stage,
        entry: Entry,
        request: rollout_pb2.RolloutRequest,
        runner: GroupRunner,
        too_old: asyncio.Event | None = None,
    ) -> Group | None:
        """The request's group; None when the entry was ended without one."""
        self._starting.discard(entry)  # in the same moment the runner counts its conversations
        try:
            group = await runner.run(request, training=not entry.evaluation, too_old=too_old)
        except wire.Malformed as error:
            await stage.refuse(entry, reason=str(error))
            return None
        self._handing.add(entry)
        if not entry.evaluation:  # the trainer records what it takes of these
            runner.measure(group)
        if len(group.conversations) < (1 if entry.evaluation else MIN_GROUP):
            await stage.tombstone(entry, reason="failed")
            return None
        if group.versions is None:
            await stage.tombstone(entry, reason="no_trained_tokens")
            return None
        return group

    async def _hand_off(
        self,
        stage: Stage,
        entry: Entry,
        request: rollout_pb2.RolloutRequest,
        group: Group,
        serving: Serving,
        recorder: Recorder,
    ) -> None:
        """Pass a group on, once its newest version is proven."""
        assert group.versions is not None
        message = wire.write_group(
            request,
            group.conversations,
            failed=group.failed,
            versions=group.versions,
            producer=self._lifecycle.producer,
        )
        if not entry.evaluation:
            await self._tracing.mark(message, group, recorder)
        await serving.wait_proven(message.newest_version)
        outcome = await stage.hand_off(
            entry, data=message.SerializeToString(), n=len(message.rollouts)
        )
        if outcome == "done" and not entry.evaluation:
            self._event(recorder, request, metrics_pb2.GROUP_STATE_GENERATED)

    def _event(
        self,
        recorder: Recorder,
        request: rollout_pb2.RolloutRequest,
        state: "metrics_pb2.GroupState.ValueType",
    ) -> None:
        recorder.event(
            metrics_pb2.GroupEvent(
                group_id=request.group_id, row_index=request.row_index, state=state
            )
        )

    async def _give_back(self, stage: Stage) -> None:
        count = await stage.give_back()
        if count:
            structlog.get_logger().info("given back", groups=count)


def model_cache() -> Path:
    """Where replicas of this user keep model files; any of them may be removed at any time."""
    return Path(tempfile.gettempdir()) / f"headrace-models-{os.getuid()}"


async def _probe(engine: RunningEngine) -> None:
    """End the process when the engine is dead or hung: it cannot be restarted in place."""
    while True:
        await asyncio.sleep(PROBE_EVERY_S)
        await engine.check(PROBE_DEADLINE_S)


def _sampler(recorder: Recorder, slots: Slots, serving: Serving) -> Any:
    """Record the gauges of this replica each time the recorder flushes."""
    last_s = time.monotonic()

    def sample() -> None:
        nonlocal last_s
        busy_s, starved_s, all_s = slots.drain()
        recorder.ratio("rollout/slots_busy_frac", busy_s, all_s)
        recorder.ratio("rollout/slots_starved_frac", starved_s, all_s)
        recorder.observe("rollout/inflight", slots.busy)
        now = time.monotonic()
        recorder.ratio("perf/generator_paused_frac", serving.take_paused_s(), now - last_s)
        last_s = now

    return sample


def _import_engine() -> StartEngine:
    # Here, since it imports vLLM, which takes seconds.
    from services.generator.adapters import AdapterSettings
    from services.generator.engine import Engine

    async def start(folder: Path, recipe: Recipe) -> RunningEngine:
        settings = recipe.generator
        engine_environment.prepare(
            enforce_eager=settings.enforce_eager, vocab_size=engine_environment.vocab_size(folder)
        )
        adapters = None
        config = folder / adapter_files.CONFIG
        if config.is_file():
            adapters = AdapterSettings(config.read_bytes(), recipe.trainer.max_staleness)
        return await Engine.start(
            folder, settings=settings, dtype=recipe.model.dtype, adapters=adapters
        )

    return start


async def main(invocation: Invocation, lifecycle: Lifecycle) -> None:
    """Run a generator until SIGTERM."""
    # Meanwhile the trainer is waited for, and status calls are answered.
    importing = asyncio.create_task(asyncio.to_thread(_import_engine))
    if not await Replica(invocation, lifecycle, importing=importing).run():
        _leave()


def _leave() -> None:
    """End the process at once, with status 0. vLLM is imported and started in threads, which
    nothing can stop and Python would wait for: most of a minute, for an engine of no use.
    """
    for child in multiprocessing.active_children():  # the engine's own
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
