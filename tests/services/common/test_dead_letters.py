"""Dead letters on real servers: what a person sees of them, and what can be put back."""

import pytest
from headrace.v1 import rollout_pb2

from services.common.config import Queue
from services.common.dead_letters import DeadLetters, decode
from services.common.queue import QueueClient
from services.trainer.run_queue import RunQueue
from tests.services.common.test_streams import connected, stage, started, take
from tests.services.scorer.groups import group_of
from tests.waiting import always


async def refused(
    client: QueueClient, *, data: bytes = b"\xff", reason: str = "does not parse"
) -> RunQueue:
    """A run whose group 0.0.1.0 a scorer has refused; the trainer has not looked yet."""
    run = await started(client, "0.0.1.0")
    generator, scorer = stage(client), stage(client, "groups", "s")
    [entry] = await generator.take(1, version=always(7))
    assert await generator.hand_off(entry, data=data, n=2) == "done"
    [entry] = await scorer.take(1)
    assert await scorer.refuse(entry, reason=reason) == "done"
    return run


async def dead_bytes(client: QueueClient) -> int:
    return int(await client.raw.hget(client.keys.clock, "dead_bytes"))


async def test_a_letter_says_what_it_is(queue_url: str) -> None:
    async with connected(queue_url) as client:
        await refused(client, data=b"\xff\x00")
        [letter] = await DeadLetters(client).all()
        assert (letter.group_id, letter.stream, letter.reason) == (
            "0.0.1.0",
            "groups",
            "does not parse",
        )
        assert (letter.deliveries, letter.num_bytes) == (1, 2)
        assert 0 <= letter.age_s < 60
        found = await DeadLetters(client).read(letter.letter_id)
        assert found is not None
        assert found[1] == b"\xff\x00"
        assert found[0].letter_id == letter.letter_id
        assert await DeadLetters(client).read("1-1") is None


async def test_there_may_be_more_than_a_page(queue_url: str) -> None:
    async with connected(queue_url) as client:
        groups = [f"0.{ordinal}.1.0" for ordinal in range(45)]
        await started(client, *groups)
        for entry in await (worker := stage(client)).take(45):
            assert await worker.refuse(entry, reason="bad") == "done"
        letters = await DeadLetters(client).all()
        assert [letter.group_id for letter in letters] == groups


async def test_a_letter_in_no_text_is_listed(queue_url: str) -> None:
    """A service of somebody else's may write anything."""
    async with connected(queue_url) as client:
        await started(client)
        strange = {b"id": b"\xff", b"reason": b"caf\xe9", b"deliveries": b"?", b"data": b"x"}
        await client.raw.xadd(client.keys.dead, strange)
        [letter] = await DeadLetters(client).all()
        assert (letter.group_id, letter.reason) == ("\ufffd", "caf\ufffd")
        assert (letter.stream, letter.deliveries, letter.num_bytes) == ("", 0, 1)
        assert await DeadLetters(client).requeue(letter.letter_id) == "settled"


async def test_an_entry_goes_back_as_it_was(queue_url: str) -> None:
    """The scorer has been mended: what was generated is not lost."""
    async with connected(queue_url) as client:
        data = group_of("a", "b").SerializeToString()
        run = await refused(client, data=data)
        dead = DeadLetters(client)
        [letter] = await dead.all()
        assert await dead.requeue(letter.letter_id) == "done"
        assert await dead.all() == []
        assert await dead_bytes(client) == 0
        assert await run.take(5, wait=False) == []  # the tombstone is gone
        place = (await run.outstanding())["0.0.1.0"]
        assert place == f"groups:~requeued:{letter.letter_id}|7|"
        [(_, fields)] = await client.raw.xrange(client.keys.groups)
        assert fields == {b"id": b"0.0.1.0", b"n": b"2", b"data": data}
        [entry] = await (scorer := stage(client, "groups", "mended")).take(1)
        assert (entry.data, entry.deliveries) == (data, 1)
        assert await scorer.hand_off(entry, data=b"samples", n=2) == "done"
        [delivery] = await run.take(1)
        assert (delivery.data, delivery.reason) == (b"samples", "")


async def test_a_prompt_is_generated_anew(queue_url: str) -> None:
    async with connected(queue_url) as client:
        run = await refused(client)
        dead = DeadLetters(client)
        [letter] = await dead.all()
        assert await dead.requeue(letter.letter_id, regenerate=True) == "done"
        assert await dead.all() == []
        [delivery] = await run.take(5)
        assert (delivery.group_id, delivery.reason) == ("0.0.1.0", "requeued")
        await run.settle([(delivery.entry_id, delivery.group_id)], step=1)
        assert await run.outstanding() == {}


async def test_what_the_trainer_has_taken_does_not_go_back(queue_url: str) -> None:
    async with connected(queue_url) as client:
        run = await refused(client)
        dead = DeadLetters(client)
        [letter] = await dead.all()
        [delivery] = await run.take(1)
        assert await dead.requeue(letter.letter_id) == "settled"
        assert await dead.requeue(letter.letter_id, regenerate=True) == "settled"
        await run.settle([(delivery.entry_id, delivery.group_id)], step=1)
        assert await dead.requeue(letter.letter_id) == "settled"
        assert len(await dead.all()) == 1
        assert await client.raw.xlen(client.keys.groups) == 0
        assert await client.raw.xlen(client.keys.samples) == 0


async def test_a_group_that_was_dropped_elsewhere_does_not_go_back(queue_url: str) -> None:
    async with connected(queue_url) as client:
        run = await refused(client)
        await run.settle([("", "0.0.1.0")], step=1)
        [letter] = await DeadLetters(client).all()
        assert await DeadLetters(client).requeue(letter.letter_id) == "settled"
        assert await client.raw.xlen(client.keys.groups) == 0


async def test_what_the_trainer_buried_does_not_go_back(queue_url: str) -> None:
    async with connected(queue_url) as client:
        run = await started(client, "a")
        [entry] = await (generator := stage(client)).take(1)
        await generator.hand_off(entry, data=b"g", n=1)
        [entry] = await (scorer := stage(client, "groups", "s")).take(1)
        await scorer.hand_off(entry, data=b"\xff", n=1)
        [delivery] = await run.take(1)
        await run.bury(delivery, reason="not a ScoredGroup", settings=Queue())
        [letter] = await DeadLetters(client).all()
        assert (letter.stream, letter.deliveries) == ("samples", 1)
        assert await DeadLetters(client).requeue(letter.letter_id) == "settled"


async def test_a_repeated_requeue_answers_done_once_more(queue_url: str) -> None:
    """Its answer was lost, and a worker has the entry already."""
    async with connected(queue_url) as client:
        await refused(client)
        [letter] = await DeadLetters(client).all()
        keys = client.keys
        names = [keys.dead, keys.samples, keys.groups, keys.outstanding, keys.clock]
        call = [letter.letter_id, "this-call", 2, "0"]
        assert await client.script("requeue", names, call) == "done"
        [_] = await stage(client, "groups", "s2").take(1)
        assert await client.script("requeue", names, call) == "done"
        assert await client.raw.xlen(keys.groups) == 1
        assert await client.script("requeue", names, [letter.letter_id, "other", 2, "0"]) == "gone"


async def test_a_refusal_repeated_after_the_requeue_is_lost(queue_url: str) -> None:
    async with connected(queue_url) as client:
        await started(client, "a")
        worker = stage(client)
        [entry] = await worker.take(1)
        assert await worker.refuse(entry, reason="bad") == "done"
        [letter] = await DeadLetters(client).all()
        assert await DeadLetters(client).requeue(letter.letter_id) == "done"
        assert await worker.refuse(entry, reason="bad") == "lost"
        assert await client.raw.xlen(client.keys.requests) == 1
        assert await DeadLetters(client).all() == []


async def test_evaluation_goes_back_and_is_not_made_anew(queue_url: str) -> None:
    async with connected(queue_url) as client:
        run = await started(client)
        await run.dispatch("eval.0.1.5", b"q", evaluation=True)
        worker = stage(client)
        [entry] = await worker.take(1)
        assert await worker.refuse(entry, reason="bad") == "done"
        dead = DeadLetters(client)
        [letter] = await dead.all()
        assert await dead.requeue(letter.letter_id, regenerate=True) == "evaluation"
        assert await dead.requeue(letter.letter_id) == "done"
        assert await run.take(1, evaluation=True, wait=False) == []
        [entry] = await take(worker)
        assert (entry.group_id, entry.data, entry.evaluation) == ("eval.0.1.5", b"q", True)
        assert await run.outstanding() == {}


async def test_letters_are_discarded_and_their_bytes_no_longer_counted(queue_url: str) -> None:
    async with connected(queue_url) as client:
        run = await refused(client, data=b"\xff" * 10)
        dead = DeadLetters(client)
        [letter] = await dead.all()
        assert await dead_bytes(client) == 10
        assert await dead.discard([letter.letter_id, "1-1"]) == [True, False]
        assert await dead.discard([letter.letter_id]) == [False]
        assert await dead.all() == []
        assert await dead_bytes(client) == 0
        [delivery] = await run.take(1)
        assert delivery.reason == "poison"


def test_bytes_are_shown_as_the_message_that_they_are() -> None:
    group = group_of("a", row={"level": 3})
    told = decode(group.SerializeToString(), stream="groups")
    assert told is not None
    assert told["request"]["group_id"] == "0.0.1.0"
    assert told["rollouts"][0]["sequences"][0]["token_ids"] == "AQAAAAIAAAAKAAAACwAAAA=="
    request = rollout_pb2.RolloutRequest(group_id="g").SerializeToString()
    assert decode(request, stream="eval_requests") == {"group_id": "g"}
    assert decode(b"", stream="groups") == {}


@pytest.mark.parametrize(
    ("data", "stream"),
    [
        (b"\xff\xff", "groups"),
        (b"not a message at all", "samples"),
        (b"\xa2\x06\x01x", "groups"),  # parses: field 100, which nobody knows
        (b"\x08\x01", "dead"),
    ],
)
def test_other_bytes_are_no_message(data: bytes, stream: str) -> None:
    assert decode(data, stream=stream) is None
