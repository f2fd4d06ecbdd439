"""The three services as far as the queue goes: they take, read, write and hand off as the real ones
do, with the real ones' code. Tokens are not generated but given, and every conversation has a
constant reward.

The trainer takes for a step and settles the step, 32 groups by default; as many groups are
outstanding as pacing by `max_staleness` allows, dispatched one by one.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import queue_tokens as tokens
from headrace.v1 import rollout_pb2
from queue_gate import Gate
from queue_tokens import GROUP_SIZE, VERSION, VOCABULARY, Size

from services.common import queue
from services.common.config import Queue, Recipe
from services.common.config import Recorder as RecorderSettings
from services.common.queue import QueueClient
from services.common.recorder import Recorder
from services.common.streams import Entry, Stage
from services.generator import wire as generator_wire
from services.generator.types import Conversation
from services.scorer import wire as scorer_wire
from services.scorer.advantages import group_advantages
from services.scorer.rewards import Verdict
from services.scorer.scoring import Judgement
from services.trainer.intake import Policy, admit
from services.trainer.run_queue import DISPATCHES, RunQueue

RUN = "bench"

POOL_GROUPS = 4
"""Different ones, sent in turn."""

WARM_GROUPS = 64
"""Before the clock begins."""

GROUPS_AT_ONCE = 32
"""That one generator or one scorer works on: 256 conversations."""

Party = Callable[[str, Size, Gate, int], Coroutine[Any, Any, None]]


def run(party: Party, url: str, size: Size, gate: Gate, number: int) -> None:
    """One party, in the process of its own."""
    asyncio.run(party(url, size, gate, number))


async def _at(gate: Gate) -> None:
    """Wait for the others while renewal goes on."""
    await asyncio.to_thread(gate.wait)


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[QueueClient]:
    client = await queue.connect(url, run=RUN, claim_after_s=Queue().claim_after_s)
    try:
        yield client
    finally:
        await client.close()


def _recipe() -> Recipe:
    """Defaults but for GROUPS_AT_ONCE; none of what it says of data and models is used."""
    return Recipe.model_validate(
        {
            "run": RUN,
            "data": {"reasoning_gym": {"task": "chain_sum"}},
            "trainer": {"max_steps": 1},
            "generator": {"max_inflight": GROUPS_AT_ONCE * GROUP_SIZE},
            "scorer": {"max_groups": GROUPS_AT_ONCE},
        }
    )


def _stage(client: QueueClient, name: str) -> Stage:
    recipe = _recipe()
    capacity = {"requests": recipe.queue.groups_capacity, "groups": recipe.samples_capacity}
    recorder = Recorder(
        run=RUN, producer=name, service="scorer", settings=RecorderSettings(), channel=None
    )
    return Stage(
        client,
        name=name,
        consumer=f"worker-{name}",
        settings=recipe.queue,
        capacity=capacity[name],
        recorder=recorder,
    )


def _group_id(number: int) -> str:
    return f"0.{number}.1.0"


def _request(group_id: str) -> rollout_pb2.RolloutRequest:
    question = "What is the sum of 12 and 30? Answer with one number. " * 4
    return rollout_pb2.RolloutRequest(
        group_id=group_id,
        messages=[rollout_pb2.ChatMessage(role="user", content=question)],
        row_json='{"answer": "42"}',
        sampling=rollout_pb2.Sampling(temperature=1.0, num_generations=GROUP_SIZE),
    )


def _groups(size: Size) -> list[dict[int, Conversation]]:
    """Conversations by generation, as the generator's group runner has them."""
    made = tokens.sequences(size, number=POOL_GROUPS * GROUP_SIZE)
    return [
        {
            generation: tokens.conversation(made[group * GROUP_SIZE + generation])
            for generation in range(GROUP_SIZE)
        }
        for group in range(POOL_GROUPS)
    ]


def _written(request: rollout_pb2.RolloutRequest, group: dict[int, Conversation]) -> Any:
    return generator_wire.write_group(
        request, group, failed={}, versions=(VERSION, VERSION), producer="generator-0"
    )


def _judgement() -> Judgement:
    """Every other conversation is right."""
    rewards: list[float | None] = [float(number % 2) for number in range(GROUP_SIZE)]
    return Judgement(
        verdicts=[Verdict("constant", rewards)],
        totals=rewards,
        advantages=group_advantages(rewards),
        enough=True,
    )


def message_bytes(size: Size) -> tuple[int, int, int]:
    """Of a request, its group, and its scored group."""
    request = _request(_group_id(0))
    group = _written(request, _groups(size)[0])
    scored = scorer_wire.write_scored(group, _judgement(), scorer="scorer-0")
    return request.ByteSize(), group.ByteSize(), scored.ByteSize()


# -- the trainer


async def _train(
    run: RunQueue, number: int, *, settled: Callable[[int], None] = lambda num_groups: None
) -> int:
    """Take, admit and settle so many groups; the tokens of their samples."""
    policy = Policy(
        version=VERSION, step=1, step_of={VERSION: 1}, max_staleness=4, vocab_size=VOCABULARY
    )
    per_step = _recipe().trainer.groups_per_step
    num_tokens = step = 0
    while number > 0:
        held: list[tuple[str, str]] = []
        wanted = min(per_step, number)
        while len(held) < wanted:
            deliveries = await run.take(wanted - len(held), wait=False)
            if not deliveries:
                deliveries = await run.take(wanted - len(held))
            for delivery in deliveries:
                group = admit(delivery.data, group_id=delivery.group_id, policy=policy)
                assert len(group.samples) == GROUP_SIZE
                num_tokens += sum(sample.token_ids.size for sample in group.samples)
                held.append((delivery.entry_id, delivery.group_id))
        step += 1
        await run.settle(held, step=step)
        settled(wanted)
        number -= wanted
    return num_tokens


async def hop_trainer(url: str, size: Size, gate: Gate, number: int) -> None:
    """What comes out of `samples`."""
    async with _connected(url) as client:
        run = RunQueue(client)
        await run.start(floor=1, recipe="bench")
        # What stages before would have left: groups in the scorer's hands.
        pipe = client.raw.pipeline(transaction=False)
        for group in range(WARM_GROUPS + number):
            pipe.hset(client.keys.outstanding, _group_id(group), "groups:worker-requests:1|1|")
            pipe.xadd(client.keys.groups, {"id": _group_id(group), "n": "1", "data": b""})
        await pipe.execute()
        await _at(gate)
        await _train(run, WARM_GROUPS)
        await _at(gate)
        gate.end(num_tokens=await _train(run, number))
        await _at(gate)


async def hop_scorer(url: str, size: Size, gate: Gate, number: int) -> None:
    """What goes into `samples`: groups judged before the clock begins are written and handed
    off."""
    groups = [_written(_request("any"), group) for group in _groups(size)]
    async with _connected(url) as client, _stage(client, "groups") as stage:
        await _at(gate)
        entries = list[Entry]()
        while len(entries) < WARM_GROUPS + number:
            entries += await stage.take(WARM_GROUPS + number)
        judgement = _judgement()

        async def hand_off(entry: Entry) -> None:
            group = groups[int(entry.group_id.split(".")[1]) % POOL_GROUPS]
            group.request.group_id = entry.group_id
            scored = scorer_wire.write_scored(group, judgement, scorer="scorer-0")
            data, num = scored.SerializeToString(), len(scored.samples)
            assert await stage.hand_off(entry, data=data, n=num) == "done"

        await _each(entries[:WARM_GROUPS], hand_off, width=GROUPS_AT_ONCE)
        await _at(gate)
        gate.begin()
        await _each(entries[WARM_GROUPS:], hand_off, width=GROUPS_AT_ONCE)
        await _at(gate)


async def _each(
    entries: list[Entry], work: Callable[[Entry], Awaitable[None]], *, width: int
) -> None:
    """Work on all, so many at a time."""
    waiting = iter(entries)

    async def worker() -> None:
        for entry in waiting:
            await work(entry)

    await asyncio.gather(*(worker() for _ in range(width)))


# -- the whole way


async def way_trainer(url: str, size: Size, gate: Gate, number: int) -> None:
    """Requests in, samples out."""
    async with _connected(url) as client:
        run = RunQueue(client)
        await run.start(floor=1, recipe="bench")
        await _at(gate)
        await _dispatch_and_train(run, 0, WARM_GROUPS)
        await _at(gate)
        gate.begin()
        gate.end(num_tokens=await _dispatch_and_train(run, WARM_GROUPS, number))
        await run.finish()
        await _at(gate)


async def _dispatch_and_train(run: RunQueue, first: int, number: int) -> int:
    """Dispatch and train so many groups; the tokens of their samples."""
    room = asyncio.Semaphore(_recipe().max_outstanding)

    def settled(num_groups: int) -> None:
        for _ in range(num_groups):
            room.release()

    groups = iter(range(first, first + number))

    async def dispatch() -> None:
        for group in groups:
            await room.acquire()
            group_id = _group_id(group)
            await run.dispatch(group_id, _request(group_id).SerializeToString())

    dispatching = (dispatch() for _ in range(DISPATCHES))
    num_tokens, *_ = await asyncio.gather(_train(run, number, settled=settled), *dispatching)
    return num_tokens


async def way_generator(url: str, size: Size, gate: Gate, number: int) -> None:
    """Requests to groups."""
    groups = _groups(size)

    async def generate(stage: Stage, entry: Entry) -> None:
        request = rollout_pb2.RolloutRequest.FromString(entry.data)
        ordinal = int(request.group_id.split(".")[1])
        message = _written(request, groups[ordinal % POOL_GROUPS])
        data, num = message.SerializeToString(), len(message.rollouts)
        assert await stage.hand_off(entry, data=data, n=num) == "done"

    await _work(url, gate, "requests", generate)


async def way_scorer(url: str, size: Size, gate: Gate, number: int) -> None:
    """Groups to samples."""
    judgement = _judgement()

    async def score(stage: Stage, entry: Entry) -> None:
        group = scorer_wire.read_group(entry.data, group_id=entry.group_id)
        conversations = scorer_wire.read_conversations(group)
        assert len(conversations.members) == GROUP_SIZE
        scored = scorer_wire.write_scored(group, judgement, scorer="scorer-0")
        data, num = scored.SerializeToString(), len(scored.samples)
        assert await stage.hand_off(entry, data=data, n=num) == "done"

    await _work(url, gate, "groups", score)


async def _work(
    url: str, gate: Gate, name: str, work: Callable[[Stage, Entry], Coroutine[Any, Any, None]]
) -> None:
    """One worker on a stream until the run is done, as services/scorer/service.py takes."""
    async with _connected(url) as client, _stage(client, name) as stage:
        await _at(gate)
        others = asyncio.create_task(_at(gate))
        running: set[asyncio.Task[None]] = set()
        while stage.clock.state != "done":
            if len(running) >= GROUPS_AT_ONCE:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            else:
                for entry in await stage.take(GROUPS_AT_ONCE - len(running)):
                    running.add(asyncio.create_task(work(stage, entry)))
            for task in running:
                if task.done():
                    task.result()
            running = {task for task in running if not task.done()}
        await others
        await _at(gate)
