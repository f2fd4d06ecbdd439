"""Greedy evaluation through the same generators and scorers, on streams of its own.

Never mixed into training's numbers or ledger. Every row is asked once per evaluation; an answer of
an older policy version than wanted is asked again, so a result is of exactly one policy.
"""

import json
import time
from dataclasses import dataclass

import structlog
from google.protobuf.message import DecodeError
from headrace.v1 import rollout_pb2, sample_pb2

from services.common.config import Recipe
from services.trainer.dataset import Row, Rows
from services.trainer.run_queue import RunQueue


class EvaluationFailed(RuntimeError):
    """The answers did not come in time."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found."""

    accuracy: float | None
    """Share of scored rows whose reward is at least evaluation.correct_at; None when none was."""
    reward: float | None
    """Mean over scored rows; None when none was."""
    rows: int
    """Rows asked."""
    failed: int
    """Rows without a score: generation failed, or every reward function abstained."""
    version: int
    seconds: float


def request_of(
    row: Row, *, group_id: str, recipe: Recipe, evaluation: bool
) -> rollout_pb2.RolloutRequest:
    """The request for one row: a whole group for training, one greedy conversation for
    evaluation."""
    generation = recipe.generation
    return rollout_pb2.RolloutRequest(
        group_id=group_id,
        row_index=row.index,
        messages=[
            rollout_pb2.ChatMessage(role=message["role"], content=message["content"])
            for message in row.messages
        ],
        row_json=json.dumps(row.columns),
        sampling=rollout_pb2.Sampling(
            temperature=0.0 if evaluation else generation.temperature,
            num_generations=1 if evaluation else generation.num_generations,
            max_completion_tokens=generation.max_completion_tokens,
        ),
        evaluation=evaluation,
    )


async def evaluate(
    queue: RunQueue, rows: Rows, recipe: Recipe, *, number: int, version: int
) -> Evaluation:
    """Ask all rows of policy `version`, wait for the answers. Raises EvaluationFailed after
    trainer.eval_timeout_s."""
    begin_s = time.monotonic()
    open_rows: dict[str, int] = {}
    tries = dict.fromkeys(range(len(rows)), 0)

    async def ask(position: int) -> None:
        group_id = f"eval.{number}-{tries[position]}.{queue.attempt}.{position}"
        tries[position] += 1
        open_rows[group_id] = position
        request = request_of(rows[position], group_id=group_id, recipe=recipe, evaluation=True)
        await queue.dispatch(group_id, request.SerializeToString(), evaluation=True)

    for position in range(len(rows)):
        await ask(position)
    rewards: list[float] = []
    failed = 0
    while open_rows:
        if time.monotonic() - begin_s > recipe.trainer.eval_timeout_s:
            raise EvaluationFailed(
                f"evaluation {number}: {len(open_rows)} of {len(rows)} answers are missing after "
                f"{recipe.trainer.eval_timeout_s:.0f} s (trainer.eval_timeout_s)"
            )
        deliveries = await queue.take(64, evaluation=True)
        for delivery in deliveries:
            position = open_rows.pop(delivery.group_id, None)  # type: ignore[arg-type]
            if position is None:
                continue  # a second answer
            if delivery.reason:
                failed += 1
                continue
            try:
                scored = sample_pb2.ScoredGroup.FromString(delivery.data)
            except DecodeError as error:
                structlog.get_logger().error(
                    "an evaluation's answer cannot be read", group=delivery.group_id, why=str(error)
                )
                failed += 1
                continue
            if scored.oldest_version < version:
                await ask(position)
            elif scored.rollouts and scored.rollouts[0].HasField("reward"):
                rewards.append(scored.rollouts[0].reward)
            else:
                failed += 1
        await queue.discard_evaluation([delivery.entry_id for delivery in deliveries])
    correct = sum(reward >= recipe.evaluation.correct_at for reward in rewards)
    return Evaluation(
        accuracy=correct / len(rewards) if rewards else None,
        reward=sum(rewards) / len(rewards) if rewards else None,
        rows=len(rows),
        failed=failed,
        version=version,
        seconds=time.monotonic() - begin_s,
    )
