"""Conversations and messages as they travel: to protobuf and back."""

import json
from typing import Any

from headrace.v1 import rollout_pb2

from services.generator.types import CallResult, Conversation, Message, Sequence, Transitions, Turn


class Malformed(ValueError):
    """A request that can never be worked on; the message is the reason in the dead letters."""


def read_row(request: rollout_pb2.RolloutRequest) -> dict[str, Any]:
    """The dataset row's columns. Raises Malformed."""
    try:
        row = json.loads(request.row_json or "{}")
    except (ValueError, RecursionError) as error:
        raise Malformed(f"row_json is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise Malformed(f"row_json is a {type(row).__name__}, not an object of columns")
    return row


def read_prompt(request: rollout_pb2.RolloutRequest) -> list[Message]:
    """The request's messages. Raises Malformed."""
    try:
        return [_read_message(message) for message in request.messages]
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the arguments of a tool call are not JSON: {error}") from None


def _read_message(message: rollout_pb2.ChatMessage) -> Message:
    """A message as chat templates take it; what is not set is left out."""
    read: Message = {"role": message.role, "content": message.content}
    if message.tool_calls:
        read["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments_json)},
            }
            for call in message.tool_calls
        ]
    for name, value in (
        ("tool_call_id", message.tool_call_id),
        ("name", message.name),
        ("reasoning_content", message.reasoning),
    ):
        if value:
            read[name] = value
    return read


def write_message(message: Message) -> rollout_pb2.ChatMessage:
    """The inverse of what read_prompt() does with one."""
    return rollout_pb2.ChatMessage(
        role=message["role"],
        content=message["content"],
        tool_calls=[
            rollout_pb2.ToolCall(
                id=call["id"],
                name=printable(call["function"]["name"]),
                arguments_json=json.dumps(call["function"]["arguments"]),
            )
            for call in message.get("tool_calls", ())
        ],
        tool_call_id=message.get("tool_call_id", ""),
        name=message.get("name", ""),
        reasoning=message.get("reasoning_content", ""),
    )


def write_rollout(conversation: Conversation, *, rollout_id: str) -> rollout_pb2.Rollout:
    """The message that scorers read."""
    return rollout_pb2.Rollout(
        rollout_id=rollout_id,
        completion=[write_message(message) for message in conversation.completion],
        turns=[_turn(turn) for turn in conversation.turns],
        sequences=[_sequence(sequence) for sequence in conversation.sequences],
        end_reason=conversation.end_reason,
        duration_s=conversation.duration_s,
        prompt=[write_message(message) for message in conversation.prompt or ()],
        environment=conversation.environment,
        environment_reward=conversation.environment_reward,
        transitions=_transitions(conversation.transitions),
        tool_s=conversation.tool_s,
        env_s=conversation.env_s,
    )


def write_group(
    request: rollout_pb2.RolloutRequest,
    conversations: dict[int, Conversation],
    *,
    failed: dict[str, int],
    versions: tuple[int, int],
    producer: str,
) -> rollout_pb2.RolloutGroup:
    """The message for the `groups` stream. `versions` are the oldest and the newest over all
    trained tokens: the oldest decides the group's staleness.
    """
    return rollout_pb2.RolloutGroup(
        request=request,
        rollouts=[
            write_rollout(conversation, rollout_id=f"{request.group_id}/{generation}")
            for generation, conversation in conversations.items()
        ],
        failed=failed,
        oldest_version=versions[0],
        newest_version=versions[1],
        producer=producer,
    )


def _turn(turn: Turn) -> rollout_pb2.Turn:
    return rollout_pb2.Turn(
        num_prompt_tokens=turn.num_prompt_tokens,
        num_generated_tokens=turn.num_generated_tokens,
        text=turn.text,
        finish_reason=turn.finish_reason,
        duration_s=turn.duration_s,
        calls=[_call(result) for result in turn.calls],
    )


def _call(result: CallResult) -> rollout_pb2.CallResult:
    arguments = result.call.arguments
    return rollout_pb2.CallResult(
        name=printable(result.call.name or ""),
        arguments=printable(result.call.text) if arguments is None else json.dumps(arguments),
        text=result.text,
        failed=result.failed,
        declared=result.declared,
        by_environment=result.by_environment,
        duration_s=result.duration_s,
    )


def _sequence(sequence: Sequence) -> rollout_pb2.Sequence:
    return rollout_pb2.Sequence(
        token_ids=sequence.token_ids.astype("<u4").tobytes(),
        trained_mask=sequence.trained_mask.astype("u1").tobytes(),
        logprobs=sequence.logprobs.astype("<f4").tobytes(),
        spans=[
            rollout_pb2.VersionSpan(version=span.version, start=span.start, end=span.end)
            for span in sequence.spans
        ],
    )


def _transitions(transitions: Transitions) -> rollout_pb2.Transitions:
    return rollout_pb2.Transitions(
        clean=transitions.clean,
        realigned=transitions.realigned,
        forked=transitions.forked,
        demoted_tokens=transitions.demoted_tokens,
        drift_tokens=transitions.drift_tokens,
        max_drift_tokens=transitions.max_drift_tokens,
        untrained_sequences=transitions.untrained_sequences,
    )


def printable(text: str) -> str:
    """`text` with halves of surrogate pairs replaced: JSON that a model or a tool writes can name
    them, and neither tokenizers nor protobuf take them.
    """
    return text.encode("utf-8", "replace").decode()
