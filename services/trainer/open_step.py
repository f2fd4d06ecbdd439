"""The open step: groups are taken from `samples` for it, admitted, or dropped with their reason.

Taken groups are held until the step that used them is settled. What nobody waits for (a second
entry of a group, one declared lost that came after all, a stranger's) is removed.

waits_for: scored groups in `samples`. unblocked_by: generators and scorers.
"""

import time
from collections.abc import Callable, Sequence

import structlog

from services.common.config import Recipe
from services.common.recorder import Recorder
from services.trainer.book import Book
from services.trainer.dispatch import REASONS
from services.trainer.intake import AdmittedGroup, Poison, Policy, Refused, admit
from services.trainer.measure import StepTimes
from services.trainer.run_queue import Delivery, RunQueue
from services.trainer.types import TrainSample


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

    async def fill(self, times: StepTimes) -> list[AdmittedGroup]:
        """Groups for the open step: as many as a step has, or as are left."""
        groups: list[AdmittedGroup] = []
        while True:
            remaining = self._book.dispatcher.remaining
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
                    await self._not_mine(delivery)
                elif group := await self._admit(delivery):
                    groups.append(group)
            times.data_s += time.monotonic() - begin_s

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
        if held is None or await self._queue.has(held.entry_id):
            await self._discard(delivery)
            return
        # The server went back to older data, where the group was on its way: the entry that was
        # held is no more, and this one is to be settled in its place.
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
