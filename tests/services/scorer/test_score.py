"""Score over gRPC, and groups that are larger than gRPC's own limit: whole, once, and ended when
nobody waits for the answer any more."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace.v1 import rollout_pb2, scorer_pb2, scorer_pb2_grpc

from services.common import grpc_kit, workers
from services.common.config import Network
from services.common.lifecycle import Lifecycle
from services.scorer import rewards, service
from tests.chaos.proxy import Proxy
from tests.conftest import free_port
from tests.services.scorer.groups import group_of, sequence
from tests.services.scorer.test_service import EventLog, recipe_of, river
from tests.waiting import PATIENCE_S, until

GRPC_DEFAULT_BYTES = 4 << 20
"""Largest message that gRPC takes unless told otherwise."""

NUM_TOKENS = 32_768


@asynccontextmanager
async def scoring(*functions: Any) -> AsyncIterator[int]:
    """ScorerService with one worker; its port."""
    recipe = recipe_of(*functions, rewards={"workers": 1, "timeout_s": PATIENCE_S})
    pool = workers.Pool(recipe.rewards.workers)
    resolved = rewards.resolve(recipe.rewards)
    judges = rewards.Judges(resolved, pool, timeout_s=recipe.rewards.timeout_s)
    scorer = service.Scorer(recipe, judges=judges, recorder=EventLog(recipe), producer="scorer-0")
    add = scorer_pb2_grpc.add_ScorerServiceServicer_to_server
    register = [(add, service.Servicer(scorer), "headrace.v1.ScorerService")]
    served = await grpc_kit.serve(Network(), Lifecycle(service="scorer"), register)
    try:
        yield served.port
    finally:
        await served.stop(0)
        await pool.close()


async def score(
    port: int, group: rollout_pb2.RolloutGroup, *, timeout_s: float = PATIENCE_S
) -> scorer_pb2.ScoreResponse:
    async with grpc_kit.channel(f"127.0.0.1:{port}", Network()) as channel:
        stub = scorer_pb2_grpc.ScorerServiceStub(channel)
        request = scorer_pb2.ScoreRequest(group=group)
        answer: scorer_pb2.ScoreResponse = await stub.Score(request, timeout=timeout_s)
        return answer


def long_group(num_samples: int) -> rollout_pb2.RolloutGroup:
    """Samples of NUM_TOKENS: 4 bytes an id, 4 a log-probability and 1 of the mask each."""
    group = group_of(*("1" if n % 2 else "0" for n in range(num_samples)))
    ids = range(1 << 14, (1 << 14) + NUM_TOKENS)
    mask = [0] * 768 + [1] * (NUM_TOKENS - 768)
    for rollout in group.rollouts:
        rollout.sequences[0].CopyFrom(sequence(ids, mask, [-0.5] * NUM_TOKENS))
        rollout.sequences[0].spans[0].start, rollout.sequences[0].spans[0].end = 768, NUM_TOKENS
    return group


@pytest.mark.parametrize("num_samples", [14, 15, 16])
async def test_a_group_on_either_side_of_grpcs_own_limit(num_samples: int, valkey_url: str) -> None:
    group = long_group(num_samples)
    assert (group.ByteSize() > GRPC_DEFAULT_BYTES) == (num_samples > 14)
    async with scoring("HERE:scripted") as port:
        scored = (await score(port, group)).scored
    assert [each.sequence.token_ids for each in scored.samples] == [
        each.sequences[0].token_ids for each in group.rollouts
    ]
    # And on the way that training takes.
    async with river(valkey_url, recipe_of("HERE:scripted")) as seen:
        await seen.put(group)
        [through_the_queue] = await seen.scored("samples", 1)
        await seen.stop()
    assert len(through_the_queue.samples) == num_samples
    assert (
        through_the_queue.samples[-1].sequence.logprobs == group.rollouts[-1].sequences[0].logprobs
    )


async def test_what_nobody_waits_for_any_more_is_ended(tmp_path: Path) -> None:
    """The deadline passes while the function works, and the caller asks again."""
    go = tmp_path / "go"
    slow = {"function": "HERE:waits_for_file", "params": {"path": str(go)}}
    async with scoring(slow) as port:
        first = asyncio.create_task(score(port, group_of("a", "b"), timeout_s=PATIENCE_S / 2))
        await until(lambda: begun(tmp_path))
        first.cancel()
        # There is one worker, and it was in an endless call.
        go.touch()
        answer = await score(port, group_of("a", "b"))
        assert [each.reward for each in answer.scored.rollouts] == [0.0, 1.0]
        with pytest.raises(asyncio.CancelledError):
            await first
    assert len(begun(tmp_path)) == 2  # another process, since the first one was ended


async def test_a_deadline_ends_the_work_and_nothing_repeats_it(tmp_path: Path) -> None:
    slow = {"function": "HERE:waits_for_file", "params": {"path": str(tmp_path / "go")}}
    async with scoring(slow) as port:
        await warmed_up(port, tmp_path)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await score(port, group_of("a", "b"), timeout_s=2.0)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert len(begun(tmp_path)) <= 1


async def test_a_connection_that_is_lost_in_the_middle_repeats_no_users_function(
    tmp_path: Path,
) -> None:
    """gRPC would do it four times, and each time the function's effects."""
    slow = {"function": "HERE:waits_for_file", "params": {"path": str(tmp_path / "go")}}
    async with scoring(slow) as port, Proxy(free_port(), target=port) as proxy:
        asked = asyncio.create_task(score(proxy.port, group_of("a", "b")))
        await until(lambda: begun(tmp_path))
        await proxy.cut()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert len(begun(tmp_path)) == 1


def begun(folder: Path) -> list[Path]:
    """A file for each worker in which the function was begun."""
    return list(folder.glob("go.begun-*"))


async def warmed_up(port: int, folder: Path) -> None:
    """Once the worker has been started and has scored a group."""
    (folder / "go").touch()
    await score(port, group_of("a", "b"))
    for each in (folder / "go", *begun(folder)):
        each.unlink()
