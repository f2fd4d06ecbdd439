import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from services.generator import environment_hosts
from services.generator.environments import Environments, Instance, read_reward
from services.generator.types import EnvironmentFailed, ToolFailed
from tests.services.generator.environment_classes import Numbered
from tests.services.generator.running_environments import begun, entry, only, running
from tests.waiting import until


async def pid_of(instance: Instance) -> int:
    text = await instance.call("add", {"amount": 0})
    return int(text.partition('"pid": ')[2].rstrip("}"))


@pytest.fixture
def numbered() -> type[Numbered]:
    Numbered._begin()
    return Numbered


async def test_an_episode_in_a_worker_process() -> None:
    async with running(entry("Doubling", params={"start": 2})) as environments:
        instance = await environments.acquire(only(environments))
        row = {"goal": 8, "answer": "not taken by reset"}
        assert await instance.reset(row) == "Reach 8 from 2."
        assert not instance.done
        assert (await instance.call("add", {"amount": 1, "times": 3})).startswith('{"value": 5')
        assert await instance.call("shout", {"text": "hey"}) == "HEY"
        assert not instance.done
        first = await pid_of(instance)
        assert first != os.getpid()
        await instance.call("add", {"amount": 3})
        assert instance.done
        assert await instance.get_reward() == 1.0
        await instance.finish()
        await instance.finish()
        assert (environments.live, environments.idle) == (1, 1)

        again = await begun(environments, goal=4)
        assert await again.get_reward() == 0.5
        assert not again.done
        assert await pid_of(again) == first
        with pytest.raises(EnvironmentFailed, match="it has been given back"):
            await instance.call("add", {"amount": 1})
        await instance.finish()
        assert environments.idle == 0
        other = await begun(environments, goal=4)
        assert await pid_of(other) != first
        for used in (again, other):
            await used.finish()
        assert (environments.live, environments.idle) == (2, 2)


async def test_a_method_that_raises_is_told_and_the_instance_is_not_used_again() -> None:
    async with running("Doubling") as environments:
        instance = await begun(environments, goal=8)
        pid = await pid_of(instance)
        with capture_logs() as logs:
            for name, told in (
                ("fail", "ValueError: not\ntoday"),
                ("fail", "ValueError: not\ntoday"),
                ("lazily", "TypeError: it returned an awaitable; declare"),
            ):
                with pytest.raises(ToolFailed) as caught:
                    await instance.call(name, {})
                assert str(caught.value).startswith(told)
        assert [log["environment"] for log in logs] == ["Doubling"] * 2
        assert "in fail\n" in logs[0]["why"]
        assert not instance.broken
        await instance.call("add", {"amount": 1})
        assert await instance.get_reward() == pytest.approx(1001 / 8)
        await instance.finish()
        assert (environments.live, environments.idle) == (0, 0)
        await until(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("hang", "environment Doubling: hang: did not return within 1 s"),
        ("die", "environment Doubling: die: its process ended with status 3"),
    ],
)
async def test_a_call_without_an_end_fails_the_conversation(method: str, why: str) -> None:
    async with running("Doubling", timeout_s=1.0, max_inflight=1) as environments:
        instance = await begun(environments, goal=8)
        pid = await pid_of(instance)
        with pytest.raises(EnvironmentFailed, match=why):
            await instance.call(method, {})
        assert instance.broken
        with pytest.raises(EnvironmentFailed, match="its process has been ended"):
            await instance.get_reward()
        await instance.finish()
        assert environments.live == 0
        await until(lambda: not psutil.pid_exists(pid))
        await (await begun(environments, goal=8)).finish()


async def test_a_worker_that_dies_between_conversations_is_replaced() -> None:
    async with running("Doubling") as environments:
        instance = await begun(environments, goal=8)
        pid = await pid_of(instance)
        await instance.finish()
        psutil.Process(pid).kill()
        (idle,) = environments._idle["Doubling"]
        await until(lambda: not idle.host.usable)
        instance = await begun(environments, goal=8)
        assert await pid_of(instance) != pid
        await instance.finish()
        assert environments.live == 1


async def test_a_row_without_what_reset_needs() -> None:
    async with running("Doubling") as environments:
        instance = await environments.acquire(only(environments))
        with pytest.raises(EnvironmentFailed, match=r"reset needs goal, .* columns a, b"):
            await instance.reset({"a": 1, "b": 2})
        await instance.finish()
        assert environments.idle == 1


async def test_a_constructor_that_raises() -> None:
    async with running("Explosive") as environments:
        for _ in range(6):
            with pytest.raises(EnvironmentFailed, match="__init__: RuntimeError: no licence"):
                await environments.acquire(only(environments))
        assert environments.live == 0


async def test_rewards_are_finite_numbers_or_none() -> None:
    async with running("Odd") as environments:
        for given, read in ((None, None), (True, 1.0), (-3, -3.0), (0.5, 0.5)):
            instance = await begun(environments, reward=given)
            reward = await instance.get_reward()
            assert reward == read
            assert type(reward) is type(read)
            await instance.finish()
        assert environments.live == 1
        wrong: tuple[tuple[Any, str], ...] = (
            ("nan", "get_reward returned nan"),
            ("inf", "get_reward returned inf"),
            ("1.0", "a value of type str; give a number"),
            ([1.0], "a value of type list"),
        )
        for returned, why in wrong:
            instance = await begun(environments, reward=returned)
            with pytest.raises(EnvironmentFailed, match=why):
                await instance.get_reward()
            await instance.finish()
            assert environments.live == 0
    with pytest.raises(EnvironmentFailed, match="type int"):
        read_reward(10**400, name="x")


async def test_c44_each_conversation_has_its_own_number_and_a_clean_state(
    numbered: type[Numbered],
) -> None:
    async with running("Numbered") as environments:
        row: dict[str, Any] = {"prompt": "Solve: ", "values": [1]}
        numbers: list[str | None] = []
        for _epoch in range(2):
            group = [await environments.acquire(only(environments)) for _ in range(4)]
            observations = [await instance.reset(row) for instance in group]
            numbers += observations
            for instance, observation in zip(group, observations, strict=True):
                assert [await instance.call("count", {}) for _ in range(2)] == ["1", "2"]
                # Asked of the instance that ran the conversation, before another has it.
                assert await instance.get_reward() == float(observation or "nan")
            for instance in group:
                await instance.finish()
        assert len(set(numbers)) == 8
        assert row == {"prompt": "Solve: ", "values": [1]}
        assert numbered.made == 4
        assert (environments.live, environments.idle) == (4, 4)
    assert not numbered.alive


@pytest.mark.parametrize("place", ["reset", "get_reward", "count"])
async def test_c44_an_exception_affects_one_conversation(
    numbered: type[Numbered], place: str
) -> None:
    async with running("Numbered") as environments:
        numbered.failures.append(place)

        async def converse() -> float | None:
            instance = await environments.acquire(only(environments))
            try:
                await instance.reset({})
                await instance.call("count", {})
                return await instance.get_reward()
            finally:
                await instance.finish()

        results = await asyncio.gather(*(converse() for _ in range(4)), return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        assert [type(error) for error in failed] == [
            ToolFailed if place == "count" else EnvironmentFailed
        ]
        assert f"{place} failed once" in str(failed[0])
        assert (environments.live, environments.idle) == (3, 3)
        assert len(numbered.alive) == 3


async def converse_often(
    environments: Environments, number: int, *, method: str, row: Mapping[str, Any]
) -> tuple[int, int]:
    """How many of `number` conversations ended well, and at how many a method raised; never more
    at a time than there are places, and two more that wait."""
    places = asyncio.Semaphore(6)
    ended = raised = 0

    async def converse(index: int) -> None:
        nonlocal ended, raised
        async with places:
            instance = await environments.acquire(only(environments))
            try:
                await instance.reset({**row, "number": index})
                for _ in range(2):
                    try:
                        await instance.call(method, {})
                    except ToolFailed:
                        raised += 1
                await instance.get_reward()
                ended += 1
            except EnvironmentFailed:
                pass
            finally:
                await instance.finish()
            assert environments.live <= 4

    await asyncio.gather(*(converse(index) for index in range(number)))
    return ended, raised


async def test_c44_a_thousand_conversations_with_failures_leave_no_instance(
    numbered: type[Numbered],
) -> None:
    async with running(entry("Numbered", params={"chance": 0.1})) as environments:
        ended, raised = await converse_often(environments, 1000, method="count", row={})
        # 0.9 for reset and 0.9 for get_reward; calls raise in a tenth, and are told.
        assert 700 < ended < 900
        assert 100 < raised < 250
        assert numbered.most_alive <= 4
        assert numbered.made > 250
        assert environments.live == environments.idle == len(numbered.alive) <= 4
        assert environments.num_strays == 0
    assert not numbered.alive


async def test_c44_conversations_with_failures_leave_no_process() -> None:
    before = {child.pid for child in psutil.Process().children()}
    async with running("Chancy") as environments:
        ended, raised = await converse_often(environments, 60, method="move", row={})
        assert 30 < ended < 60
        assert raised > 0
        assert environments.live == environments.idle <= 4
        alive = [c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE]
        assert len({child.pid for child in alive} - before) <= 4
    assert {child.pid for child in psutil.Process().children()} <= before


async def test_a_conversation_waits_for_a_place_and_gets_the_instance(
    numbered: type[Numbered],
) -> None:
    async with running("Numbered", max_inflight=1) as environments:
        first = await begun(environments)
        waiting = [asyncio.create_task(environments.acquire(only(environments))) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        assert environments.live == 1
        await first.finish()
        second = await waiting[1]
        assert numbered.made == 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting[2]), 0.05)
        numbered.failures.append("reset")
        with pytest.raises(EnvironmentFailed):
            await second.reset({})
        await second.finish()
        third = await waiting[2]
        assert numbered.made == 2
        await third.finish()
        assert environments.idle == environments.live == 1


async def test_a_place_handed_over_while_the_waiting_is_cancelled_is_free_again(
    numbered: type[Numbered],
) -> None:
    async with running("Numbered", max_inflight=1) as environments:
        for healthy in (True, False):
            for steps in range(10):
                instance = await begun(environments)
                instance.broken = not healthy
                waiting = asyncio.create_task(environments.acquire(only(environments)))
                await asyncio.sleep(0)
                finishing = asyncio.create_task(instance.finish())
                for _ in range(steps):
                    await asyncio.sleep(0)
                if not waiting.cancel():
                    await (await waiting).finish()
                await asyncio.gather(waiting, finishing, return_exceptions=True)
                await until(lambda: environments.live == environments.idle)


async def test_an_idle_instance_makes_room_for_another_kind(numbered: type[Numbered]) -> None:
    async with running("Numbered", "Odd", max_inflight=1, column="c") as environments:
        numbers, odd = environments.choose({"c": "Numbered"}), environments.choose({"c": "Odd"})
        assert numbers is not None
        assert odd is not None
        await (await begun(environments, numbers)).finish()
        instance = await begun(environments, odd, reward=2)
        assert not numbered.alive
        assert (environments.live, environments.idle) == (1, 0)
        waiting = asyncio.create_task(begun(environments, numbers))
        await asyncio.sleep(0)
        assert await instance.get_reward() == 2.0
        await instance.finish()
        await (await waiting).finish()
        assert environments.live == 1


async def test_a_call_cut_off_breaks_the_instance(numbered: type[Numbered]) -> None:
    async with running("Numbered", timeout_s=0.1) as environments:
        instance = await begun(environments)
        with pytest.raises(EnvironmentFailed, match=r"wait: did not return within 0.1 s"):
            await instance.call("wait", {"seconds": 600})
        assert instance.broken
        await instance.finish()

        stubborn = await begun(environments)
        with pytest.raises(EnvironmentFailed, match=r"insist: did not return within 0.1 s"):
            await stubborn.call("insist", {"seconds": 0.5})
        await stubborn.finish()
        assert (environments.live, environments.num_strays) == (0, 1)

        leaving = await begun(environments)
        with pytest.raises(ToolFailed, match="SystemExit: 3"):
            await leaving.call("leave", {})
        await leaving.finish()
        assert environments.live == 0
        assert not numbered.alive
        await until(lambda: environments.num_strays == 0)


async def test_the_conversations_time_is_up_in_the_middle_of_a_call() -> None:
    async with running("Doubling") as environments:
        instance = await begun(environments, goal=8)
        pid = await pid_of(instance)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await instance.call("hang", {})
        assert instance.broken
        await instance.finish()
        assert environments.live == 0
        await until(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize("name", ["Numbered", "Chancy"])
async def test_nothing_leaks_wherever_a_conversation_is_cancelled(
    numbered: type[Numbered], name: str
) -> None:
    method = {"Numbered": "count", "Chancy": "move"}[name]
    async with running(name, max_inflight=2) as environments:

        async def converse() -> None:
            instance = await environments.acquire(only(environments))
            try:
                await instance.reset({"number": 1})
                await instance.call(method, {})
                await instance.get_reward()
            finally:
                await instance.finish()

        # More steps of the event loop than any of them takes, where it does not wait for a process.
        for steps in range(40):
            tasks = [asyncio.create_task(converse()) for _ in range(3)]
            for _ in range(steps):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: environments.live == environments.idle)
            assert environments.live <= 2
        await converse()
        assert len(numbered.alive) == (environments.live if name == "Numbered" else 0)


async def test_closing_goes_on_when_the_conversation_is_cancelled(
    numbered: type[Numbered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_hosts, "CLOSE_TIMEOUT_S", 0.1)
    async with running("Reluctant", max_inflight=1) as environments:
        instance = await begun(environments)
        instance.broken = True
        finishing = asyncio.create_task(instance.finish())
        await asyncio.sleep(0)
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
        assert environments.live == 1
        await (await begun(environments)).finish()
        assert environments.live == environments.idle == 1


async def test_an_instance_is_closed_before_its_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "closed"
    async with running(entry("Closing", params={"path": str(path)})) as environments:
        kept, failing = await begun(environments), await begun(environments)
        with pytest.raises(ToolFailed, match="OSError: broken"):
            await failing.call("fail", {})
        await failing.finish()
        assert path.read_text() == "closed\n"
        await kept.finish()
        assert path.read_text() == "closed\n"
    assert path.read_text() == "closed\nclosed\n"


async def test_close_ends_what_conversations_still_hold(numbered: type[Numbered]) -> None:
    async with running("Numbered", max_inflight=1) as environments:
        instance = await begun(environments)
        waiting = asyncio.create_task(environments.acquire(only(environments)))
        await asyncio.sleep(0)
    with pytest.raises(EnvironmentFailed, match="are closed"):
        await waiting
    with pytest.raises(EnvironmentFailed, match="are closed"):
        await environments.acquire(only(environments))
    await instance.finish()
    assert not numbered.alive
    assert environments.live == 0
