"""The run itself: dispatch, steps, versions, evaluations, checkpoints, from where the last attempt
left it to the report.

    past -> attempt -> restored weights published -> adopt, dispatch, steps -> the end

waits_for: scored groups in `samples`. unblocked_by: generators and scorers; a step never waits for
itself, since groups outstanding always cover at least one step.

A step is forwarded while its groups come (forwarding.py). Asked to stop, it is abandoned before its
weights are touched, or ended: nothing is settled of a step that was not applied.

Torch runs on one thread of its own; this coroutine only waits for it.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import structlog

from services.common import adapter_files
from services.common.background import guarded, unless
from services.common.config import Recipe
from services.common.errors import UserError
from services.common.lifecycle import Lifecycle
from services.common.readiness import ready_while
from services.common.recorder import Recorder
from services.trainer import dataset, past
from services.trainer.attempts import Attempts
from services.trainer.book import Book, say
from services.trainer.checkpoint import Checkpoints
from services.trainer.comparison import compare_for_ever
from services.trainer.evaluating import Evaluator
from services.trainer.evaluation import request_of
from services.trainer.forwarding import Forwarding
from services.trainer.intake import AdmittedGroup, Policy
from services.trainer.journal import Journal
from services.trainer.learner import Learner
from services.trainer.measure import StepTimes, record_dropped_samples, record_queue, record_step
from services.trainer.nccl import NcclTransport
from services.trainer.open_step import Intake
from services.trainer.policy import PolicyServicer, PolicyStore
from services.trainer.publishing import Publisher
from services.trainer.ranks import Place
from services.trainer.report import report
from services.trainer.resume import take_over
from services.trainer.run_queue import DISPATCHES, RunQueue
from services.trainer.saving import Saver
from services.trainer.torch_thread import TorchThread

GAUGE_EVERY_S = 1.0
"""How often the streams' fill is measured."""

STEP_ENDS_WITHIN_S = 10.0
"""What a step that is being computed gets to end, once the trainer is asked to stop; what it gets
from whoever asks is mostly 15 or 30 s, and the checkpoint needs some of it."""


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
        place: Place | None = None,
    ) -> None:
        self._recipe, self._lifecycle, self._record = recipe, lifecycle, recorder
        self._servicer, self._queue, self._torch = servicer, queue, TorchThread(torch_thread)
        self._at_exit, self._place = at_exit, place
        self._rows = dataset.load(recipe)
        self._checkpoints = Checkpoints(
            recipe.run_folder / "checkpoints", keep=recipe.checkpoint.keep
        )
        self._dispatching: set[str] = set()
        self._skips = recipe.zero_signal == "skip"
        self._clean = True
        """False while weights and book may not belong together."""

    async def run(self) -> dict[str, Any] | None:
        """Train to the end; the report. None when asked to stop before: the next start goes on
        from the checkpoint written then."""
        recipe = self._recipe
        known = past.know(recipe, self._checkpoints.folder)
        self._lifecycle.enter("looking for a checkpoint")
        self._past = await asyncio.to_thread(past.read, recipe, self._checkpoints, self._rows)
        self._totals = self._past.totals
        over = past.report_of(recipe)
        if over is not None and self._past.dispatcher.remaining == 0:
            return await self._stay_complete(over)
        past.report_path(recipe).unlink(missing_ok=True)
        await self._load()
        places = await self._begin_attempt(known=known)
        await self._open_store(self._queue.attempt)
        await self._resume(places)
        whole = guarded(self._course(), self._gauge(), self._publisher.prove_late())
        return await self._end() if await whole else None

    async def _stay_complete(self, over: dict[str, Any]) -> dict[str, Any]:
        """The run is over: nothing is trained, dispatched or published; what it came to is served
        under its own version, by a trainer that stays up. How the last groups ended is said again:
        an aggregator that was away at the end may have missed it."""
        for record in (*self._past.said, *self._past.ended):
            say(self._record, record)
        if not self._recipe.trainer.exit_when_done and self._past.line.current:
            await self._load()
            await self._open_store(self._past.last_attempt)
            await self._publisher.publish(again=self._past.line.current)
            await self._lifecycle.set_ready(True)
            proving = asyncio.create_task(self._publisher.prove_late())
            self._at_exit.callback(proving.cancel)
        self._lifecycle.enter("complete")
        return over

    # -- the beginning

    async def _load(self) -> None:
        """The model, with the checkpoint's weights where there is one."""
        self._lifecycle.enter("loading the model")
        self._learner = await self._torch(Learner, self._recipe, self._place)
        if self._servicer.group is not None:
            self._servicer.group.open(NcclTransport(self._learner.device))
        self._lifecycle.details["rows"] = self._learner.rows
        if self._past.checkpoint is not None:
            self._lifecycle.enter(f"restoring step {self._past.checkpoint.step}")
            await self._torch(self._learner.restore, self._past.checkpoint.folder)

    async def _begin_attempt(self, *, known: bool) -> dict[str, str]:
        """Fix the attempt, durably; the groups that the server holds."""
        attempts, began = Attempts(self._checkpoints.folder), self._past.open_step
        try:
            attempt, places = await self._queue.start(
                floor=attempts.highest() + 1,
                recipe=self._recipe.identity(),
                step=began,
                mode="again" if known else "first",
            )
        except UserError:
            if not known:
                past.forget(self._checkpoints.folder)
            raise
        attempts.begin(attempt)
        self._record.set_clock(attempt=attempt, step=began)
        self._lifecycle.details["attempt"] = str(attempt)
        return places

    async def _open_store(self, attempt: int) -> None:
        self._store = PolicyStore(
            checkpoints=self._checkpoints.folder,
            attempt=attempt,
            vocab_size=self._learner.vocab_size,
            max_staleness=self._recipe.trainer.max_staleness,
            line=self._past.line,
            group=self._servicer.group,
        )
        self._at_exit.callback(self._store.close)  # after the run: the final version stays served
        self._publisher = Publisher(
            self._learner,
            self._store,
            self._servicer,
            self._torch,
            self._lifecycle,
            self._record,
        )
        self._at_exit.callback(self._publisher.close)
        more = {}
        if self._learner.publishes_adapters:
            self._lifecycle.enter("writing the frozen weights")
            await self._torch(self._learner.write_weights, self._store.base_path, "base")
            base = await self._store.keep_base()
            config = self._learner.adapter_config()
            more = {adapter_files.CONFIG: config, adapter_files.BASE: base.to_json()}
        self._servicer.open(self._store, self._learner.folder, more)

    async def _resume(self, places: dict[str, str]) -> None:
        """Go on with the book of the attempts before: say again how groups ended, adopt those on
        the server."""
        before, attempt = self._past, self._queue.attempt
        before.dispatcher.attempt = attempt
        journal = Journal(self._checkpoints.journal, moment=(attempt, self._totals.steps))
        self._at_exit.callback(journal.close)
        self._book = Book(before.dispatcher, journal, self._record)
        self._book.say_again([*before.said, *before.ended])
        unwanted = take_over(
            self._book, places, versions=before.line.step_of.keys(), ended=before.ended
        )
        await self._queue.settle([("", group_id) for group_id in unwanted], step=before.open_step)
        self._intake = Intake(self._recipe, self._queue, self._book, self._record, self._policy)
        self._evaluator = Evaluator(
            self._recipe,
            self._rows.evaluation,
            self._queue,
            self._store,
            self._servicer,
            self._lifecycle,
            self._record,
            done=before.evaluations,
        )
        self._saver = Saver(
            self._checkpoints,
            self._book,
            self._learner,
            self._torch,
            self._lifecycle,
            self._record,
            last=None if before.checkpoint is None else before.checkpoint.moment,
        )
        if before.last_attempt:
            structlog.get_logger().info(
                "resumed",
                attempt=attempt,
                step=self._totals.steps,
                adopted=len(self._book.outstanding),
                rolled_back=sum(record.kind == "rolled_back" for record in before.ended),
            )

    # -- the course

    async def _course(self) -> bool:
        """Everything from the first version to the end; False when asked to stop before."""
        await self._publisher.publish()
        ready = ready_while(self._lifecycle, lambda: not self._queue.away)
        return await guarded(self._learning(), ready)

    async def _learning(self) -> bool:
        """Evaluations, steps, checkpoints; False when asked to stop before the end."""
        if self._totals.steps == 0 and self._evaluator.due(0) and await self._evaluate() is None:
            return False
        comparing = compare_for_ever(
            self._queue, self._book, on_the_way=self._on_the_way, step=lambda: self._intake.number
        )
        dispatching = (self._dispatch() for _ in range(DISPATCHES))
        if not await guarded(self._steps(), comparing, *dispatching):
            await self._save_at_stop()
            return False
        if self._publisher.steps_behind:
            await self._publisher.publish()
        await self._save()
        await self._saver.finish()
        due = self._evaluator.due_at_end(self._totals.steps)
        return not due or await self._evaluate() is not None

    async def _evaluate(self) -> float | None:
        """Evaluate the current version; the seconds that the trainer was held, None when asked to
        stop before it is done."""
        evaluating = self._evaluator.evaluate(self._totals.steps)
        return await unless(self._lifecycle.stopping, evaluating)

    async def _dispatch(self) -> None:
        """Keep as many groups outstanding as pacing allows; one of DISPATCHES that do so."""
        while True:
            ticket = None
            if len(self._book.outstanding) < self._bound and self._intake.may_dispatch():
                ticket = self._book.next_ticket()
            if ticket is None:
                self._book.room.clear()
                await self._book.room.wait()
                continue
            self._dispatching.add(ticket.group_id)
            self._intake.dispatched(ticket.group_id)
            row = self._rows.training[ticket.row]
            request = request_of(
                row, group_id=ticket.group_id, recipe=self._recipe, evaluation=False
            )
            await self._queue.dispatch(ticket.group_id, request.SerializeToString())
            self._dispatching.discard(ticket.group_id)
            self._book.dispatched(ticket.group_id, row_index=row.index)

    # -- steps

    async def _steps(self) -> bool:
        """All optimizer steps; False when asked to stop before the last."""
        lifecycle, stopping = self._lifecycle, self._lifecycle.stopping
        previous_s: float | None = None
        times = StepTimes()
        every_steps = self._recipe.checkpoint.every_steps
        while self._book.dispatcher.remaining != 0:
            if self._evaluator.due(self._totals.steps):
                held_s = await self._evaluate()
                if held_s is None:
                    return False
                times.eval_s = held_s
            if previous_s is not None and self._totals.steps % every_steps == 0:
                times.checkpoint_s = await self._save()
            self._intake.number = self._totals.steps + 1
            lifecycle.details.update(
                step=str(self._intake.number), max_steps=str(self._recipe.trainer.max_steps or "")
            )
            self._record.set_clock(attempt=self._queue.attempt, step=self._intake.number)
            if previous_s is None:
                await self._queue.settle([], step=self._intake.number)
            lifecycle.enter("training")
            forwarding = Forwarding(
                self._learner, self._torch, times, skips_zero_signal=self._skips
            )
            groups = await unless(stopping, self._intake.fill(times, forwarding))
            if groups is None:
                return False
            if not groups:  # all that was left has been given up
                continue
            step = self._train(groups, forwarding, times, previous_s)
            ended_s = await unless(stopping, step, grace_s=STEP_ENDS_WITHIN_S)
            if stopping.is_set():
                return False
            previous_s, times = ended_s, StepTimes()
        # What comes now is no part of the last step: its time has been recorded.
        self._record.set_clock(attempt=self._queue.attempt, step=self._totals.steps + 1)
        return True

    async def _train(
        self,
        groups: list[AdmittedGroup],
        forwarding: Forwarding,
        times: StepTimes,
        previous_s: float | None,
    ) -> float:
        """One optimizer step on these groups, its version, and their settlement; when it ended.

        Recording what was measured belongs to the next step's time.
        """
        recipe, intake = self._recipe, self._intake
        plan = await forwarding.forward_rest()
        self._clean = False
        result = await forwarding.finish()
        self._totals.steps += 1

        begin_s = time.monotonic()
        if result.applied and self._publisher.steps_behind >= recipe.trainer.weight_sync_steps:
            await self._publisher.publish()
        times.weight_sync_s = time.monotonic() - begin_s
        await intake.settle(groups)
        unused = forwarding.unused
        for group in groups:
            if group.group_id in unused:
                intake.drop_settled(group.group_id, "oversize")
                continue
            reason = "no signal" if self._skips and group.zero_signal else ""
            intake.train_settled(group.group_id, reason=reason)
        self._book.dispatcher.step_ended(len(groups), seats=recipe.trainer.groups_per_step)
        self._clean = True

        ended_s = time.monotonic()
        if previous_s is not None:
            times.step_s = ended_s - previous_s
        samples = forwarding.samples
        self._totals.add(result, times, groups)
        record_dropped_samples(self._record, "oversize", [samples[i] for i in plan.oversize])
        record_step(
            self._record,
            recipe,
            step=intake.number,
            result=result,
            plan=plan,
            samples=samples,
            groups=groups,
            times=times,
            peak_flops=self._learner.peak_flops,
        )
        return ended_s

    def _policy(self) -> Policy:
        return Policy(
            version=self._store.version,
            step=self._learner.num_applied,
            step_of=self._store.step_of,
            publishes_of=self._store.line.publishes_of,
            max_staleness=self._recipe.trainer.max_staleness,
            vocab_size=self._learner.vocab_size,
        )

    # -- checkpoints

    async def _save(self) -> float:
        moment = (self._queue.attempt, self._totals.steps)
        held_s = await self._saver.save(moment, self._state)
        self._record.observe("perf/checkpoint_s", held_s, step=self._totals.steps + 1)
        return held_s

    async def _save_at_stop(self) -> None:
        """Keep what was trained since the last checkpoint; should the grace be over before it is
        written, that one is what the next start finds."""
        self._lifecycle.enter("writing a checkpoint")
        steps = 0 if self._saver.last is None else self._saver.last[1]
        if self._clean and self._totals.steps > steps:
            await self._torch(self._learner.abandon)
            await self._save()
        await self._saver.finish()

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors and what was said."""
        rows = self._rows
        data = {"num_rows": len(rows.training), "shuffle": rows.shuffle, "seed": rows.seed}
        return {
            "run": self._recipe.run,
            "data": data,
            "book": self._book.dispatcher.state(),
            "line": self._store.line.state(),
            "totals": self._totals.state(),
            "evaluations": [asdict(evaluation) for evaluation in self._evaluator.done],
            "started": self._past.started,
        }

    # -- in the background

    async def _gauge(self) -> None:
        """Measure the streams every second, also during long steps, and see whose run it is."""
        while True:
            await self._queue.check()
            fills = await self._queue.gauge()
            outstanding = len(self._book.outstanding)
            record_queue(
                self._record, self._recipe, fills, outstanding=outstanding, bound=self._bound
            )
            await asyncio.sleep(GAUGE_EVERY_S)

    @property
    def _bound(self) -> int:
        """Groups between dispatch and settlement, at most."""
        return self._recipe.max_outstanding + self._book.dispatcher.refilling

    def _on_the_way(self) -> set[str]:
        return self._dispatching | set(self._intake.held)

    # -- the end

    async def _end(self) -> dict[str, Any]:
        """Settle what is left, empty the queue, keep the model, and report."""
        for group_id in list(self._book.outstanding):
            await self._queue.settle([("", group_id)], step=self._intake.number)
            self._intake.drop_settled(group_id, "run_ended")
        await self._queue.finish()
        self._lifecycle.enter("saving the model")
        await self._torch(self._learner.save, self._recipe.run_folder / "model")
        made = report(
            self._book.dispatcher,
            self._totals,
            self._evaluator.done,
            versions=self._store.version,
            attempts=self._queue.attempt,
            started=self._past.started,
        )
        past.write_json(past.report_path(self._recipe), made)
        await self._lifecycle.set_ready(True)
        self._lifecycle.enter("complete")
        return made
