"""What is recorded about conversations."""

from collections import Counter

from headrace.v1 import rollout_pb2 as wire

from services.common.recorder import Recorder
from services.generator.types import Conversation

END_NAMES = {
    wire.END_REASON_STOP: "stop",
    wire.END_REASON_LENGTH: "length",
    wire.END_REASON_CONTEXT: "context",
    wire.END_REASON_TURNS: "turns",
    wire.END_REASON_TIME: "time",
}
"""As metrics spell them."""


def measure(conversations: list[Conversation], failed: dict[str, int], recorder: Recorder) -> None:
    """Record the conversations of one group made for training: of most numbers all conversations'
    values in one call, since a call costs more than what it does with a value."""
    recorder.count("rollout/failed_total", sum(failed.values()))
    for reason, number in failed.items():
        recorder.count(f"rollout/failed/{reason}", number)
    if not conversations:
        return
    tokens = [conversation.generated_tokens for conversation in conversations]
    _rollouts(conversations, recorder)
    _transitions(conversations, tokens, recorder)
    _completions(conversations, tokens, recorder)
    for conversation in conversations:
        if conversation.equipped:
            _calls(conversation, recorder)


def _rollouts(conversations: list[Conversation], recorder: Recorder) -> None:
    turns = [len(c.turns) for c in conversations]
    recorder.observe_many("rollout/duration_s", [c.duration_s for c in conversations])
    recorder.observe_many(
        "rollout/engine_s", [sum([turn.duration_s for turn in c.turns]) for c in conversations]
    )
    recorder.observe_many(("rollout/turns_mean", "rollout/turns_max"), turns)
    sequences = sum([len(c.sequences) for c in conversations])
    recorder.ratio("rollout/samples_per_rollout", sequences, len(conversations))
    ended = Counter([c.end_reason for c in conversations])
    for reason, number in ended.items():
        recorder.count(f"rollout/ended/{END_NAMES[reason]}", number)
    reprefill = sum([turn.reprefill_tokens for c in conversations for turn in c.turns])
    if reprefill:
        recorder.count("perf/weight_sync_reprefill_tokens", reprefill)
    # Without an environment there is neither.
    recorder.observe_many(
        "env/reset_s", [c.reset_s for c in conversations if c.reset_s is not None]
    )
    recorder.observe_many(
        "env/reward_s", [c.reward_s for c in conversations if c.reward_s is not None]
    )


def _transitions(conversations: list[Conversation], tokens: list[int], recorder: Recorder) -> None:
    every = [conversation.transitions for conversation in conversations]
    untrained = sum([transitions.untrained_sequences for transitions in every])
    if untrained:
        recorder.count("rollout/untrained_sequence_total", untrained)
    recorder.ratio(
        "rollout/demoted_tokens_frac",
        sum([each.demoted_tokens for each, number in zip(every, tokens, strict=True) if number]),
        sum(tokens),
    )
    several = [transitions for transitions in every if transitions.total]
    if not several:
        return
    total = sum(transitions.total for transitions in several)
    for key, number in (
        ("rollout/fork_frac", sum(transitions.forked for transitions in several)),
        ("rollout/realign_frac", sum(transitions.realigned for transitions in several)),
        ("rollout/drift_tokens_mean", sum(transitions.drift_tokens for transitions in several)),
    ):
        recorder.ratio(key, number, total)
    recorder.observe_many("rollout/drift_tokens_max", [t.max_drift_tokens for t in several])


def _completions(conversations: list[Conversation], tokens: list[int], recorder: Recorder) -> None:
    number = len(conversations)
    recorder.ratio("completions/mean_length", sum(tokens), number)
    recorder.observe_many(("completions/max_length", "completions/min_length"), tokens)
    clipped = sum([_clipped(conversation) for conversation in conversations])
    recorder.ratio("completions/clipped_ratio", clipped, number)


def _clipped(conversation: Conversation) -> bool:
    """Its last turn ended by length, on none of the model's end tokens."""
    return conversation.turns[-1].finish_reason == "length"


def _calls(conversation: Conversation, recorder: Recorder) -> None:
    recorder.observe("rollout/tool_s", conversation.tool_s)
    recorder.observe("rollout/env_s", conversation.env_s)
    if conversation.environment:
        recorder.observe(f"rollout/env_s/{conversation.environment}", conversation.env_s)
    recorder.ratio("tools/loop_exhausted_frac", float(conversation.asking), 1)
    results = [result for turn in conversation.turns for result in turn.calls]
    recorder.observe("tools/call_frequency", len(results))
    for turn in conversation.turns:
        if turn.calls:
            recorder.observe("tools/parallel_calls_mean", len(turn.calls))
    if not results:
        return
    failures = sum(result.failed for result in results)
    recorder.ratio("tools/failure_frequency", failures, len(results))
    unknown = sum(not r.declared and r.call.name is not None for r in results)
    if unknown:
        recorder.count("tools/unknown_name_total", unknown)
    recorder.observe_many("tools/latency_s", [result.duration_s for result in results])
    # Names that a policy invents never become a key.
    declared = [result for result in results if result.declared]
    calls, failed = Counter[str](), Counter[str]()
    for result in declared:
        assert result.call.name is not None
        calls[result.call.name] += 1
        failed[result.call.name] += result.failed
        recorder.observe(f"tools/{result.call.name}/latency_s", result.duration_s)
    for name, number in calls.items():
        recorder.count(f"tools/{name}/call_total", number)
        recorder.count(f"tools/{name}/failure_total", failed[name])
