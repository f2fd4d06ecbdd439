"""The trainer's book-keeping: each thing that happens to a group is noted in the dispatcher,
written to the journal, recorded as a metric, and then said to the ledger, in this order.

Terminal states are said by the trainer alone. Each checkpoint holds those since the one before, and
those of the last minutes, so that a start can say again what an aggregator may have missed.
"""

import asyncio
import time
from collections.abc import Iterable

from headrace.v1 import metrics_pb2 as wire

from services.common.recorder import Recorder
from services.trainer.dispatch import Dispatcher, Ticket
from services.trainer.journal import Journal, Record
from services.trainer.measure import record_drop
from services.trainer.types import TrainSample

STATE_OF = {
    "trained": wire.GROUP_STATE_TRAINED,
    "dropped": wire.GROUP_STATE_DROPPED,
    "given_up": wire.GROUP_STATE_GIVEN_UP,
    "rolled_back": wire.GROUP_STATE_ROLLED_BACK,
}
"""What the ledger hears of a record."""

SAID_AGAIN_S = 300.0
"""What was said within so long may still be on its way to an aggregator that was away."""


def say(recorder: Recorder, record: Record) -> None:
    """Tell the ledger how a group ended."""
    step = record.step if record.kind == "trained" else None
    recorder.event(
        wire.GroupEvent(
            group_id=record.group_id, state=STATE_OF[record.kind], step=step, reason=record.reason
        )
    )


class Book:
    """What became of the groups of this run."""

    def __init__(self, dispatcher: Dispatcher, journal: Journal, recorder: Recorder) -> None:
        self.dispatcher = dispatcher
        self.journal = journal
        self._recorder = recorder
        self.room = asyncio.Event()
        """Set when a group has left: another may be dispatched."""
        self._said: list[tuple[float, Record]] = []

    @property
    def outstanding(self) -> dict[str, Ticket]:
        """Groups between dispatch and settlement."""
        return self.dispatcher.outstanding

    def next_ticket(self) -> Ticket | None:
        """The next prompt to be dispatched, in the journal before the server hears of it."""
        ticket = self.dispatcher.next_ticket()
        if ticket is not None:
            self.journal.write(Record("dispatched", ticket.group_id))
        return ticket

    def dispatched(self, group_id: str, *, row_index: int) -> None:
        """The server has the group."""
        self._event(group_id, wire.GROUP_STATE_DISPATCHED, row_index=row_index)

    def queued(self, group_id: str) -> None:
        """The trainer has taken the group."""
        self._event(group_id, wire.GROUP_STATE_QUEUED)

    def trained(self, group_id: str, *, step: int, reason: str) -> None:
        """A step used the group, or skipped it for want of signal, and it is settled."""
        self.dispatcher.train(group_id)
        self._end(Record("trained", group_id, reason, step))

    def dropped(self, group_id: str, reason: str, samples: tuple[TrainSample, ...] = ()) -> None:
        """The group is settled, and not used."""
        given_up = self.dispatcher.drop(group_id, reason)
        record_drop(self._recorder, reason, samples, given_up=given_up)
        self._end(Record("given_up" if given_up else "dropped", group_id, reason))

    def closed_before(self, group_id: str, reason: str) -> None:
        """A group of an earlier attempt is over, and its prompt due."""
        self.dispatcher.close_before(group_id, reason)
        record_drop(self._recorder, reason, (), given_up=False)
        self._end(Record("dropped", group_id, reason))

    def adopted(self, group_id: str) -> bool:
        """An earlier attempt's group is this one's now; False when it is not needed."""
        known = group_id in self.dispatcher.open_before
        word = self.dispatcher.adopt(group_id)
        if word == "adopted" and not known:
            self.journal.write(Record("dispatched", group_id))
        if word == "duplicate":
            record_drop(self._recorder, word, (), given_up=False)
            self._end(Record("dropped", group_id, word))
        return word == "adopted"

    def found_again(self, group_id: str) -> bool:
        """A group that was lost is there; False when it is not needed any more."""
        found = self.dispatcher.find_again(group_id)
        if found:
            self.journal.write(Record("found", group_id))
        return found

    def say_again(self, records: Iterable[Record]) -> None:
        """Tell the ledger what became of groups before this attempt."""
        for record in records:
            self._said.append((time.monotonic(), record))
            self._say(record)

    @property
    def said(self) -> list[Record]:
        """Terminal states that the next checkpoint holds, oldest first."""
        return [record for _, record in self._said]

    def saved(self, number: int) -> None:
        """A checkpoint holds the first `number` of `said`: those that are old are let go."""
        recent_s = time.monotonic() - SAID_AGAIN_S
        self._said[:number] = [each for each in self._said[:number] if each[0] > recent_s]

    def _end(self, record: Record) -> None:
        self.journal.write(record)
        self._said.append((time.monotonic(), record))
        self._say(record)
        self.room.set()

    def _say(self, record: Record) -> None:
        say(self._recorder, record)

    def _event(
        self,
        group_id: str,
        state: wire.GroupState.ValueType,
        *,
        row_index: int = 0,
    ) -> None:
        self._recorder.event(wire.GroupEvent(group_id=group_id, state=state, row_index=row_index))
