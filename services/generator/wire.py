"""Conversations and messages as they travel: to protobuf and back."""

import json
from typing import Any

from headrace.v1 import rollout_pb2

from services.generator.types import CallResult, Conversation, Message, Transitions


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


def _fields(message: Message) -> dict[str, Any]:
    """Of a ChatMessage: the inverse of what read_prompt() does with one."""
    return {
        "role": message["role"],
        "content": message["content"],
        "tool_calls": [
            rollout_pb2.ToolCall(
                id=call["id"],
                name=printable(call["function"]["name"]),
                arguments_json=json.dumps(call["function"]["arguments"]),
            )
            for call in message.get("tool_calls", ())
        ],
        "tool_call_id": message.get("tool_call_id", ""),
        "name": message.get("name", ""),
        "reasoning": message.get("reasoning_content", ""),
    }


def write_rollout(conversation: Conversation, *, rollout_id: str) -> rollout_pb2.Rollout:
    """The message that scorers read."""
    rollout = rollout_pb2.Rollout()
    _fill(rollout, conversation, rollout_id=rollout_id)
    return rollout


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
    group = rollout_pb2.RolloutGroup(
        request=request,
        failed=failed,
        oldest_version=versions[0],
        newest_version=versions[1],
        producer=producer,
    )
    for generation, conversation in conversations.items():
        _fill(group.rollouts.add(), conversation, rollout_id=f"{request.group_id}/{generation}")
    return group


def _fill(rollout: rollout_pb2.Rollout, conversation: Conversation, *, rollout_id: str) -> None:
    """Write a conversation where it is to be: a message that is given to another as a part of it is
    encoded and read again, all its tokens included.
    """
    rollout.rollout_id = rollout_id
    rollout.end_reason = conversation.end_reason
    rollout.duration_s = conversation.duration_s
    rollout.environment = conversation.environment
    if conversation.environment_reward is not None:
        rollout.environment_reward = conversation.environment_reward
    rollout.tool_s, rollout.env_s = conversation.tool_s, conversation.env_s
    for message in conversation.completion:
        rollout.completion.add(**_fields(message))
    for message in conversation.prompt or ():
        rollout.prompt.add(**_fields(message))
    for turn in conversation.turns:
        rollout.turns.add(
            num_prompt_tokens=turn.num_prompt_tokens,
            num_generated_tokens=turn.num_generated_tokens,
            text=turn.text,
            finish_reason=turn.finish_reason,
            duration_s=turn.duration_s,
            calls=[_call(result) for result in turn.calls],
        )
    rollout.transitions.CopyFrom(_transitions(conversation.transitions))
    for sequence in conversation.sequences:
        rollout.sequences.add(
            token_ids=sequence.token_ids.astype("<u4", copy=False).tobytes(),
            trained_mask=sequence.trained_mask.astype("u1", copy=False).tobytes(),
            logprobs=sequence.logprobs.astype("<f4", copy=False).tobytes(),
            spans=[
                rollout_pb2.VersionSpan(version=span.version, start=span.start, end=span.end)
                for span in sequence.spans
            ],
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
