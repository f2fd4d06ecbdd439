"""The run itself: dispatch, steps, versions, evaluations, from the first prompt to the report.

waits_for: scored groups in `samples`. unblocked_by: generators and scorers; a step never waits for
itself, since groups outstanding always cover at least one step.

Torch runs on one thread of its own; this coroutine only waits for it.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import structlog
from headrace.v1 import metrics_pb2

from services.common.background import guarded, unless
from services.common.config import Recipe
from services.common.errors import UserError
from services.common.lifecycle import Lifecycle
from services.common.recorder import Recorder
from services.trainer import dataset
from services.trainer.dispatch import REASONS, Dispatcher
from services.trainer.evaluation import Evaluation, evaluate, request_of
from services.trainer.intake import AdmittedGroup, Poison, Policy, Refused, admit
from services.trainer.learner import Learner
from services.trainer.measure import (
    StepTimes,
    Totals,
    drop_reasons,
    record_drop,
    record_dropped_samples,
    record_queue,
    record_step,
)
from services.trainer.policy import PolicyServicer, PolicyStore
from services.trainer.run_queue import Delivery, RunQueue
from services.trainer.types import TrainSample

GAUGE_EVERY_S = 1.0
"""How often the streams' fill is measured."""

RECONCILE_EVERY_S = 60.0
"""How often memory is compared with the queue's own list of outstanding groups."""

SYNCED_WITHIN_S = 300.0
"""Longest wait for the generators to serve a version that is to be evaluated."""

T = TypeVar("T")


class Training:
    """One attempt of one run."""

    def __init__(
        self,
        recipe: Recipe,
        lifecycle: Lifecycle,
        recorder: Recorder,
        servicer: PolicyServicer,
        queue: RunQueue,
        torch_thread: ThreadPoolExecutor,
        at_exit: ExitStack,
    ) -> None:
        self._recipe, self._lifecycle, self._record = recipe, lifecycle, recorder
        self._servicer, self._queue, self._torch_thread = servicer, queue, torch_thread
        self._at_exit = at_exit
        self._rows = dataset.load(recipe)
        self._totals = Totals()
        self._evaluations: list[Evaluation] = []
        self._room = asyncio.Event()
        self._dispatching: set[str] = set()
        self._held: dict[str, Delivery] = {}
        self._step = 0
        self._applied = 0
        self._started = datetime.now(UTC)

    async def run(self) -> dict[str, Any] | None:
        """Train to the end; the report. None when asked to stop before: nothing is kept then, as
        resuming is not built yet."""
        recipe = self._recipe
        checkpoints = recipe.run_folder / "checkpoints"
        self._lifecycle.enter("loading the model")
        learner = self._learner = await self._torch(Learner, recipe)
        attempt = await self._begin_attempt(checkpoints)
        self._record.set_clock(attempt=attempt, step=0)
        self._lifecycle.details["attempt"] = str(attempt)
        self._store = PolicyStore(
            checkpoints=checkpoints,
            attempt=attempt,
            vocab_size=learner.vocab_size,
            max_staleness=recipe.trainer.max_staleness,
        )
        self._at_exit.callback(self._store.close)  # after the run: the final version stays served
        max_steps = recipe.trainer.max_steps
        self._dispatcher = Dispatcher(
            order=self._rows.order,
            num_rows=len(self._rows.training),
            attempt=attempt,
            epochs=recipe.data.epochs,
            max_groups=None if max_steps is None else max_steps * recipe.trainer.groups_per_step,
            max_tries=recipe.queue.max_tries,
            max_stale_tries=recipe.queue.max_stale_tries,
        )
        self._servicer.open(self._store, learner.folder)
        whole = guarded(self._course(), self._gauge(), self._prove_late())
        if not await unless(self._lifecycle.stopping, whole):
            return None
        return await self._end()

    async def _course(self) -> bool:
        """Everything between the first version and the end; True."""
        await self._publish()
        await self._lifecycle.set_ready(True)
        await self._evaluate("before")
        await guarded(self._steps(), self._dispatch(), self._reconcile())
        if self._store.step_of[self._store.version] != self._applied:
            await self._publish()
        await self._evaluate("after")
        return True

    async def _begin_attempt(self, checkpoints: Path) -> int:
        attempts = checkpoints / "attempts"
        attempts.mkdir(parents=True, exist_ok=True)
        if any(attempts.iterdir()):
            raise UserError(
                f"run {self._recipe.run} was started before ({self._recipe.run_folder}); resuming "
                "is not built yet: start over with --fresh, or choose another run name"
            )
        attempt, places = await self._queue.start(floor=1, recipe=self._recipe.identity())
        if attempt > 1 or places:
            raise UserError(
                f"the queue holds an earlier attempt of run {self._recipe.run}; resuming is not "
                "built yet: start over with --fresh, or choose another run name"
            )
        descriptor = os.open(attempts / str(attempt), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        return attempt

    async def _torch(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            self._torch_thread, lambda: function(*arguments)
        )

    # -- versions

    async def _publish(self) -> None:
        """Write and announce the present weights as the next version."""
        learner, store = self._learner, self._store
        path, rows = store.next_path(), store.canary_rows
        with_proof = store.current is None or self._servicer.unproven

        def write() -> tuple[int, Any, Any]:
            num_tensors = learner.write_weights(path)
            perturbed = learner.perturbed_logprobs(path, rows) if with_proof else None
            return num_tensors, learner.canary_logprobs(rows), perturbed

        num_tensors, canary, perturbed = await self._torch(write)
        published = await store.publish(
            step=self._applied,
            num_tensors=num_tensors,
            dtype=learner.dtype,
            canary_logprobs=canary,
            perturbed_logprobs=perturbed,
        )
        self._lifecycle.details["version"] = str(published.version)

    async def _prove_late(self) -> None:
        """Give generators that join between two versions what their load-path proof needs."""
        while True:
            await self._servicer.proof_wanted.wait()
            self._servicer.proof_wanted.clear()
            # Again, should a version without them have been published meanwhile.
            while (current := self._store.current) and current.perturbed_logprobs is None:
                rows = self._store.canary_rows
                values = await self._torch(self._learner.perturbed_logprobs, current.path, rows)
                await self._store.add_perturbed(current.version, values)

    # -- evaluation

    async def _evaluate(self, when: str) -> None:
        if not self._recipe.evaluation.enabled:
            return
        begin_s, version = time.monotonic(), self._store.version
        self._lifecycle.enter(f"waiting for generators to serve version {version}")
        if not await self._servicer.wait_served(version, timeout_s=SYNCED_WITHIN_S):
            structlog.get_logger().warning("not all generators serve the version to evaluate")
        self._lifecycle.enter(f"evaluating {when} training")
        found = await evaluate(
            self._queue,
            self._rows.evaluation,
            self._recipe,
            number=len(self._evaluations),
            version=version,
        )
        self._evaluations.append(found)
        # Generators were waited for, too: it is what holds the trainer.
        self._record.observe("perf/eval_s", time.monotonic() - begin_s)
        if found.accuracy is not None:
            self._lifecycle.details[f"eval_{when}"] = f"{found.accuracy:.4f}"
        structlog.get_logger().info(
            "evaluated", when=when, reward=found.reward, failed=found.failed
        )

    # -- dispatch

    async def _dispatch(self) -> None:
        """Keep as many groups outstanding as pacing allows."""
        bound = self._recipe.max_outstanding
        while True:
            ticket = None
            if len(self._dispatcher.outstanding) < bound:
                ticket = self._dispatcher.next_ticket()
            if ticket is None:
                self._room.clear()
                await self._room.wait()
                continue
            self._dispatching.add(ticket.group_id)
            row = self._rows.training[ticket.row]
            request = request_of(
                row, group_id=ticket.group_id, recipe=self._recipe, evaluation=False
            )
            await self._queue.dispatch(ticket.group_id, request.SerializeToString())
            self._dispatching.discard(ticket.group_id)
            self._event(ticket.group_id, metrics_pb2.GROUP_STATE_DISPATCHED)

    # -- steps

    async def _steps(self) -> None:
        """All optimizer steps."""
        lifecycle, recipe = self._lifecycle, self._recipe
        previous_s: float | None = None
        while self._dispatcher.remaining != 0:
            self._step = self._totals.steps + 1
            lifecycle.details.update(
                step=str(self._step), max_steps=str(recipe.trainer.max_steps or "")
            )
            self._record.set_clock(attempt=self._queue.attempt, step=self._step)
            if previous_s is None:
                await self._queue.settle([], step=self._step)
            lifecycle.enter("training")
            times = StepTimes()
            groups = await self._fill(times)
            if groups:  # else all that was left has been given up
                previous_s = await self._train(groups, times, previous_s)
        # What comes now is no part of the last step: its time has been recorded.
        self._record.set_clock(attempt=self._queue.attempt, step=self._totals.steps + 1)

    async def _fill(self, times: StepTimes) -> list[AdmittedGroup]:
        """Groups for the open step: as many as a step has, or as are left."""
        groups: list[AdmittedGroup] = []
        while True:
            remaining = self._dispatcher.remaining
            wanted = self._recipe.trainer.groups_per_step
            if remaining is not None:
                wanted = min(wanted, remaining)
            if len(groups) >= wanted:
                return groups
            begin_s = time.monotonic()
            deliveries = await self._queue.take(wanted - len(groups), wait=False)
            times.data_s += time.monotonic() - begin_s
            if not deliveries:
                begin_s = time.monotonic()
                deliveries = await self._queue.take(wanted - len(groups))
                times.rollout_wait_s += time.monotonic() - begin_s
            begin_s = time.monotonic()
            # All are held before anything is awaited: what a settlement has taken out of the
            # server's list must not look lost.
            for delivery, mine in [(each, self._hold(each)) for each in deliveries]:
                if not mine:
                    await self._discard(delivery)
                elif group := await self._admit(delivery):
                    groups.append(group)
            times.data_s += time.monotonic() - begin_s

    def _hold(self, delivery: Delivery) -> bool:
        """Whether the group is waited for, and this is its first entry."""
        if delivery.group_id not in self._dispatcher.outstanding:
            return False
        return self._held.setdefault(delivery.group_id, delivery) is delivery

    async def _discard(self, delivery: Delivery) -> None:
        """Remove an entry that no group waits for: of one declared lost that came after all, a
        second one, a stranger's."""
        group_id = delivery.group_id
        structlog.get_logger().warning("an entry that nobody waits for", group=group_id)
        self._record.count("queue/redelivered_total")
        if not group_id:
            self._record.count("queue/dead_total")
            await self._queue.bury(delivery, reason="no group id", settings=self._recipe.queue)
        settled = "" if group_id in self._dispatcher.outstanding else group_id
        await self._queue.settle([(delivery.entry_id, settled)], step=self._step)

    async def _admit(self, delivery: Delivery) -> AdmittedGroup | None:
        """A group for the open step; or it is settled as dropped, and None."""
        if delivery.wait_s is None:
            self._record.count("queue/bad_wait_total")
        elif not delivery.reason:  # a tombstone is no sample
            self._record.observe("sample/time_in_queue_s", delivery.wait_s)
        self._event(delivery.group_id, metrics_pb2.GROUP_STATE_QUEUED)
        if delivery.reason in REASONS:
            await self._drop(delivery, delivery.reason)
            return None
        policy = Policy(
            version=self._store.version,
            step=self._applied,
            step_of=self._store.step_of,
            max_staleness=self._recipe.trainer.max_staleness,
            vocab_size=self._learner.vocab_size,
        )
        try:
            if delivery.reason:
                raise Poison(f"a tombstone with the unknown reason {delivery.reason!r}")
            return admit(delivery.data, group_id=delivery.group_id, policy=policy)
        except Poison as error:
            structlog.get_logger().error(
                "poison in samples", group=delivery.group_id, why=str(error)
            )
            self._record.count("queue/dead_total")
            await self._queue.bury(delivery, reason=str(error), settings=self._recipe.queue)
            await self._drop(delivery, "poison")
        except Refused as error:
            await self._drop(delivery, str(error), error.samples)
        return None

    async def _drop(
        self, delivery: Delivery, reason: str, samples: tuple[TrainSample, ...] = ()
    ) -> None:
        await self._queue.settle([(delivery.entry_id, delivery.group_id)], step=self._step)
        self._settle_drop(delivery.group_id, reason, samples)

    def _settle_drop(
        self, group_id: str, reason: str, samples: tuple[TrainSample, ...] = ()
    ) -> None:
        given_up = self._dispatcher.drop(group_id, reason)
        self._held.pop(group_id, None)
        record_drop(self._record, reason, samples, given_up=given_up)
        state = metrics_pb2.GROUP_STATE_GIVEN_UP if given_up else metrics_pb2.GROUP_STATE_DROPPED
        self._event(group_id, state, reason=reason)
        self._room.set()

    async def _train(
        self, groups: list[AdmittedGroup], times: StepTimes, previous_s: float | None
    ) -> float:
        """One optimizer step on these groups, its version, and their settlement; when it ended.

        Recording what was measured belongs to the next step's time.
        """
        recipe, learner = self._recipe, self._learner
        skip = recipe.trainer.zero_signal == "skip"
        owned = [(g, s) for g in groups if not (skip and g.zero_signal) for s in g.samples]
        forwarded = [sample for _, sample in owned]
        begin_s = time.monotonic()
        plan = await self._torch(learner.plan, forwarded)
        rows = [[forwarded[index] for index in row] for row in plan.rows]
        for row in rows:
            await self._torch(learner.accumulate, row)
        result = await self._torch(learner.finish)
        times.fwd_s, times.fwd_bwd_s = result.fwd_s, result.fwd_bwd_s
        times.optimizer_s = result.optimizer_s
        # Planning, packing, and the way to the torch thread and back.
        computed_s = result.fwd_bwd_s + result.optimizer_s
        times.data_s += time.monotonic() - begin_s - computed_s
        self._totals.steps += 1
        self._applied += result.applied

        record_dropped_samples(self._record, "oversize", [forwarded[i] for i in plan.oversize])
        used = {owned[index][0].group_id for row in plan.rows for index in row}
        unused = {group.group_id for group, _ in owned} - used
        begin_s = time.monotonic()
        since = self._applied - self._store.step_of[self._store.version]
        if result.applied and since >= recipe.trainer.weight_sync_steps:
            await self._publish()
        times.weight_sync_s = time.monotonic() - begin_s
        pairs = [(self._held[g.group_id].entry_id, g.group_id) for g in groups]
        await self._queue.settle(pairs, step=self._step + 1)
        for group in groups:
            if group.group_id in unused:
                self._settle_drop(group.group_id, "oversize")
                continue
            self._dispatcher.train(group.group_id)
            self._held.pop(group.group_id)
            reason = "no signal" if skip and group.zero_signal else ""
            self._event(
                group.group_id, metrics_pb2.GROUP_STATE_TRAINED, step=self._step, reason=reason
            )
        self._room.set()

        ended_s = time.monotonic()
        if previous_s is not None:
            times.step_s = ended_s - previous_s
        trained_samples = sum(len(g.samples) for g in groups if g.group_id not in unused)
        self._totals.add(result, times, groups, trained_samples)
        record_step(
            self._record,
            recipe,
            step=self._step,
            result=result,
            plan=plan,
            rows=rows,
            groups=groups,
            times=times,
        )
        return ended_s

    # -- in the background

    async def _gauge(self) -> None:
        """Measure the streams every second, also during long steps."""
        while True:
            fills = await self._queue.gauge()
            outstanding = len(self._dispatcher.outstanding)
            record_queue(self._record, self._recipe, fills, outstanding=outstanding)
            await asyncio.sleep(GAUGE_EVERY_S)

    async def _reconcile(self) -> None:
        """Every minute, and when the server was away: find groups that it has lost, or that only
        it knows."""
        reconnects, next_s = self._queue.reconnects, time.monotonic() + RECONCILE_EVERY_S
        while True:
            await asyncio.sleep(min(1.0, RECONCILE_EVERY_S))
            if time.monotonic() < next_s and self._queue.reconnects == reconnects:
                continue
            reconnects, next_s = self._queue.reconnects, time.monotonic() + RECONCILE_EVERY_S
            # Groups on their way into the server's list or out of it are neither lost nor strange.
            before = set(self._dispatcher.outstanding) - self._dispatching - set(self._held)
            there = await self._queue.outstanding()
            for group_id in before - set(there):
                if group_id in self._dispatcher.outstanding and group_id not in self._held:
                    structlog.get_logger().warning("group lost by the queue server", group=group_id)
                    self._settle_drop(group_id, "lost")
            strangers = set(there) - set(self._dispatcher.outstanding) - self._dispatching
            if strangers:
                await self._queue.settle(
                    [("", group_id) for group_id in strangers], step=self._step
                )

    # -- the end

    async def _end(self) -> dict[str, Any]:
        """Settle what is left, empty the queue, keep the model, and report."""
        for group_id in list(self._dispatcher.outstanding):
            await self._queue.settle([("", group_id)], step=self._step)
            self._settle_drop(group_id, "run_ended")
        await self._queue.finish()
        self._lifecycle.enter("saving the model")
        await self._torch(self._learner.save, self._recipe.run_folder / "model")
        report = self._report()
        target = self._recipe.run_folder / "trainer.json"
        fresh = target.with_suffix(".tmp")
        fresh.write_text(json.dumps(report, indent=2) + "\n")
        fresh.rename(target)
        self._lifecycle.enter("complete")
        return report

    def _report(self) -> dict[str, Any]:
        book = self._dispatcher
        assert book.balances(), "dispatched = trained + dropped + given up + in flight"
        accuracies = [evaluation.accuracy for evaluation in self._evaluations]
        rewards = [evaluation.reward for evaluation in self._evaluations]
        return {
            **self._totals.summary(),
            "eval_before": accuracies[0] if accuracies else None,
            "eval_after": accuracies[-1] if accuracies else None,
            "eval_reward_before": rewards[0] if rewards else None,
            "eval_reward_after": rewards[-1] if rewards else None,
            "eval_failed": sum(evaluation.failed for evaluation in self._evaluations),
            "groups": {
                "dispatched": book.dispatched,
                "trained": book.trained,
                "rolled_back": 0,  # nothing is restored yet, so nothing can be rolled back
                "dropped": drop_reasons(book.dropped),
                "given_up": book.given_up,
                "in_flight": len(book.outstanding),
                "trained_twice": book.trained_twice,
            },
            "versions_published": self._store.published,
            "started": self._started.isoformat(),
            "finished": datetime.now(UTC).isoformat(),
        }

    def _event(
        self,
        group_id: str,
        state: "metrics_pb2.GroupState.ValueType",
        *,
        step: int | None = None,
        reason: str = "",
    ) -> None:
        self._record.event(
            metrics_pb2.GroupEvent(group_id=group_id, state=state, step=step, reason=reason)
        )
