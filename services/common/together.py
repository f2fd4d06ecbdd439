"""Calls of one script, sent together where several are ready.

A call for each would cost more than the work of reading and writing a group of short samples. The
rules are those of the script, for each as if it were alone, and each is answered for itself.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.lifecycle import cancel
from services.common.queue import SCRIPTS, QueueClient

BATCH_BYTES = 1 << 20
"""Data sent together are at most so large, or it is one alone: the server does nothing else while
it works on a call."""

MAX_CALLS = 2
"""Under way at a time: while the server works on one, the next is written."""


def for_several(script: str, *, num_arguments: int) -> str:
    """A script of ours that takes the arguments of several calls, one after the other, and answers
    the words of all."""
    return f"""
local function one(ARGV)
{SCRIPTS[script]}
end
local words = {{}}
for first = 1, #ARGV, {num_arguments} do
  words[#words + 1] = one({{unpack(ARGV, first, first + {num_arguments - 1})}})
end
return words
"""


@dataclass(eq=False)
class _Waiting:
    keys: tuple[str, ...]
    arguments: Sequence[Any]
    num_bytes: int
    word: "asyncio.Future[str]"


class Together:
    """Calls of one script that answers a word, from one event loop.

    waits_for: calls under way. unblocked_by: the server.
    """

    def __init__(self, client: QueueClient, script: str, *, num_arguments: int) -> None:
        self._client = client
        self._num_arguments = num_arguments
        self._script = client.raw.register_script(for_several(script, num_arguments=num_arguments))
        self._waiting: deque[_Waiting] = deque()
        self._calls: dict[asyncio.Task[None], list[_Waiting]] = {}
        self._about_to_start = False

    async def send(self, keys: Sequence[str], arguments: Sequence[Any], *, num_bytes: int) -> str:
        """The script's word for one call with data of `num_bytes`, which may wait for others.

        Raises what QueueClient.call() raises. Cancelled before it is sent, it is not; afterwards
        the call goes on as long as somebody waits for it.
        """
        assert len(arguments) == self._num_arguments
        loop = asyncio.get_running_loop()
        waiting = _Waiting(tuple(keys), arguments, num_bytes, loop.create_future())
        self._waiting.append(waiting)
        # Not at once: whoever is ready in the same turn of the event loop comes along.
        if not self._about_to_start:
            self._about_to_start = True
            loop.call_soon(self._start)
        try:
            return await waiting.word
        finally:
            if waiting.word.cancelled():
                self._end_in_vain()

    async def close(self) -> None:
        """Whoever asks ends: what has no answer yet is cancelled."""
        for waiting in self._waiting:
            waiting.word.cancel()
        self._waiting.clear()
        await cancel(*self._calls)

    def _start(self) -> None:
        self._about_to_start = False
        while self._waiting and len(self._calls) < MAX_CALLS:
            if batch := self._next_batch():
                call = asyncio.create_task(self._send(batch))
                self._calls[call] = batch
                call.add_done_callback(self._ended)

    def _ended(self, call: "asyncio.Task[None]") -> None:
        del self._calls[call]
        self._start()

    def _end_in_vain(self) -> None:
        """End calls that nobody waits for: in an outage they would go on until its end."""
        for call, batch in self._calls.items():
            if all(waiting.word.cancelled() for waiting in batch):
                call.cancel()

    def _next_batch(self) -> list[_Waiting]:
        """The oldest, and those behind it with the same keys, as far as bytes allow."""
        batch, num_bytes = list[_Waiting](), 0
        while self._waiting:
            following = self._waiting[0]
            if following.word.cancelled():
                self._waiting.popleft()
                continue
            num_bytes += following.num_bytes
            if batch and (following.keys != batch[0].keys or num_bytes > BATCH_BYTES):
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _send(self, batch: list[_Waiting]) -> None:
        arguments = [value for waiting in batch for value in waiting.arguments]
        try:
            words = await self._client.call(
                lambda: self._script(keys=batch[0].keys, args=arguments)
            )
            for waiting, word in zip(batch, words, strict=True):
                if not waiting.word.done():
                    waiting.word.set_result(word.decode())
        except Exception as error:  # of all of them: each caller raises it
            for waiting in batch:
                if not waiting.word.done():
                    waiting.word.set_exception(error)
        finally:
            for waiting in batch:
                waiting.word.cancel()  # of a call that was cut off; else it is done
