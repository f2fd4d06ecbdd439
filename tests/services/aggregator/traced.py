"""Traces as scorers send them."""

from collections.abc import Iterable, Mapping
from itertools import count

import numpy as np
from headrace.v1 import metrics_pb2, rollout_pb2, trace_pb2

from services.aggregator.batch import decode
from services.aggregator.ingest import Ingest, Receipt
from tests.services.aggregator.making import NOW_S, Producer

boots = count()


def trace_of(
    rollout_id: str = "0.0.1.1/0",
    *,
    version: int = 3,
    row_index: int = 17,
    reward: float | None = 1.0,
    rewards: Mapping[str, float | None] | None = None,
    tools: Iterable[str] = (),
    end: str = "stop",
    text: str = "Four.",
    age_s: float = 1.0,
    per_version: int = 8,
) -> trace_pb2.RolloutTrace:
    """A conversation of one turn, with a call of each tool; four tokens, of which two are trained;
    scored `age_s` before it is sent.
    """
    group_id = rollout_id.rpartition("/")[0]
    trace = trace_pb2.RolloutTrace(
        group_id=group_id,
        row_index=row_index,
        version=version,
        generator="generator-0",
        scorer="scorer-0",
        at_s=1000.0 - age_s,
        per_version=per_version,
    )
    trace.prompt.add(role="user", content="2 + 2 =")
    rollout, scored = trace.rollout, trace.scored
    rollout.rollout_id = scored.rollout_id = rollout_id
    rollout.end_reason = rollout_pb2.EndReason.Value(f"END_REASON_{end.upper()}")
    rollout.duration_s = 2.5
    rollout.completion.add(role="assistant", content=text)
    turn = rollout.turns.add(
        num_prompt_tokens=2, num_generated_tokens=2, text=text, finish_reason="stop", duration_s=2.0
    )
    for name in tools:
        turn.calls.add(name=name, arguments='{"a": 1}', text="4", declared=True, duration_s=0.25)
    rollout.sequences.add(
        token_ids=np.array([5, 6, 7, 8], "<u4").tobytes(),
        trained_mask=bytes([0, 0, 1, 1]),
        logprobs=np.array([0, 0, -0.5, -0.25], "<f4").tobytes(),
        spans=[
            rollout_pb2.VersionSpan(version=version, start=2, end=3),
            rollout_pb2.VersionSpan(version=version + 1, start=3, end=4),
        ],
    )
    rollout.marks.turn_begins_s.append(0.0)
    rollout.marks.sequences.add(texts=["2+", "2=", "Fo", "ur."])
    if reward is not None:
        scored.reward = reward
    for name, value in ({"exact": reward} if rewards is None else rewards).items():
        scored.functions.add(name=name, reward=value)
    scored.advantage = 0.5
    return trace


def request_of(
    *traces: trace_pb2.RolloutTrace, run: str = "demo", service: str = "scorer"
) -> metrics_pb2.PushDeltasRequest:
    """A batch of a new boot."""
    producer = Producer(f"{service}-0", run=run, service=service, boot_id=f"boot-{next(boots)}")
    request = producer.request()
    request.traces.extend(traces)
    return request


def send(
    ingest: Ingest, *traces: trace_pb2.RolloutTrace, now_s: float = NOW_S, run: str = "demo"
) -> Receipt:
    """Let the aggregator take them."""
    return ingest.take(decode(request_of(*traces, run=run)), now_s=now_s)
