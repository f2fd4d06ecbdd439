"""The dead letters of a run, as a person looks at them: what is there, why, and what can still be
done about it.

A stage that refuses an entry tells the trainer by a tombstone. Until the trainer has taken that,
the group is outstanding and its entry can go back; afterwards the group is settled (its prompt was
due again as another try, or was given up), and the letter is evidence and nothing more.
"""

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from headrace.v1 import rollout_pb2, sample_pb2

from services.common.queue import SCRIPTS, QueueClient

PAGE = 20
"""Letters read by one script: it holds their bytes in the server's memory while it counts them."""

LETTER_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
"""What the queue server takes as an entry's id."""

MESSAGES: dict[str, type[Message]] = {
    "requests": rollout_pb2.RolloutRequest,
    "groups": rollout_pb2.RolloutGroup,
    "samples": sample_pb2.ScoredGroup,
    "eval_requests": rollout_pb2.RolloutRequest,
    "eval_groups": rollout_pb2.RolloutGroup,
    "evals": sample_pb2.ScoredGroup,
}
"""What an entry of each stream should be."""

Outcome = Literal["done", "gone", "settled", "evaluation"]
"""done: it went back. gone: there is no such letter. settled: the trainer has taken the tombstone,
or needs the group no more. evaluation: its requests are not made again."""


@dataclass(frozen=True)
class Letter:
    """One dead letter, without its bytes."""

    letter_id: str
    group_id: str
    """Empty where the entry named none."""
    stream: str
    """Where it came from: "requests", "groups", "samples", or evaluation's."""
    reason: str
    deliveries: int
    num_bytes: int
    age_s: float
    """Since it was buried, by the server's clock."""


class DeadLetters:
    """The dead letters of the run of a client."""

    def __init__(self, client: QueueClient) -> None:
        self._client, self._keys = client, client.keys

    async def all(self) -> list[Letter]:
        """Every letter, the oldest first."""
        letters: list[Letter] = []
        start = "-"
        while True:
            # Not by QueueClient.script(), which takes every answer for text: an entry may be
            # anything.
            now_ms, rows = await self._client.call(
                lambda: self._client.raw.eval(
                    SCRIPTS["letters"],
                    1,
                    self._keys.dead,
                    start,  # noqa: B023 - called at once
                    PAGE,
                )
            )
            for letter_id, num_bytes, *flat in rows:
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                letters.append(_letter(letter_id, fields, num_bytes=num_bytes, now_ms=now_ms))
            if len(rows) < PAGE:
                return letters
            start = f"({letters[-1].letter_id}"

    async def read(self, letter_id: str) -> tuple[Letter, bytes] | None:
        """One letter and its bytes, as the entry had them; None where it is not there."""
        found = await self._client.call(
            lambda: self._client.raw.xrange(self._keys.dead, letter_id, letter_id)
        )
        if not found:
            return None
        now_s, micros = await self._client.call(self._client.raw.time)
        [(entry_id, fields)] = found
        data = fields.get(b"data", b"")
        now_ms = now_s * 1000 + micros // 1000
        return _letter(entry_id, fields, num_bytes=len(data), now_ms=now_ms), data

    async def requeue(self, letter_id: str, *, regenerate: bool = False) -> Outcome:
        """Put an entry back where it came from, as it was and with no delivery counted; or, to
        `regenerate`, have the trainer make its prompt due again, at no cost of a try.

        Possible as long as the trainer has not taken the tombstone.
        """
        found = await self.read(letter_id)
        if found is None:
            return "gone"
        letter, data = found
        evaluation = letter.stream.startswith("eval")
        if evaluation and regenerate:
            return "evaluation"
        if letter.stream not in MESSAGES:
            return "settled"
        keys = [
            self._keys.dead,
            self._keys.evals if evaluation else self._keys.samples,
            getattr(self._keys, letter.stream),
            self._keys.outstanding,
            self._keys.clock,
        ]
        arguments = [letter_id, uuid.uuid4().hex, _num_members(data, letter.stream)]
        arguments += ["1" if regenerate else "0"]
        answer = await self._client.script("requeue", keys, arguments)
        assert answer in ("done", "gone", "settled"), answer
        return answer  # type: ignore[no-any-return]

    async def discard(self, letter_ids: Sequence[str]) -> list[bool]:
        """Delete letters; for each whether it was there."""
        keys = [self._keys.dead, self._keys.clock]
        answers = await self._client.script("discard", keys, letter_ids)
        return [answer == "done" for answer in answers]


def decode(data: bytes, *, stream: str) -> dict[str, Any] | None:
    """An entry's bytes as the JSON form of what its stream carries; None where they are no such
    message. Arrays are base64 in it.
    """
    kind = MESSAGES.get(stream)
    if kind is None:
        return None
    try:
        message = kind.FromString(data)
        # Bytes of anything may happen to parse, with nothing in them that is known.
        if data and not message.ListFields():
            return None
        text = json_format.MessageToJson(message, preserving_proto_field_name=True)
    except (DecodeError, UnicodeDecodeError, json_format.Error):
        return None
    found: dict[str, Any] = json.loads(text)
    return found


def _letter(letter_id: bytes, fields: dict[bytes, bytes], *, num_bytes: int, now_ms: int) -> Letter:
    name = letter_id.decode()
    deliveries = _text(fields, b"deliveries")
    return Letter(
        letter_id=name,
        group_id=_text(fields, b"id"),
        stream=_text(fields, b"stream"),
        reason=_text(fields, b"reason"),
        deliveries=int(deliveries) if deliveries.isdecimal() else 0,
        num_bytes=num_bytes,
        age_s=(now_ms - int(name.split("-")[0])) / 1000,
    )


def _text(fields: dict[bytes, bytes], name: bytes) -> str:
    return fields.get(name, b"").decode(errors="replace")


def _num_members(data: bytes, stream: str) -> int:
    """What `n` of the entry said: the conversations of a group, else 1."""
    if not stream.endswith("groups"):
        return 1
    try:
        return len(rollout_pb2.RolloutGroup.FromString(data).rollouts)
    except DecodeError:
        return 1
