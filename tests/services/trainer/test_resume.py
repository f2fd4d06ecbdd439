"""What a new attempt makes of the old one's checkpoint, journal and groups on the server: pure but
for the journal on disk."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from headrace.v1 import metrics_pb2 as wire
from hypothesis import given
from hypothesis import strategies as st

from services.common.config import Recorder as RecorderSettings
from services.common.recorder import Recorder
from services.trainer.book import Book
from services.trainer.dispatch import Dispatcher
from services.trainer.journal import Journal, Record, records_since
from services.trainer.resume import replay, take_over

NEVER_BEGUN, SCORED = "requests:trainer:1||", "samples:s:1|1|"
GENERATING = "requests:trainer:1|1|g:1"
"""Places on the server."""


class Run:
    """The book of a run over its attempts, with a server that is a dict."""

    def __init__(self, folder: Path, *, num_rows: int = 8, **limits: Any) -> None:
        self.folder, self._num_rows = folder, num_rows
        tries = {"max_tries": 3, "max_stale_tries": 8}
        self._limits: dict[str, Any] = {"epochs": 1.0, "max_groups": None, **tries, **limits}
        self.server: dict[str, str] = {}
        self.checkpoint: dict[str, Any] | None = None
        self.moment = (0, 0)
        self.attempt = 0
        self.trained: list[tuple[int, int]] = []
        """Prompts that the present weights come from."""
        self._trained_then: list[tuple[int, int]] = []
        self.unwanted: list[str] = []
        self.ledger: dict[str, int] = {}
        """The highest state that an aggregator heard of each group."""
        self._said_then: list[Record] = []
        self.start()

    def start(self, versions: tuple[int, ...] = (1,), *, unheard: int = 0) -> None:
        """Begin the next attempt, whatever became of the last, whose `unheard` last events died
        with it."""
        if self.attempt:
            self.hear(unheard)
        self.attempt += 1
        self.trained = list(self._trained_then)
        dispatcher = Dispatcher(
            order=lambda epoch: range(self._num_rows),
            num_rows=self._num_rows,
            attempt=self.attempt,
            state=self.checkpoint,
            **self._limits,
        )
        ended = replay(dispatcher, records_since(self.folder, self.moment))
        journal = Journal(self.folder, moment=(self.attempt, self.moment[1]))
        self.recorder = Recorder(
            run="r", producer="t", service="trainer", settings=RecorderSettings(), channel=None
        )
        self.book = Book(dispatcher, journal, self.recorder)
        self.book.say_again(self._said_then)
        self._said_first = len(self.recorder._events)
        self.book.say_again(ended)
        self.unwanted = take_over(self.book, self.server, versions=set(versions), ended=ended)
        for group_id in self.unwanted:
            del self.server[group_id]
        assert dispatcher.open_before == set()
        assert dispatcher.balances()

    def hear(self, unheard: int = 0) -> None:
        """What the present attempt has said reaches the aggregator, but for the last events."""
        events = list(self.recorder._events)
        for event in events[: len(events) - unheard]:
            before = self.ledger.get(event.group_id, 0)
            self.ledger[event.group_id] = max(before, event.state)

    def dispatch(self, number: int = 1, place: str = NEVER_BEGUN) -> list[str]:
        tickets = [self.book.next_ticket() for _ in range(number)]
        ids = [ticket.group_id for ticket in tickets if ticket is not None]
        for group_id in ids:
            self.book.dispatched(group_id, row_index=0)
        self.server.update(dict.fromkeys(ids, place))
        return ids

    def train(self, *group_ids: str, step: int = 1) -> None:
        for group_id in group_ids:
            self.server.pop(group_id, None)
            prompt = self.book.outstanding[group_id].prompt
            assert prompt not in self.trained
            self.trained.append(prompt)
            self.book.trained(group_id, step=step, reason="")

    def drop(self, group_id: str, reason: str) -> None:
        self.server.pop(group_id, None)
        self.book.dropped(group_id, reason)

    def save(self, step: int) -> None:
        self.moment = (self.attempt, step)
        self.book.journal.rotate(self.moment)
        self.checkpoint = json.loads(json.dumps(self.book.dispatcher.state()))
        self._said_then = self.book.said
        self.book.saved(len(self._said_then))
        self._trained_then = list(self.trained)

    def finish(self) -> None:
        """Train all that is left."""
        while self.book.dispatcher.remaining:
            self.dispatch(4)
            self.train(*sorted(self.book.outstanding)[:2])

    def said(self) -> Mapping[str, str]:
        """What this attempt said of the ends of groups, beyond what was said before the
        checkpoint."""
        return {
            event.group_id: wire.GroupState.Name(event.state).removeprefix("GROUP_STATE_").lower()
            + (f"({event.reason})" if event.reason else "")
            for event in list(self.recorder._events)[self._said_first :]
            if event.state >= wire.GROUP_STATE_TRAINED
        }


def pipeline(folder: Path) -> Run:
    """Prompts 0 to 7, two a step, generation four ahead: 0 and 1 trained, 2 and 3 scored and
    waiting, 4 and 5 in flight; then a checkpoint."""
    run = Run(folder)
    run.train(*run.dispatch(2))
    for place in (SCORED, SCORED, GENERATING, NEVER_BEGUN):
        run.dispatch(1, place)
    run.save(1)
    return run


def test_with_the_streams_kept_what_is_under_way_is_adopted(tmp_path: Path) -> None:
    """C38: next is what waits, then 6; nothing comes twice and nothing is skipped."""
    run = pipeline(tmp_path)
    run.start()
    assert sorted(run.book.outstanding) == [f"0.{n}.1.0" for n in (2, 3, 4, 5)]
    assert run.dispatch(9) == ["0.6.2.0", "0.7.2.0"]
    run.finish()
    assert sorted(run.trained) == [(0, n) for n in range(8)]
    assert run.book.dispatcher.dropped == {}
    assert run.book.dispatcher.dispatched == 8


def test_with_the_streams_lost_it_is_dispatched_again(tmp_path: Path) -> None:
    """C38: next are 2 and 3, not 4 or 6."""
    run = pipeline(tmp_path)
    run.server.clear()
    run.start()
    assert run.said() == {f"0.{n}.1.0": "dropped(attempt_ended)" for n in (2, 3, 4, 5)}
    assert run.dispatch(3) == ["0.2.2.0", "0.3.2.0", "0.4.2.0"]
    run.finish()
    assert sorted(run.trained) == [(0, n) for n in range(8)]
    assert run.book.dispatcher.dropped == {"attempt_ended": 4}
    assert run.book.dispatcher.dispatched == 12


def test_what_was_trained_behind_the_checkpoint_is_rolled_back(tmp_path: Path) -> None:
    run = pipeline(tmp_path)
    run.train("0.2.1.0", "0.3.1.0", step=2)
    [sixth] = run.dispatch(1)
    run.start()
    assert run.said() == {"0.2.1.0": "rolled_back", "0.3.1.0": "rolled_back"}
    assert sorted(run.book.outstanding) == ["0.4.1.0", "0.5.1.0", sixth]
    assert run.dispatch(2) == ["0.2.2.0", "0.3.2.0"]
    assert run.book.dispatcher.rolled_back == 2
    # Another death before the next checkpoint: they are said again, and counted once.
    run.start()
    assert run.said() == {"0.2.1.0": "rolled_back", "0.3.1.0": "rolled_back"}
    assert run.book.dispatcher.rolled_back == 2
    run.finish()
    assert sorted(run.trained) == [(0, n) for n in range(8)]


def test_groups_that_began_with_weights_of_a_dead_line_are_not_waited_for(tmp_path: Path) -> None:
    run = pipeline(tmp_path)
    [late] = run.dispatch(1, "groups:g:1|2|s:1")  # generated with version 2, behind the checkpoint
    run.start(versions=(1,))
    assert run.said() == {late: "dropped(dead_lineage)"}
    assert run.unwanted == [late]
    assert run.dispatch(1) == ["0.6.2.0"]


def test_a_second_group_of_a_prompt_is_a_duplicate(tmp_path: Path) -> None:
    """A server that went back has groups that were settled, or lost and dispatched again."""
    run = pipeline(tmp_path)
    run.drop("0.4.1.0", "lost")
    [again] = run.dispatch(1)
    assert again == "0.4.1.1"
    run.server |= {"0.0.1.0": SCORED, "0.4.1.0": GENERATING}
    run.start()
    assert run.unwanted == ["0.0.1.0", "0.4.1.0"]
    assert run.said() == {"0.4.1.0": "dropped(lost)"}
    assert sorted(run.book.outstanding) == ["0.2.1.0", "0.3.1.0", "0.4.1.1", "0.5.1.0"]
    # Two that were both open when their trainer died: its memory alone knew that one was lost.
    run.save(1)
    assert run.checkpoint is not None
    run.checkpoint["outstanding"].append("0.4.1.0")
    run.checkpoint["dispatched"] += 1
    run.server["0.4.1.0"] = GENERATING
    run.start()
    assert run.said() == {"0.4.1.0": "dropped(duplicate)"}
    run.finish()
    assert sorted(run.trained) == [(0, n) for n in range(8)]


def test_strangers_on_the_server_are_removed(tmp_path: Path) -> None:
    run = pipeline(tmp_path)
    strangers = ["7.7.7.7", "0.99.1.0", "0.6.2.0", "no id", "1.0.1.0"]
    run.server |= dict.fromkeys(strangers, NEVER_BEGUN)
    run.start()
    assert run.unwanted == strangers
    assert run.said() == {}


def test_a_group_of_which_a_machine_lost_the_journal_is_adopted_all_the_same(
    tmp_path: Path,
) -> None:
    run = pipeline(tmp_path)
    run.server["0.6.1.0"] = SCORED
    run.start()
    assert "0.6.1.0" in run.book.outstanding
    run.train("0.6.1.0")
    run.start()  # and it is in the journal from then on
    assert run.book.dispatcher.rolled_back == 1
    run.finish()
    assert sorted(run.trained) == [(0, n) for n in range(8)]


def test_tries_and_what_was_given_up_outlive_the_attempt(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rows=2, max_tries=3)
    [first] = run.dispatch(1)
    run.drop(first, "failed")
    run.save(0)
    [second] = run.dispatch(1)
    run.drop(second, "unscored")  # behind the checkpoint
    run.start()
    [third] = run.dispatch(1)
    assert third == "0.0.2.0"
    run.drop(third, "poison")
    assert run.book.dispatcher.given_up == 1
    run.start()
    assert run.said()[third] == "given_up(poison)"
    assert run.dispatch(5) == ["0.1.3.0"]
    run.finish()
    assert run.trained == [(0, 1)]


def test_a_group_that_was_lost_and_is_there_counts_again(tmp_path: Path) -> None:
    run = pipeline(tmp_path)
    run.drop("0.4.1.0", "lost")
    run.drop("0.5.1.0", "stale")
    assert run.book.found_again("0.4.1.0")
    assert not run.book.found_again("0.5.1.0")
    assert not run.book.found_again("0.0.1.0")
    assert run.book.dispatcher.dropped == {"lost": 0, "stale": 1}
    assert run.dispatch(2) == ["0.5.1.1", "0.6.1.0"]
    run.drop("0.3.1.0", "lost")
    assert run.dispatch(1) == ["0.3.1.1"]
    assert not run.book.found_again("0.3.1.0")  # its prompt has another
    run.server["0.4.1.0"] = GENERATING
    run.start()
    assert "0.4.1.0" in run.book.outstanding
    run.finish()
    assert sorted(run.trained) == [(0, n) for n in range(8)]


def test_a_longer_run_goes_on_where_the_shorter_one_ended(tmp_path: Path) -> None:
    """C37: ten groups are done; with a target of twenty exactly ten more are."""
    run = Run(tmp_path, num_rows=30, epochs=None, max_groups=10)
    run.finish()
    run.save(5)
    run.start()
    assert run.book.dispatcher.remaining == 0
    assert run.dispatch(5) == []
    run._limits["max_groups"] = 20
    run.start()
    assert run.book.dispatcher.remaining == 10
    run.finish()
    assert sorted(run.trained) == [(0, n) for n in range(20)]


def test_five_prompts_and_two_epochs_from_position_eight(tmp_path: Path) -> None:
    """C39: prompts 3 and 4 of the second pass, then the end."""
    run = Run(tmp_path, num_rows=5, epochs=2)
    run.train(*run.dispatch(8))
    run.save(4)
    run.start()
    assert run.dispatch(9) == ["1.3.2.0", "1.4.2.0"]
    assert run.book.dispatcher.remaining == 2


def test_a_shorter_run_is_over(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rows=5, epochs=2)
    run.train(*run.dispatch(8))
    run.save(4)
    run._limits["epochs"] = 1
    run.start()
    assert run.book.dispatcher.remaining == 0
    assert run.dispatch(1) == []


@given(data=st.data())
def test_whatever_dies_and_whatever_the_server_loses_each_prompt_is_trained_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """And what an aggregator has heard, with events that die unsent, accounts for every group."""
    epochs = data.draw(st.sampled_from([1, 1.5]))
    folder = tmp_path_factory.mktemp("journal")
    run = Run(folder, num_rows=4, max_tries=2, max_stale_tries=2, epochs=epochs)
    moves = st.sampled_from(["dispatch", "train", "drop", "save", "kill", "lose", "go back"])
    kept: dict[str, str] = {}
    for number in range(data.draw(st.integers(1, 40))):
        move, out = data.draw(moves), sorted(run.book.outstanding)
        if move == "dispatch":
            places = st.sampled_from([NEVER_BEGUN, GENERATING, SCORED])
            run.dispatch(data.draw(st.integers(1, 3)), data.draw(places))
        elif move in ("train", "drop") and out:
            chosen = data.draw(st.sampled_from(out))
            if move == "train":
                run.train(chosen, step=number)
            else:
                run.drop(chosen, data.draw(st.sampled_from(["stale", "failed", "lost"])))
        elif move == "save":
            run.save(number)
            kept = dict(run.server)
        elif move in ("kill", "lose", "go back"):
            run.server = {"kill": run.server, "lose": {}, "go back": dict(kept)}[move]
            run.start(unheard=data.draw(st.integers(0, 4)))
        assert run.book.dispatcher.balances()
        assert run.book.dispatcher.trained_twice == 0
    run.start()
    run.finish()
    run.hear()
    book = run.book.dispatcher
    prompts = {divmod(number, 4) for number in range(6 if epochs == 1.5 else 4)}
    assert len(set(run.trained)) == len(run.trained) == book.trained
    assert set(run.trained) <= prompts
    assert len(prompts - set(run.trained)) == book.given_up
    states = Counter(run.ledger.values())
    assert min(states, default=wire.GROUP_STATE_TRAINED) >= wire.GROUP_STATE_TRAINED
    assert states[wire.GROUP_STATE_TRAINED] == book.trained
    assert states[wire.GROUP_STATE_ROLLED_BACK] == book.rolled_back
    assert states[wire.GROUP_STATE_GIVEN_UP] == book.given_up
    assert states[wire.GROUP_STATE_DROPPED] == book.dropped.total()
