"""Groups of rollouts as a generator would write them, for tests."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from headrace.v1 import rollout_pb2


def sequence(
    token_ids: Sequence[int] = (1, 2, 10, 11),
    mask: Sequence[int] = (0, 0, 1, 1),
    logprobs: Sequence[float] = (0, 0, -0.1, -0.2),
) -> rollout_pb2.Sequence:
    return rollout_pb2.Sequence(
        token_ids=np.array(token_ids, dtype="<u4").tobytes(),
        trained_mask=bytes(mask),
        logprobs=np.array(logprobs, dtype="<f4").tobytes(),
        spans=[rollout_pb2.VersionSpan(version=3, start=2, end=4)],
    )


def drops_reasoning() -> list[rollout_pb2.Sequence]:
    """C07: a prompt of 3 tokens, 1,500 of thinking and a call of 10; a second prompt without the
    thinking, with a result of 2; an answer of 5. 1,513 tokens, of which 1,510 are trained, and 20,
    of which 5.
    """
    return [
        sequence(range(1, 1514), [0] * 3 + [1] * 1510, [0.0] * 3 + [-0.1] * 1510),
        sequence(range(1, 21), [0] * 15 + [1] * 5, [0.0] * 15 + [-0.2] * 5),
    ]


def group_of(
    *texts: str,
    group_id: str = "0.0.1.0",
    row: dict[str, Any] | None = None,
    num_sequences: int = 1,
    evaluation: bool = False,
) -> rollout_pb2.RolloutGroup:
    """One rollout a text, each with `num_sequences` training sequences."""
    user = rollout_pb2.ChatMessage(role="user", content="Solve.")
    group = rollout_pb2.RolloutGroup(
        request=rollout_pb2.RolloutRequest(
            group_id=group_id,
            row_index=17,
            messages=[user],
            row_json=json.dumps(row or {}),
            evaluation=evaluation,
        ),
        oldest_version=3,
        newest_version=4,
        producer="generator-0",
    )
    for number, text in enumerate(texts):
        group.rollouts.add(
            rollout_id=f"{group_id}/{number}",
            completion=[rollout_pb2.ChatMessage(role="assistant", content=text)],
            sequences=[sequence() for _ in range(num_sequences)],
            end_reason=rollout_pb2.END_REASON_STOP,
        )
    return group
