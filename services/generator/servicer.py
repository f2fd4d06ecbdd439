"""GeneratorService over gRPC: conversations on demand, outside training."""

import uuid
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import grpc
import numpy as np
from headrace.v1 import generator_pb2, generator_pb2_grpc, rollout_pb2

from services.common import grpc_kit
from services.generator import wire
from services.generator.group import Group, GroupRunner
from services.generator.serving import Serving
from services.generator.template import ChatTemplate
from services.generator.types import Sequence

MAX_GENERATIONS = 1024


class Servicer(generator_pb2_grpc.GeneratorServiceServicer):  # type: ignore[misc]
    """Answers Generate while the replica serves; see `open_with()`."""

    def __init__(self, phase: Callable[[], str]) -> None:
        self._phase = phase
        self._open: tuple[GroupRunner, ChatTemplate, Serving] | None = None

    def open_with(self, runner: GroupRunner, template: ChatTemplate, serving: Serving) -> None:
        """Answer from now on."""
        self._open = runner, template, serving

    def close(self) -> None:
        """Refuse from now on: not started yet, or draining."""
        self._open = None

    async def Generate(
        self, request: generator_pb2.GenerateRequest, context: Any
    ) -> generator_pb2.GenerateResponse:
        """Run conversations of one prompt now."""
        if self._open is None:
            await grpc_kit.abort(
                context,
                grpc.StatusCode.UNAVAILABLE,
                "NOT_READY",
                f"not ready: {self._phase()}",
            )
        assert self._open is not None
        runner, template, serving = self._open
        sampling = request.sampling
        if (
            not request.messages
            or not 1 <= sampling.num_generations <= MAX_GENERATIONS
            or sampling.max_completion_tokens < 1
        ):
            await grpc_kit.abort(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                "BAD_REQUEST",
                f"messages, sampling.num_generations (1 to {MAX_GENERATIONS}) and "
                "sampling.max_completion_tokens are needed",
            )
        asked = rollout_pb2.RolloutRequest(
            group_id=f"call.{uuid.uuid4().hex}",
            messages=request.messages,
            sampling=sampling,
            row_json=request.row_json,
        )
        try:
            group = await runner.run(asked, training=False)
        except wire.Malformed as error:
            await grpc_kit.abort(
                context, grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST", str(error)
            )
        if not group.conversations:
            reasons = "; ".join(
                f"{n} {reason}: {group.why[reason]}" for reason, n in group.failed.items()
            )
            await grpc_kit.abort(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                "FAILED",
                f"none finished: {reasons}",
            )
        if group.versions is not None:
            await serving.wait_proven(group.versions[1])
        return response(group, template, group_id=asked.group_id)


def response(
    group: Group, template: ChatTemplate, *, group_id: str
) -> generator_pb2.GenerateResponse:
    """A group's conversations with their sequences spelt out for people."""
    conversations = group.conversations
    return generator_pb2.GenerateResponse(
        rollouts=[
            wire.write_rollout(conversation, rollout_id=f"{group_id}/{generation}")
            for generation, conversation in conversations.items()
        ],
        texts=[
            generator_pb2.SequenceText(segments=_segments(sequence, template))
            for conversation in conversations.values()
            for sequence in conversation.sequences
        ],
        failed=group.failed,
        why={reason: wire.printable(words) for reason, words in group.why.items()},
    )


def _segments(sequence: Sequence, template: ChatTemplate) -> Iterator[generator_pb2.Segment]:
    """Runs of tokens that are all trained or all context."""
    cuts = np.flatnonzero(np.diff(sequence.trained_mask.astype(np.int8))) + 1
    bounds = [0, *cuts.tolist(), len(sequence.token_ids)]
    for start, end in pairwise(bounds):
        yield generator_pb2.Segment(
            trained=bool(sequence.trained_mask[start]),
            num_tokens=end - start,
            text=template.spell(sequence.token_ids[start:end].tolist()),
        )
