"""The trainer's side of a transfer group: generators are calls, and communicators what a test
decides."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from services.trainer import weight_group as module
from services.trainer.weight_group import Place, State, WeightGroup
from services.trainer.weight_sending import Tensor, TransferFailed
from tests.services.generator.fakes import recorder, values
from tests.waiting import until

TIMEOUT_S = 60.0


@dataclass
class Line:
    """A communicator that keeps what is sent."""

    number: int
    world_size: int
    sent: list[torch.Tensor] = field(default_factory=list)
    finished: int = 0
    goes_on: threading.Event = field(default_factory=threading.Event)
    aborted: threading.Event = field(default_factory=threading.Event)

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        while not self.goes_on.wait(0.001):
            if self.aborted.is_set():
                raise TransferFailed("aborted")
        self.sent.extend(tensors)

    def finish(self) -> None:
        self.finished += 1

    def abort(self) -> None:
        self.aborted.set()


class Lines:
    """Makes them; the next connection fails by `failure`, and waits while `connects` is cleared."""

    def __init__(self) -> None:
        self.made: list[Line] = []
        self.failure: Exception | None = None
        self.connects = threading.Event()
        self.connects.set()
        self.stalled = False
        """Chunks of new lines wait."""

    def new_id(self) -> bytes:
        return b"%128d" % len(self.made)

    def connect(
        self, group_id: bytes, *, world_size: int, timeout_s: float, given_up: threading.Event
    ) -> Line:
        while not self.connects.wait(0.001):
            if given_up.is_set():
                raise TransferFailed("given up")
        if self.failure is not None:
            raise self.failure
        self.made.append(Line(int(group_id), world_size))
        if not self.stalled:
            self.made[-1].goes_on.set()
        return self.made[-1]


@dataclass
class House:
    """A group of two at most, and who is here."""

    group: WeightGroup
    lines: Lines
    here: set[str]
    recorder: Any
    path: Path

    def ask(self, name: str, *, num_workers: int = 1) -> "asyncio.Task[Place | None]":
        self.here.add(name)
        return asyncio.create_task(self.group.join(name, num_workers=num_workers))

    async def formed(self, *names: str) -> str:
        """A connected group of these; its id."""
        number = len(self.lines.made)
        places = await asyncio.gather(*(self.ask(name) for name in names))
        await until(lambda: len(self.lines.made) > number)
        await until(lambda: self.group._group is not None and self.group._group.communicator)
        assert places[0] is not None
        return places[0].group

    def begin(self, name: str, group: str, version: int) -> "asyncio.Task[Any]":
        return asyncio.create_task(self.group.begin(name, group=group, version=version))

    @property
    def failures(self) -> object:
        return values(self.recorder).get("policy/nccl_failed_total", 0)


@pytest_asyncio.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(module, "LOOK_S", 0.005)
    monkeypatch.setattr(module, "ABSENT_S", 0.05)
    monkeypatch.setattr(module, "REST_S", (0.0, 0.0))
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.arange(4.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}, path)
    here: set[str] = set()
    measured = recorder()
    group = WeightGroup(
        measured, replicas=2, timeout_s=TIMEOUT_S, present=here.__contains__, buffer_bytes=8
    )
    lines = Lines()
    group.open(lines)
    yield House(group, lines, here, measured, path)
    await group.close()


async def test_a_group_is_formed_when_all_are_there(house: House) -> None:
    first = house.ask("g-0", num_workers=2)
    await asyncio.sleep(0.02)
    assert house.group.members == frozenset()
    second = house.ask("g-1")
    one, two = await first, await second
    assert one is not None
    assert two is not None
    assert (one.world_size, one.rank_offset, two.rank_offset) == (4, 1, 3)
    assert (one.group, one.nccl_id, one.after_version) == (two.group, two.nccl_id, 0)
    assert house.group.members == {"g-0", "g-1"}
    await until(lambda: house.lines.made)
    assert house.lines.made[0].world_size == 4


async def test_who_comes_alone_is_told_to_ask_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.02)
    assert await house.ask("g-0") is None


async def test_those_that_are_there_do_not_wait_for_ever(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.02)
    monkeypatch.setattr(module, "GATHER_S", 0.05)
    place = None
    for _ in range(20):
        place = place or await house.ask("g-0")
    assert place is not None
    assert place.world_size == 2


async def test_before_it_is_open_there_is_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.02)
    group = WeightGroup(recorder(), replicas=1, timeout_s=1.0, present=lambda name: True)
    assert await group.join("g-0", num_workers=1) is None
    assert group.offer(1, tmp_path) == ("", False)


async def test_a_version_is_sent_when_all_are_ready(house: House) -> None:
    group_id = await house.formed("g-0", "g-1")
    assert house.group.offer(7, house.path) == (group_id, True)
    first = house.begin("g-0", group_id, 7)
    await asyncio.sleep(0.02)
    assert not first.done()
    assert house.lines.made[0].sent == []
    state, tensors = await house.begin("g-1", group_id, 7)
    assert (state, tensors) == (State.BEGUN, (await first)[1])
    # In the order of the file: as wide ones first, as safetensors writes them.
    assert set(tensors) == {Tensor("a", "float32", (4,)), Tensor("b", "bfloat16", (2, 3))}
    [line] = house.lines.made
    await until(lambda: line.finished)
    assert [list(each.shape) for each in line.sent] == [list(each.shape) for each in tensors]
    await until(lambda: "perf/weight_broadcast_s" in values(house.recorder))
    assert house.failures == 0

    assert house.group.offer(8, house.path) == (group_id, True)
    both = [house.begin(name, group_id, 8) for name in ("g-0", "g-1")]
    assert [(await each)[0] for each in both] == [State.BEGUN, State.BEGUN]


async def test_versions_of_a_group_that_still_connects_are_fetched(house: House) -> None:
    house.lines.connects.clear()
    places = await asyncio.gather(house.ask("g-0"), house.ask("g-1"))
    assert places[0] is not None
    assert house.group.offer(3, house.path) == (places[0].group, False)
    house.lines.connects.set()
    await until(lambda: house.lines.made)
    await until(lambda: house.group._group is not None and house.group._group.communicator)
    assert house.group.offer(4, house.path) == (places[0].group, True)


async def test_a_newer_version_overtakes_one_that_is_waited_for(house: House) -> None:
    group_id = await house.formed("g-0", "g-1")
    house.group.offer(1, house.path)
    first = house.begin("g-0", group_id, 1)
    await asyncio.sleep(0.02)
    house.group.offer(2, house.path)
    assert (await first)[0] is State.OVERTAKEN
    # The other has not heard of the second yet.
    assert (await house.begin("g-1", group_id, 1))[0] is State.OVERTAKEN
    both = [house.begin(name, group_id, 2) for name in ("g-0", "g-1")]
    assert [(await each)[0] for each in both] == [State.BEGUN, State.BEGUN]
    await until(lambda: house.lines.made[0].finished)
    assert house.lines.made[0].finished == 1
    assert house.failures == 0


async def test_a_version_that_comes_within_a_broadcast_is_sent_behind_it(house: House) -> None:
    house.lines.stalled = True
    group_id = await house.formed("g-0", "g-1")
    house.group.offer(1, house.path)
    both = [house.begin(name, group_id, 1) for name in ("g-0", "g-1")]
    await asyncio.gather(*both)
    house.group.offer(2, house.path)
    house.lines.made[0].goes_on.set()
    both = [house.begin(name, group_id, 2) for name in ("g-0", "g-1")]
    assert [(await each)[0] for each in both] == [State.BEGUN, State.BEGUN]
    await until(lambda: house.lines.made[0].finished == 2)


async def test_a_member_that_is_not_ready_in_time_ends_the_group(house: House) -> None:
    group_id = await house.formed("g-0", "g-1")
    house.group.timeout_s = 0.1
    house.group.offer(1, house.path)
    state, _ = await house.begin("g-0", group_id, 1)
    assert state is State.OVER
    assert house.failures == 1
    assert house.group.members == frozenset()
    await until(lambda: house.lines.made[0].aborted.is_set())
    assert (await house.begin("g-1", group_id, 1))[0] is State.OVER


async def test_a_member_that_is_gone_while_others_wait_ends_the_group(house: House) -> None:
    """Sooner than its time is over."""
    group_id = await house.formed("g-0", "g-1")
    house.group.offer(1, house.path)
    first = house.begin("g-0", group_id, 1)
    house.here.discard("g-1")
    assert (await first)[0] is State.OVER
    assert house.failures == 1


async def test_a_watch_that_is_opened_anew_is_no_loss(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ABSENT_S", 60.0)
    group_id = await house.formed("g-0", "g-1")
    house.group.offer(1, house.path)
    first = house.begin("g-0", group_id, 1)
    house.here.discard("g-1")
    await asyncio.sleep(10 * module.LOOK_S)
    house.here.add("g-1")
    assert (await house.begin("g-1", group_id, 1))[0] is State.BEGUN
    assert (await first)[0] is State.BEGUN


async def test_a_member_that_is_gone_at_a_publish_ends_the_group(house: House) -> None:
    group_id = await house.formed("g-0", "g-1")
    house.here.discard("g-1")
    assert house.group.offer(1, house.path) == ("", False)
    assert (await house.begin("g-0", group_id, 1))[0] is State.OVER
    assert house.failures == 1


async def test_a_member_that_is_lost_within_a_broadcast_ends_it(house: House) -> None:
    house.lines.stalled = True
    group_id = await house.formed("g-0", "g-1")
    house.group.offer(1, house.path)
    await asyncio.gather(*(house.begin(name, group_id, 1) for name in ("g-0", "g-1")))
    house.here.discard("g-0")
    [line] = house.lines.made
    await until(line.aborted.is_set)
    assert (house.failures, house.group.members) == (1, frozenset())
    assert "perf/weight_broadcast_s" not in values(house.recorder)


async def test_a_member_that_asks_for_a_place_has_left_its_group(house: House) -> None:
    """And the broadcast to it ends at once."""
    house.lines.stalled = True
    group_id = await house.formed("g-0", "g-1")
    house.group.offer(1, house.path)
    await asyncio.gather(*(house.begin(name, group_id, 1) for name in ("g-0", "g-1")))
    again = house.ask("g-1")
    await until(house.lines.made[0].aborted.is_set)
    assert house.failures == 1
    # Both are there: there is a new group.
    other = await house.ask("g-0")
    assert other is not None
    assert other.group != group_id
    assert (await again) is not None


async def test_a_newcomer_of_a_full_group_takes_the_place_of_who_is_lost(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.02)
    group_id = await house.formed("g-0", "g-1")
    assert await house.ask("g-2") is None
    assert house.group.offer(1, house.path) == (group_id, True)
    assert (await house.begin("g-2", group_id, 1))[0] is State.OVER
    assert house.group.members == {"g-0", "g-1"}
    house.here.discard("g-1")
    house.group.offer(2, house.path)
    monkeypatch.setattr(module, "ASK_S", 10.0)
    await asyncio.gather(house.ask("g-2"), house.ask("g-0"))
    assert house.group.members == {"g-0", "g-2"}


async def test_a_smaller_group_ends_at_a_publish_for_a_larger_one(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GATHER_S", 0.0)
    group_id = await house.formed("g-0")
    monkeypatch.setattr(module, "GATHER_S", 60.0)
    newcomer = house.ask("g-1")
    await asyncio.sleep(0.02)
    assert house.group.members == {"g-0"}
    assert house.group.offer(1, house.path) == ("", False)
    assert house.failures == 0
    place = await house.ask("g-0")
    assert place is not None
    assert place.group != group_id
    assert place.after_version == 1
    assert (await newcomer) is not None
    assert house.group.members == {"g-0", "g-1"}


async def test_a_group_that_does_not_connect_is_over(house: House) -> None:
    house.lines.failure = TransferFailed("nobody came")
    places = await asyncio.gather(house.ask("g-0"), house.ask("g-1"))
    assert places[0] is not None
    await until(lambda: house.failures == 1)
    assert house.group.offer(1, house.path) == ("", False)


async def test_after_a_failure_there_is_no_group_for_a_while(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each forming pauses all engines; one that always fails would do so without end."""
    monkeypatch.setattr(module, "REST_S", (30.0, 100.0))
    monkeypatch.setattr(module, "ASK_S", 0.02)
    house.lines.failure = TransferFailed("nobody came")
    rests: list[float] = []
    for _ in range(3):
        house.group._not_before_s = 0.0
        await asyncio.gather(house.ask("g-0"), house.ask("g-1"))
        await until(lambda: house.failures == len(rests) + 1)
        rests.append(house.group._rest_s)
        for place in await asyncio.gather(house.ask("g-0"), house.ask("g-1")):
            assert place is None
    assert rests == [30.0, 60.0, 100.0]


async def test_what_is_no_failure_of_a_group_ends_the_run(house: House) -> None:
    house.lines.failure = KeyError("a mistake of ours")
    await asyncio.gather(house.ask("g-0"), house.ask("g-1"))
    await until(lambda: house.group._group is not None and house.group._group.task is not None)
    await until(lambda: house.group._group.task.done())  # type: ignore[union-attr]
    with pytest.raises(KeyError, match="a mistake of ours"):
        house.group.offer(1, house.path)


async def test_a_member_out_of_turn_ends_the_group(house: House) -> None:
    """It was not there when the version was sent: nobody would send it again."""
    group_id = await house.formed("g-0", "g-1")
    house.group.offer(1, house.path)
    await asyncio.gather(*(house.begin(name, group_id, 1) for name in ("g-0", "g-1")))
    await until(lambda: house.lines.made[0].finished)
    assert (await house.begin("g-0", group_id, 1))[0] is State.OVER
    assert house.failures == 1


async def test_closing_ends_what_is_sent(house: House) -> None:
    house.lines.stalled = True
    group_id = await house.formed("g-0", "g-1")
    house.group.offer(1, house.path)
    await asyncio.gather(*(house.begin(name, group_id, 1) for name in ("g-0", "g-1")))
    await house.group.close()
    assert house.lines.made[0].aborted.is_set()
    assert house.failures == 0


async def test_closing_while_connecting_gives_that_up(house: House) -> None:
    house.lines.connects.clear()
    await asyncio.gather(house.ask("g-0"), house.ask("g-1"))
    task = house.group._group.task if house.group._group is not None else None
    assert task is not None
    await house.group.close()
    await asyncio.wait_for(task, 20)
    assert house.lines.made == []
    assert house.failures == 0
