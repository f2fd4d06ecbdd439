"""Traces: the conversations of a group that the generator marked, with what was made of them."""

from collections.abc import Iterator

from headrace.v1 import rollout_pb2, sample_pb2, trace_pb2

from services.common.recorder import Recorder
from services.common.traces_config import Traces


def send(
    group: rollout_pb2.RolloutGroup,
    scored: sample_pb2.ScoredGroup,
    *,
    settings: Traces,
    recorder: Recorder,
) -> None:
    """Give the traces of a scored group to the recorder, which sends them or drops and counts them;
    one that is larger than `traces.max_bytes` is counted here.
    """
    for trace in traces_of(group, scored, per_version=settings.per_version):
        if trace.ByteSize() > settings.max_bytes:
            recorder.count("recorder/trace_dropped/too_large")
        else:
            recorder.trace(trace)


def traces_of(
    group: rollout_pb2.RolloutGroup, scored: sample_pb2.ScoredGroup, *, per_version: int
) -> Iterator[trace_pb2.RolloutTrace]:
    """The traces of a group; `scored` has its conversations in the same order."""
    for rollout, verdict in zip(group.rollouts, scored.rollouts, strict=True):
        if not rollout.HasField("marks"):
            continue
        trace = trace_pb2.RolloutTrace(
            group_id=scored.group_id,
            row_index=scored.row_index,
            version=scored.oldest_version,
            prompt=rollout.prompt or group.request.messages,
            scored=verdict,
            generator=scored.generator,
            scorer=scored.scorer,
            per_version=per_version,
        )
        # As an argument it would be encoded and read again.
        trace.rollout.CopyFrom(rollout)
        trace.rollout.ClearField("prompt")
        yield trace
