"""Which conversations are traced, and what a trace shows beside what is handed on anyway.

Replicas do not talk to each other about it. Groups are dispatched in the order of their ordinals,
and as many as a policy version trains on make a block of `groups_per_version`; which places of a
block are traced follows from the recipe alone. So a block has `traces.per_version` traces however
many replicas there are, and a replica that comes or goes changes nothing. A version may have groups
of two blocks: each replica takes no more than `per_version` of it, and the aggregator keeps no
more. Evaluations are not traced.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence

import numpy as np
from headrace.v1 import rollout_pb2

from services.common.recorder import Recorder
from services.common.traces_config import Traces
from services.generator.group import Group

ORDINAL = re.compile(r"\d+\.(\d+)\.\d+\.\d+")
"""In the name of a group that is trained on."""

VERSIONS_KEPT = 64
"""Versions of which it is remembered how many conversations were traced."""

TOKENS_AT_ONCE = 128
"""Spelled without a pause: the event loop has other work."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no whole character."""


class Tracing:
    """A replica's choice of conversations, and their marks. `spell` gives the text of tokens."""

    def __init__(
        self,
        settings: Traces,
        *,
        groups_per_version: int,
        spell: Callable[[Sequence[int]], str],
    ) -> None:
        self._settings, self._spell = settings, spell
        self._groups_per_version = groups_per_version
        self._taken: dict[int, int] = {}
        """By version, conversations chosen."""

    def choose(self, group_id: str, *, version: int, generations: Sequence[int]) -> list[int]:
        """The generations to trace of a finished group, of those given; they count as traced.

        Example: of 4 groups a version and `per_version = 2`, groups 1 and 3 of each four have one.
        """
        settings = self._settings
        found = ORDINAL.fullmatch(group_id)
        if found is None or version % settings.every_versions:
            return []
        left = settings.per_version - self._taken.get(version, 0)
        number = share(int(found[1]), settings.per_version, of=self._groups_per_version)
        number = min(number, left, len(generations))
        if number <= 0:
            return []
        self._taken[version] = self._taken.get(version, 0) + number
        while len(self._taken) > VERSIONS_KEPT:
            del self._taken[min(self._taken)]
        # Not always the first: any generation may be what somebody wants to see.
        first = hash_of(group_id) % len(generations)
        ordered = [*generations[first:], *generations[:first]]
        return sorted(ordered[:number])

    async def mark(
        self, message: rollout_pb2.RolloutGroup, group: Group, recorder: Recorder
    ) -> None:
        """Mark the conversations of a group's message that are traced; all others stay as they
        are. One that would be too large is counted instead.
        """
        chosen = self.choose(
            message.request.group_id,
            version=message.oldest_version,
            generations=list(group.conversations),
        )
        for rollout, (generation, conversation) in zip(
            message.rollouts, group.conversations.items(), strict=True
        ):
            if generation not in chosen:
                continue
            # Spelling a long one would cost time for nothing.
            if rollout.ByteSize() <= self._settings.max_bytes:
                rollout.marks.turn_begins_s.extend(turn.begin_s for turn in conversation.turns)
                for sequence in rollout.sequences:
                    ids = np.frombuffer(sequence.token_ids, "<u4").tolist()
                    rollout.marks.sequences.add(texts=await spelled(ids, self._spell))
            if rollout.ByteSize() > self._settings.max_bytes:
                rollout.ClearField("marks")
                recorder.count("recorder/trace_dropped/too_large")


def share(ordinal: int, number: int, *, of: int) -> int:
    """How many of `number` things fall to a place, when they are spread evenly over `of` places.

    Example: 8 over 3 places are 2, 3, 3; 2 over 4 places 0, 1, 0, 1.
    """
    place = ordinal % of
    return (place + 1) * number // of - place * number // of


def hash_of(group_id: str) -> int:
    """A number that is the same wherever and whenever it is asked for."""
    digest = hashlib.blake2b(group_id.encode(), digest_size=8, person=b"headrace trace").digest()
    return int.from_bytes(digest, "little")


async def spelled(ids: Sequence[int], spell: Callable[[Sequence[int]], str]) -> list[str]:
    """The text of each token; together they are the text of all.

    A token is spelled behind those before it, since many tokenizers write a space only between two.
    Of tokens that make one character together the last has it, the others have none.

    Example: the two bytes of "é" as tokens are "" and "é".
    """
    texts: list[str] = []
    shown = begin = 0
    """Tokens before `shown` have their text; those from `begin` on are spelled together."""
    for position in range(len(ids)):
        if position % TOKENS_AT_ONCE == TOKENS_AT_ONCE - 1:
            await asyncio.sleep(0)
        before = spell(ids[begin:shown])
        both = spell(ids[begin : position + 1])
        last = position == len(ids) - 1
        # A character that never becomes whole is shown as it is after a few tokens.
        if both.endswith(REPLACEMENT) and not last and position + 1 - shown < 4:
            texts.append("")
            continue
        texts.append(both[len(before) :])
        begin, shown = shown, position + 1
    return texts
