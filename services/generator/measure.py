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
    """Record the conversations of one group made for training."""
    recorder.count("rollout/failed_total", sum(failed.values()))
    for reason, number in failed.items():
        recorder.count(f"rollout/failed/{reason}", number)
    for conversation in conversations:
        _rollout(conversation, recorder)
        _transitions(conversation, recorder)
        _completion(conversation, recorder)
        if conversation.equipped:
            _calls(conversation, recorder)


def _rollout(conversation: Conversation, recorder: Recorder) -> None:
    turns = conversation.turns
    recorder.observe("rollout/duration_s", conversation.duration_s)
    recorder.observe("rollout/engine_s", sum(turn.duration_s for turn in turns))
    recorder.observe("rollout/turns_mean", len(turns))
    recorder.observe("rollout/turns_max", len(turns))
    recorder.ratio("rollout/samples_per_rollout", len(conversation.sequences), 1)
    recorder.count(f"rollout/ended/{END_NAMES[conversation.end_reason]}")
    reprefill = sum(turn.reprefill_tokens for turn in turns)
    if reprefill:
        recorder.count("perf/weight_sync_reprefill_tokens", reprefill)
    if conversation.reset_s is not None:
        recorder.observe("env/reset_s", conversation.reset_s)
    if conversation.reward_s is not None:
        recorder.observe("env/reward_s", conversation.reward_s)


def _transitions(conversation: Conversation, recorder: Recorder) -> None:
    transitions = conversation.transitions
    if transitions.untrained_sequences:
        recorder.count("rollout/untrained_sequence_total", transitions.untrained_sequences)
    if conversation.generated_tokens:
        recorder.ratio(
            "rollout/demoted_tokens_frac",
            transitions.demoted_tokens,
            conversation.generated_tokens,
        )
    if transitions.total:
        recorder.ratio("rollout/fork_frac", transitions.forked, transitions.total)
        recorder.ratio("rollout/realign_frac", transitions.realigned, transitions.total)
        recorder.ratio("rollout/drift_tokens_mean", transitions.drift_tokens, transitions.total)
        recorder.observe("rollout/drift_tokens_max", transitions.max_drift_tokens)


def _completion(conversation: Conversation, recorder: Recorder) -> None:
    tokens = conversation.generated_tokens
    recorder.ratio("completions/mean_length", tokens, 1)
    recorder.observe("completions/max_length", tokens)
    recorder.observe("completions/min_length", tokens)
    recorder.ratio("completions/clipped_ratio", float(_clipped(conversation)), 1)


def _clipped(conversation: Conversation) -> bool:
    """Its last turn ended by length, on none of the model's end tokens."""
    return conversation.turns[-1].finish_reason == "length"


def _calls(conversation: Conversation, recorder: Recorder) -> None:
    recorder.observe("rollout/tool_s", conversation.tool_s)
    recorder.observe("rollout/env_s", conversation.env_s)
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
