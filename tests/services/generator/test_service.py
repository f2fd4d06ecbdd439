"""A replica with a fake engine, and all else real: queue, policy service, metrics, gRPC."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status
from headrace.v1 import generator_pb2
from headrace.v1 import rollout_pb2 as wire

from services.common import streams
from services.common.queue import GROUP
from services.generator import service, weight_links
from services.generator.types import EngineDead, Generated, LoadTimes
from tests.conftest import free_port
from tests.services.generator.fakes import (
    FakeEngine,
    at_once,
    generated,
    request_of,
)
from tests.services.generator.river import river
from tests.waiting import PATIENCE_S, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short waits, and a cache of the test's own."""
    monkeypatch.setattr(streams, "BLOCK_S", 0.1)
    monkeypatch.setattr(streams, "TAKEOVER_EVERY_S", 0.05)
    monkeypatch.setattr(service, "DRAIN_S", 0.2)
    monkeypatch.setattr(weight_links, "RETRY_S", (0.001, 0.05))
    monkeypatch.setattr(service, "model_cache", lambda: tmp_path / "cache")


async def hang(call: int) -> Generated:
    await asyncio.Event().wait()
    raise AssertionError


# -- work


async def test_requests_become_groups(valkey_url: str, tmp_path: Path) -> None:
    async with river(valkey_url, tmp_path) as seen:
        requests = [request_of(f"0.{i}.1.1") for i in range(5)]
        await seen.put(*requests)
        await seen.trainer.publish(1)
        started = seen.start(FakeEngine())
        groups = await seen.groups(5)
        await started.stop()
        assert started.engine.ended
        assert sorted(group.request.group_id for group in groups) == [
            request.group_id for request in requests
        ]
        for group in groups:
            assert group.request in requests
            assert len(group.rollouts) == 4
            assert (group.oldest_version, group.newest_version) == (1, 1)
            assert group.producer == "generator-0"
        assert await seen.entries("requests", 0) == []
        assert sorted(seen.metrics.states) == sorted(
            (request.group_id, state)
            for request in requests
            for state in ("GROUP_STATE_GENERATING", "GROUP_STATE_GENERATED")
        )
        assert {"rollout/slots_busy_frac", "policy/served_version", "rollout/request_wait_s"} <= (
            seen.metrics.keys
        )


async def test_evaluation_goes_its_own_way(valkey_url: str, tmp_path: Path) -> None:
    """One greedy conversation a row, which is no group too small."""
    async with river(valkey_url, tmp_path) as seen:
        await seen.put(request_of("eval.0.1.7", num=1), evaluation=True)
        await seen.trainer.publish(1)
        started = seen.start(FakeEngine())
        [group] = await seen.groups(1, "eval_groups")
        assert group.request.group_id == "eval.0.1.7"
        assert len(group.rollouts) == 1
        await started.stop()
        # It is in none of training's numbers, and its own are the trainer's to record.
        conversations = ("rollout/", "completions/", "tools/", "eval/")
        slots = {"rollout/slots_busy_frac", "rollout/slots_starved_frac", "rollout/inflight"}
        assert {k for k in seen.metrics.keys if k.startswith(conversations)} <= slots


async def test_a_group_too_small_ends_as_a_tombstone(valkey_url: str, tmp_path: Path) -> None:
    async def answer(call: int) -> Generated:
        if call > 0:
            raise RuntimeError("no")
        return await at_once(call)

    async with river(valkey_url, tmp_path) as seen:
        await seen.put(request_of("0.0.1.1"))
        await seen.trainer.publish(1)
        seen.start(FakeEngine(answer))
        [entry] = await seen.entries("samples", 1)
        assert (entry["id"], entry["n"], entry["reason"]) == (b"0.0.1.1", b"0", b"failed")
        assert await seen.entries("groups", 0) == []


async def test_a_request_that_does_not_parse_is_a_dead_letter(
    valkey_url: str, tmp_path: Path
) -> None:
    async with river(valkey_url, tmp_path) as seen:
        await seen.run_queue.dispatch("0.0.1.1", b"\xff\xff\xff")
        await seen.put(request_of("0.1.1.1"))
        await seen.trainer.publish(1)
        seen.start(FakeEngine())
        [letter] = await seen.entries("dead", 1)
        assert letter["data"] == b"\xff\xff\xff"
        assert b"does not parse" in letter["reason"]
        [tombstone] = await seen.entries("samples", 1)
        assert tombstone["id"] == b"0.0.1.1"
        [group] = await seen.groups(1)
        assert group.request.group_id == "0.1.1.1"


async def test_slots_are_filled_while_a_groups_last_conversation_runs(
    valkey_url: str, tmp_path: Path
) -> None:
    """Eight slots, groups of four: two groups fill them. With six of eight conversations done, the
    next two groups come in, though none of the first two has ended."""
    tails = asyncio.Event()

    async def answer(call: int) -> Generated:
        if call in (0, 4):
            await tails.wait()
        return await at_once(call)

    async with river(valkey_url, tmp_path) as seen:
        await seen.put(*(request_of(f"0.{i}.1.1") for i in range(4)))
        await seen.trainer.publish(1)
        started = seen.start(FakeEngine(answer))
        finished = {group.request.group_id for group in await seen.groups(2)}
        assert finished == {"0.2.1.1", "0.3.1.1"}
        assert len(started.engine.calls) == 16
        tails.set()
        assert len(await seen.groups(4)) == 4


async def test_a_full_stream_holds_finished_groups_back(valkey_url: str, tmp_path: Path) -> None:
    """Room for one group: one goes, and those that wait here fill the slots once (two groups),
    beside what had begun before."""
    async with river(valkey_url, tmp_path, queue={"url": valkey_url, "groups_capacity": 1}) as seen:
        await seen.put(*(request_of(f"0.{i}.1.1") for i in range(9)))
        await seen.trainer.publish(1)
        started = seen.start(FakeEngine())
        await seen.groups(1)
        await until(lambda: len(started.engine.calls) >= 12)
        await asyncio.sleep(0.3)
        held = len(await seen.pending())
        assert 2 <= held <= 4
        assert len(started.engine.calls) == 4 * (held + 1)
        # A scorer takes what waits: each place is filled by one of those that were held back.
        for done in range(1, 9):
            [entry] = await seen.entries("groups", 1)
            await seen.client.raw.xtrim(seen.client.keys.groups, maxlen=0, approximate=False)
            assert wire.RolloutGroup.FromString(entry["data"]).rollouts, done
        await seen.groups(1)


async def test_many_hand_offs_at_once_are_no_outage(valkey_url: str, tmp_path: Path) -> None:
    """As in an evaluation, whose groups are one conversation each and end together."""
    together = asyncio.Event()

    async def answer(call: int) -> Generated:
        if call == 149:
            together.set()
        await together.wait()
        return await at_once(call)

    async with river(valkey_url, tmp_path, generator={"max_inflight": 150}) as seen:
        rows = [request_of(f"eval.0.1.{row}", num=1) for row in range(150)]
        await seen.put(*rows, evaluation=True)
        await seen.trainer.publish(1)
        started = seen.start(FakeEngine(answer))
        await seen.groups(150, "eval_groups")
        await started.stop()
        assert "queue/unavailable_s" not in seen.metrics.keys


# -- versions


async def test_no_work_is_taken_before_the_first_version_or_too_far_behind_it(
    valkey_url: str, tmp_path: Path
) -> None:
    goes_on = asyncio.Event()
    goes_on.set()

    class Slow(FakeEngine):
        async def load(self, path: Path, version: int) -> LoadTimes:
            if version > 0:
                await goes_on.wait()
            return await super().load(path, version)

    async def answer(call: int) -> Generated:
        return generated(versions=(started.engine.loads[-1][1],))

    async with river(valkey_url, tmp_path) as seen:
        await seen.put(request_of("0.0.1.1"))
        started = seen.start(Slow(answer))
        await until(lambda: started.lifecycle.phase == "waiting for the first policy version")
        assert not started.lifecycle.ready
        assert await seen.pending() == []
        await seen.trainer.publish(1)
        await seen.groups(1)
        assert started.lifecycle.ready

        goes_on.clear()
        for seed in (2, 3, 4):  # one of them is being loaded, two or three are behind it
            await seen.trainer.publish(seed)
        await until(lambda: not started.lifecycle.ready)
        assert started.lifecycle.phase == "catching up with the policy"
        await seen.put(request_of("0.1.1.1"))
        await asyncio.sleep(0.3)
        assert await seen.pending() == []
        goes_on.set()
        first, second = await seen.groups(2)
        assert first.oldest_version == 1
        # The version that was being loaded is two behind: with max_staleness 2 it may serve.
        assert second.oldest_version in (2, 3, 4)


async def test_no_work_is_taken_for_an_attempt_whose_version_is_not_served(
    valkey_url: str, tmp_path: Path
) -> None:
    """The clock says that a trainer has restored a checkpoint, before its version is here."""
    async with river(valkey_url, tmp_path) as seen:
        started = seen.start(FakeEngine())
        await seen.trainer.publish(1)
        await until(lambda: started.lifecycle.ready)
        await seen.put(request_of("0.0.1.1"))
        await seen.groups(1)
        attempt, _ = await seen.run_queue.start(floor=1, recipe=seen.run_queue._recipe)
        await seen.put(request_of("0.1.1.1"))  # with it the replica learns of the new attempt
        await seen.groups(2)
        await until(lambda: started.lifecycle.phase == "catching up with the policy")
        await seen.put(request_of("0.2.1.1"))
        await asyncio.sleep(0.3)
        assert await seen.pending() == []
        seen.trainer.store._attempt = attempt
        await seen.trainer.publish(2)
        *_, group = await seen.groups(3)
        assert group.request.group_id == "0.2.1.1"


async def test_what_has_become_too_old_is_cut_off_at_once(valkey_url: str, tmp_path: Path) -> None:
    """Two versions behind is the limit: the third publish after its own ends a group, and what
    began later goes on. Evaluation is never cut off."""
    done = asyncio.Event()

    async def answer(call: int) -> Generated:
        if call == 0:
            return await at_once(call)
        await done.wait()
        return generated(versions=(2,))

    async with river(valkey_url, tmp_path, generator={"max_inflight": 16}) as seen:
        await seen.put(request_of("0.0.1.1"))
        await seen.trainer.publish(1)
        started = seen.start(FakeEngine(answer))
        await until(lambda: len(started.engine.calls) == 4)
        await seen.put(request_of("eval.0.1.7", num=1), evaluation=True)
        await until(lambda: len(started.engine.calls) == 5)
        await seen.trainer.publish(2)
        await until(lambda: started.lifecycle.details["served_version"] == "2")
        await seen.put(request_of("0.1.1.1"))
        await until(lambda: len(started.engine.calls) == 9)
        await seen.trainer.publish(3)
        await until(lambda: started.lifecycle.details["served_version"] == "3")
        assert await seen.entries("samples", 0) == []
        await seen.trainer.publish(4)
        [entry] = await seen.entries("samples", 1)
        assert (entry["id"], entry["n"], entry["reason"]) == (b"0.0.1.1", b"0", b"stale")
        await until(lambda: "rollout/cancelled_total" in seen.metrics.keys)
        done.set()
        assert [group.request.group_id for group in await seen.groups(1)] == ["0.1.1.1"]
        assert len(await seen.groups(1, "eval_groups")) == 1
        assert await seen.pending() == []


async def test_what_becomes_too_old_while_it_waits_for_room_is_no_group_any_more(
    valkey_url: str, tmp_path: Path
) -> None:
    async with river(valkey_url, tmp_path, queue={"url": valkey_url, "groups_capacity": 1}) as seen:
        await seen.put(request_of("0.0.1.1"), request_of("0.1.1.1"))
        await seen.trainer.publish(1)
        started = seen.start(FakeEngine())
        await seen.groups(1)
        for number in (2, 3, 4):
            await seen.trainer.publish(number)
        [entry] = await seen.entries("samples", 1)
        assert (entry["id"], entry["reason"]) == (b"0.1.1.1", b"stale")
        await started.stop()
        assert "rollout/cancelled_total" not in seen.metrics.keys, "no conversation was left"
        assert len(await seen.groups(1)) == 1


async def test_a_failed_load_gives_back_what_is_held(valkey_url: str, tmp_path: Path) -> None:
    """The group is generated anew, with the version that was loaded at last."""

    async def answer(call: int) -> Generated:
        if call < 4:
            return await hang(call)
        return generated(versions=(2,))

    engine = FakeEngine(answer)
    async with river(valkey_url, tmp_path) as seen:
        await seen.put(request_of("0.0.1.1"))
        await seen.trainer.publish(1)
        started = seen.start(engine)
        await until(lambda: len(engine.calls) == 4)
        engine.failing_loads = 1
        await seen.trainer.publish(2)
        [group] = await seen.groups(1)
        assert (group.oldest_version, len(group.rollouts)) == (2, 4)
        await started.stop()
        assert "policy/canary_failed_total" in seen.metrics.keys


# -- the end


async def test_what_does_not_end_in_time_is_given_back(valkey_url: str, tmp_path: Path) -> None:
    """And generated elsewhere, once, as if it had never been begun here."""
    async with river(valkey_url, tmp_path) as seen:
        await seen.put(request_of("0.0.1.1"), request_of("0.1.1.1"))
        await seen.trainer.publish(1)
        first = seen.start(FakeEngine(hang))
        await until(lambda: len(first.engine.calls) == 8)
        await first.stop()
        assert not first.lifecycle.ready
        assert first.engine.ended
        assert await seen.pending() == [(b"~returned", 0)] * 2
        consumers = await seen.client.raw.xinfo_consumers(seen.client.keys.requests, GROUP)
        assert [consumer["name"] for consumer in consumers] == [b"~returned"]
        seen.start(FakeEngine(), name="1")
        groups = await seen.groups(2)
        assert {group.producer for group in groups} == {"generator-1"}
        assert await seen.entries("requests", 0) == []


async def test_what_ends_in_time_is_handed_off(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "DRAIN_S", PATIENCE_S)
    goes_on = asyncio.Event()

    async def answer(call: int) -> Generated:
        await goes_on.wait()
        return await at_once(call)

    async with river(valkey_url, tmp_path) as seen:
        await seen.put(request_of("0.0.1.1"))
        await seen.trainer.publish(1)
        started = seen.start(FakeEngine(answer))
        await until(lambda: len(started.engine.calls) == 4)
        started.lifecycle.stopping.set()
        await until(lambda: not started.lifecycle.ready)
        await seen.put(request_of("0.1.1.1"))  # of no interest any more
        goes_on.set()
        await started.stop()
        [group] = await seen.groups(1)
        assert group.request.group_id == "0.0.1.1"
        assert await seen.pending() == []


async def test_a_dead_engine_ends_the_process_and_gives_back(
    valkey_url: str, tmp_path: Path
) -> None:
    async def answer(call: int) -> Generated:
        raise EngineDead("gone")

    async with river(valkey_url, tmp_path) as seen:
        await seen.put(request_of("0.0.1.1"))
        await seen.trainer.publish(1)
        started = seen.start(FakeEngine(answer))
        with pytest.raises(EngineDead):
            await started.task
        assert await seen.pending() == [(b"~returned", 0)]
        listed = await seen.client.raw.xinfo_consumers(seen.client.keys.requests, GROUP)
        assert {each["name"] for each in listed} == {b"~returned"}
        assert started.engine.ended


async def test_a_stop_while_it_waits_for_the_trainer(tmp_path: Path, valkey_url: str) -> None:
    async with river(valkey_url, tmp_path) as seen:
        nobody = {"trainer": f"127.0.0.1:{free_port()}"}
        network = seen.recipe.network.model_copy(update=nobody)
        seen.recipe = seen.recipe.model_copy(update={"network": network})
        started = seen.start(FakeEngine())
        await until(lambda: started.lifecycle.phase.startswith("waiting for the trainer at"))
        await started.stop()


# -- Generate


def asked(**sampling: Any) -> generator_pb2.GenerateRequest:
    given: dict[str, Any] = {
        "num_generations": 2,
        "temperature": 1.0,
        "max_completion_tokens": 8,
    }
    return generator_pb2.GenerateRequest(
        messages=request_of().messages, sampling=wire.Sampling(**given | sampling)
    )


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """What ErrorInfo says."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    info = error_details_pb2.ErrorInfo()
    packed: Any = status.details[0]
    assert isinstance(packed, Message)
    packed.Unpack(info)  # type: ignore[attr-defined]
    return str(info.reason)


async def test_generate_answers_when_it_is_ready_and_says_why_not(
    valkey_url: str, tmp_path: Path
) -> None:
    async with river(valkey_url, tmp_path) as seen:
        started = seen.start(FakeEngine())
        await until(lambda: started.lifecycle.phase == "waiting for the first policy version")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await started.call(asked())
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert error.value.details() == "not ready: waiting for the first policy version"
        assert reason_of(error.value) == "NOT_READY"

        await seen.trainer.publish(1)
        await started.ready()
        answer = await started.call(asked())
        assert [rollout.completion[0].role for rollout in answer.rollouts] == ["assistant"] * 2
        # It is outside training: nothing of it reaches a stream.
        for stream in ("requests", "groups", "samples"):
            assert await seen.entries(stream, 0) == []

        for wrong in ({"num_generations": 0}, {"max_completion_tokens": 0}):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await started.call(asked(**wrong))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

        long = asked()
        long.messages[0].content = "9" * 100
        with pytest.raises(grpc.aio.AioRpcError, match="none finished: 2 prompt_too_long") as error:
            await started.call(long)
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await started.stop()
        assert "rollout/generated_tok_s" not in seen.metrics.keys
