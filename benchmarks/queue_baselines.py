"""Two ways without a queue of this kind: pickled samples in a Redis stream, and
multiprocessing.Queue.

Pickle is here and nowhere else: it is what is compared with. Services never read it, since reading
it runs code that whoever can write to the server has chosen.
"""

import pickle
from typing import Any

import queue_tokens as tokens
import redis
from queue_gate import Gate
from queue_tokens import Size

STREAM = "bench:pickled"

POOL = 32
"""Different samples, sent in turn."""

WARM = 64
"""Samples before the clock begins."""


def _plain(size: Size) -> list[dict[str, Any]]:
    made = tokens.sequences(size, number=POOL)
    return [tokens.plain(sequence, number=number) for number, sequence in enumerate(made)]


def pickle_producer(url: str, size: Size, gate: Gate, number: int) -> None:
    """One entry a sample, by XADD."""
    samples = _plain(size)
    with redis.Redis.from_url(url, protocol=2) as client:
        gate.wait()
        for index in range(WARM + number):
            if index == WARM:
                gate.wait()
                gate.begin()
            data = pickle.dumps(samples[index % POOL], protocol=pickle.HIGHEST_PROTOCOL)
            client.xadd(STREAM, {"data": data})
        gate.wait()
        client.unlink(STREAM)


def pickle_consumer(url: str, size: Size, gate: Gate, number: int) -> None:
    """XREAD, one entry a call."""
    last, num_tokens = b"0", 0
    with redis.Redis.from_url(url, protocol=2) as client:
        gate.wait()
        for index in range(WARM + number):
            if index == WARM:
                gate.wait()
            while not (found := client.xread({STREAM: last}, count=1, block=1000)):
                pass
            [(last, fields)] = found[0][1]
            sample = pickle.loads(fields[b"data"])
            num_tokens += len(sample["token_ids"]) if index >= WARM else 0
        gate.end(num_tokens=num_tokens)
        gate.wait()


def mp_producer(channel: Any, size: Size, gate: Gate, number: int) -> None:
    """multiprocessing.Queue pickles in a thread of its own, and sends through a pipe."""
    samples = _plain(size)
    gate.wait()
    for index in range(WARM + number):
        if index == WARM:
            gate.wait()
            gate.begin()
        channel.put(samples[index % POOL])
    gate.wait()


def mp_consumer(channel: Any, size: Size, gate: Gate, number: int) -> None:
    """One sample a call."""
    num_tokens = 0
    gate.wait()
    for index in range(WARM + number):
        if index == WARM:
            gate.wait()
        sample = channel.get()
        num_tokens += len(sample["token_ids"]) if index >= WARM else 0
    gate.end(num_tokens=num_tokens)
    gate.wait()
