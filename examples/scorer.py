"""A scorer of somebody else's: groups in, scored samples out. It prefers short answers.

python examples/scorer.py redis://host:port/0 RUN --scripts services/common/scripts --capacity 32
"""

import argparse
import signal
import statistics
from pathlib import Path

from google.protobuf.message import DecodeError
from headrace.v1 import rollout_pb2, sample_pb2
from stage import Entry, Stage


def reward(rollout: rollout_pb2.Rollout) -> float:
    """Yours. This one: the shorter the last message, the better."""
    return 1 / (1 + len(rollout.completion[-1].content if rollout.completion else ""))


def score(group: rollout_pb2.RolloutGroup) -> sample_pb2.ScoredGroup:
    """Rewards, advantages relative to the group, and the sequences to train on."""
    rewards = [reward(rollout) for rollout in group.rollouts]
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    equal = max(rewards) - min(rewards) <= 1e-6 * max(1, abs(mean))
    request = group.request
    scored = sample_pb2.ScoredGroup(
        group_id=request.group_id,
        row_index=request.row_index,
        oldest_version=group.oldest_version,
        newest_version=group.newest_version,
        zero_signal=equal or request.evaluation,
        evaluation=request.evaluation,
        generator=group.producer,
        scorer="short-answers",
    )
    for rollout, value in zip(group.rollouts, rewards, strict=True):
        name = rollout.rollout_id
        advantage = 0.0 if scored.zero_signal else (value - mean) / (std + 1e-8)
        told = scored.rollouts.add(rollout_id=name, reward=value, advantage=advantage)
        told.end_reason = rollout.end_reason
        for index, sequence in enumerate(() if request.evaluation else rollout.sequences):
            scored.samples.add(rollout_id=name, index=index, sequence=sequence, advantage=advantage)
    return scored


def work(stage: Stage, entry: Entry) -> None:
    """One entry, to one of its three ends."""
    try:
        group = rollout_pb2.RolloutGroup.FromString(entry.data)
    except DecodeError as error:
        return stage.refuse(entry, reason=f"not a RolloutGroup: {error}")
    if group.request.group_id.encode() != entry.group:
        return stage.refuse(entry, reason=f"its bytes are of group {group.request.group_id!r}")
    if len(group.rollouts) < (1 if entry.evaluation else 2):
        return stage.tombstone(entry, reason="failed")
    scored = score(group)
    if not scored.samples and not entry.evaluation:
        return stage.tombstone(entry, reason="no_trained_tokens")
    n = len(scored.samples) or len(scored.rollouts)
    return stage.hand_off(entry, scored.SerializeToString(), n=n)


def main() -> None:
    """Score until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="redis://host:port/0")
    parser.add_argument("run", help="the recipe's run")
    parser.add_argument("--scripts", type=Path, required=True, help="folder of the Lua files")
    parser.add_argument("--capacity", type=int, required=True, help="queue.samples_capacity")
    parser.add_argument("--claim-after-s", type=float, default=30, help="queue.claim_after_s")
    given = vars(parser.parse_args())
    stage = Stage(given.pop("url"), given.pop("run"), "groups", **given)
    signal.signal(signal.SIGTERM, lambda *_: stage.stopping.set())
    while not stage.stopping.is_set():
        if (entry := stage.take()) is not None:
            work(stage, entry)


if __name__ == "__main__":
    main()
