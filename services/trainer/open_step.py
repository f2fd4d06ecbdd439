"""The open step: groups are taken from `samples` for it, admitted, or dropped with their reason.

While it waits for others, what has come is forwarded (forwarding.py). Taken groups are held until
the step that used them is settled; those that came while it waited for one about to be stale have
their seats in the steps after. What nobody waits for (a second entry of a group, one declared lost
that came after all, a stranger's) is removed.

waits_for: scored groups in `samples`. unblocked_by: generators and scorers.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence

import structlog

from services.common.config import Recipe
from services.common.recorder import Recorder
from services.trainer.book import Book
from services.trainer.dispatch import REASONS
from services.trainer.forwarding import Forwarding
from services.trainer.intake import AdmittedGroup, Poison, Policy, Refused, admit
from services.trainer.measure import StepTimes
from services.trainer.pace import LagAtBegin, began_of, last_step, may_sit
from services.trainer.run_queue import Delivery, RunQueue
from services.trainer.types import TrainSample

LOOK_EVERY_S = 1.0
"""While a step waits: how often it is seen which groups have begun since."""


class Intake:
    """Takes groups for the step that `number` says."""

    def __init__(
        self,
        recipe: Recipe,
        queue: RunQueue,
        book: Book,
        recorder: Recorder,
        policy: Callable[[], Policy],
    ) -> None:
        self._recipe, self._queue, self._book, self._record = recipe, queue, book, recorder
        self._policy = policy
        self.number = 0
        """Of the open step."""
        self.held: dict[str, Delivery] = {}
        """Entries taken and not settled yet, by group."""
        self._waiting: list[str] = []
        """Of them, those that have no seat in a step yet."""
        self._began: dict[str, int] = {}
        self._looked_s = -math.inf
        self._lag = LagAtBegin(recipe.trainer.groups_per_step)

    async def fill(self, times: StepTimes, forwarding: Forwarding) -> list[AdmittedGroup]:
        """Groups for the open step: as many as a step has, or as are left. Those that have come are
        given to `forwarding`, and it forwards what it can before others are waited for.

        With `trainer.stale = "wait"` seats are kept for groups that would be stale in a later step
        (see pace.py). While it waits for them, others that come are held for the steps after.

        With `trainer.refill` a group without signal takes no seat, within `trainer.max_refill`.
        """
        groups: list[AdmittedGroup] = []
        overdue = False
        await self._look(times)
        while True:
            begin_s = time.monotonic()
            wanted = self._wanted()
            while len(groups) < wanted:
                group_id = self._next(seats=wanted - len(groups), overdue=overdue)
                if group_id is None:
                    break
                self._waiting.remove(group_id)
                if group := await self._admit(self.held[group_id]):
                    groups.append(group)
                    self._refill(groups)
                    forwarding.add(group)
                wanted = self._wanted()
            times.data_s += time.monotonic() - begin_s
            if len(groups) >= wanted:
                return groups
            if await forwarding.forward_ready():
                if time.monotonic() - self._looked_s >= LOOK_EVERY_S:
                    await self._look(times)
                continue
            late = len(groups) + len(self._waiting) >= wanted
            if late and not overdue and times.straggler_wait_s >= self._recipe.trainer.overdue_s:
                overdue = True
                structlog.get_logger().warning(
                    "went on without groups that are about to be stale",
                    step=self.number,
                    waited_s=round(times.straggler_wait_s, 1),
                )
                continue
            await self._take(wanted - len(groups), times, late=late)

    def may_dispatch(self) -> bool:
        """Whether a group that is dispatched now can still be admitted in time, beside all others.

        It can be fewer than the bound on their number: generators load a version some time after
        it is published, and what they begin until then is as old as the one before.
        """
        trainer, outstanding = self._recipe.trainer, self._book.outstanding
        full = trainer.groups_per_step + self._book.dispatcher.refilling
        if trainer.stale == "drop" or len(outstanding) < full:
            return True
        lasts = self._last_steps(outstanding.keys())
        new = self._last_step_of_new()
        before = sum(step is not None and 0 < step <= new for step in lasts.values())
        seats = self._wanted() - (len(self.held) - len(self._waiting))
        return before < seats + trainer.groups_per_step * (new - 1)

    def dispatched(self, group_id: str) -> None:
        """A group is on its way to the generators."""
        if self._recipe.trainer.stale == "wait":
            self._lag.dispatched(group_id, at=self._policy())

    def _last_step_of_new(self) -> int:
        """Of a group that nobody has begun yet."""
        every = self._recipe.trainer.weight_sync_steps
        current = last_step(None, policy=self._policy(), weight_sync_steps=every)
        assert current is not None
        return max(1, current - self._lag.usual * every)

    def _last_steps(self, group_ids: Iterable[str]) -> dict[str, int | None]:
        """The last step that can admit each of these, but for those that have their seat."""
        seated, policy = self.held.keys() - set(self._waiting), self._policy()
        every = self._recipe.trainer.weight_sync_steps
        # By version, of which there are few: this is asked for every seat and every dispatch.
        of_version: dict[int | None, int | None] = {
            began: last_step(began, policy=policy, weight_sync_steps=every)
            for began in set(self._began.values())
        }
        of_version[None] = self._last_step_of_new()
        return {
            group_id: of_version[self._began.get(group_id)]
            for group_id in group_ids
            if group_id not in seated
        }

    def _wanted(self) -> int:
        """Groups of the open step."""
        dispatcher = self._book.dispatcher
        remaining = dispatcher.remaining
        full = self._recipe.trainer.groups_per_step + dispatcher.refilling
        return full if remaining is None else min(full, remaining)

    def _refill(self, groups: Sequence[AdmittedGroup]) -> None:
        """Groups of the open step without signal have others in their place."""
        without = sum(group.zero_signal for group in groups)
        refilling = min(without, self._recipe.max_refill)
        if refilling > self._book.dispatcher.refilling:
            self._book.dispatcher.refilling = refilling
            self._book.room.set()

    async def _take(self, limit: int, times: StepTimes, *, late: bool) -> None:
        """Take entries, waiting about a second for one; what nobody waits for is removed, and
        tombstones are settled at once. `late`: only groups about to be stale are waited for."""
        begin_s = time.monotonic()
        deliveries = await self._queue.take(limit, wait=False)
        times.data_s += time.monotonic() - begin_s
        if not deliveries:
            begin_s = time.monotonic()
            deliveries = await self._queue.take(limit)
            if time.monotonic() - self._looked_s >= LOOK_EVERY_S:
                await self._look()
            waited_s = time.monotonic() - begin_s
            times.straggler_wait_s += waited_s if late else 0.0
            times.rollout_wait_s += 0.0 if late else waited_s
        begin_s = time.monotonic()
        # All are held before anything is awaited: what a settlement has taken out of the server's
        # list must not look lost.
        for delivery, mine in [(each, self._hold(each)) for each in deliveries]:
            if not mine:
                await self._not_mine(delivery)
            elif delivery.reason:
                await self._admit(delivery)
            else:
                self._waiting.append(delivery.group_id)
        times.data_s += time.monotonic() - begin_s

    async def _look(self, times: StepTimes | None = None) -> None:
        """See which groups have begun, and with which version."""
        if self._recipe.trainer.stale == "drop":
            return
        begin_s = time.monotonic()
        self._began = began_of(await self._queue.outstanding())
        outstanding = self._book.outstanding.keys()
        self._lag.seen(self._began, outstanding=outstanding, at=self._policy())
        self._looked_s = time.monotonic()
        self._book.room.set()
        if times is not None:
            times.data_s += self._looked_s - begin_s

    def _next(self, *, seats: int, overdue: bool) -> str | None:
        """Which of the groups at hand gets the next seat of the open step."""
        trainer, remaining = self._recipe.trainer, self._book.dispatcher.remaining
        if not self._waiting or trainer.stale == "drop":
            return next(iter(self._waiting), None)
        begun = self._began.keys() & self._book.outstanding.keys()
        last = self._last_steps(begun | set(self._waiting))
        first = min(self._waiting, key=lambda group_id: last[group_id] or 0)
        if overdue or (remaining is not None and remaining <= self._wanted()):
            return first  # nobody is waited for: there is no step after this one, or it is overdue
        others = [step for step in last.values() if step is not None and step > 0]
        groups_per_step = trainer.groups_per_step
        sits = may_sit(last[first], others, seats=seats, groups_per_step=groups_per_step)
        return first if sits else None

    async def settle(self, groups: Sequence[AdmittedGroup]) -> None:
        """Take the groups of the step out of the run; the next one is open then."""
        pairs = [(self.held[group.group_id].entry_id, group.group_id) for group in groups]
        await self._queue.settle(pairs, step=self.number + 1)

    def drop_settled(
        self, group_id: str, reason: str, samples: tuple[TrainSample, ...] = ()
    ) -> None:
        """A group that is settled was not used."""
        self.held.pop(group_id, None)
        self._book.dropped(group_id, reason, samples)

    def train_settled(self, group_id: str, *, reason: str) -> None:
        """A group that is settled was used by the step."""
        self.held.pop(group_id)
        self._book.trained(group_id, step=self.number, reason=reason)

    def _hold(self, delivery: Delivery) -> bool:
        """Whether the group is waited for, and this is its first entry."""
        if delivery.group_id not in self._book.outstanding:
            return False
        return self.held.setdefault(delivery.group_id, delivery) is delivery

    async def _not_mine(self, delivery: Delivery) -> None:
        """A second entry of a group, or one that no group waits for."""
        held = self.held.get(delivery.group_id)
        same = held is not None and held.entry_id == delivery.entry_id
        if held is None or (not same and await self._queue.has(held.entry_id)):
            await self._discard(delivery)
            return
        # The server went back to older data. Where the group was on its way, the entry that was
        # held is no more, and this one is to be settled in its place; where the group had come and
        # had not been read, this is the very entry.
        structlog.get_logger().warning("a held entry came again", group=delivery.group_id)
        self._record.count("queue/redelivered_total")
        self.held[delivery.group_id] = delivery

    async def _discard(self, delivery: Delivery) -> None:
        """Remove an entry that no group waits for."""
        group_id = delivery.group_id
        structlog.get_logger().warning("an entry that nobody waits for", group=group_id)
        self._record.count("queue/redelivered_total")
        if not group_id:
            self._record.count("queue/dead_total")
            await self._queue.bury(delivery, reason="no group id", settings=self._recipe.queue)
        settled = "" if group_id in self._book.outstanding else group_id
        await self._queue.settle([(delivery.entry_id, settled)], step=self.number)

    async def _admit(self, delivery: Delivery) -> AdmittedGroup | None:
        """A group for the open step; or it is settled as dropped, and None."""
        if delivery.wait_s is None:
            self._record.count("queue/bad_wait_total")
        elif not delivery.reason:  # a tombstone is no sample
            self._record.observe("sample/time_in_queue_s", delivery.wait_s)
        self._book.queued(delivery.group_id)
        if delivery.reason in REASONS:
            await self._drop(delivery, delivery.reason)
            return None
        try:
            if delivery.reason:
                raise Poison(f"a tombstone with the unknown reason {delivery.reason!r}")
            return admit(delivery.data, group_id=delivery.group_id, policy=self._policy())
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
        await self._queue.settle([(delivery.entry_id, delivery.group_id)], step=self.number)
        self.drop_settled(delivery.group_id, reason, samples)
