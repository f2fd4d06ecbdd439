"""Greedy evaluation through the same generators and scorers, on streams of its own.

Never mixed into training's numbers or ledger. Every row is asked once per evaluation; an answer of
an older policy version than wanted is asked again, so a result is of exactly one policy.
"""

import json
import time
from dataclasses import dataclass, field

import structlog
from google.protobuf.message import DecodeError
from headrace.v1 import rollout_pb2, sample_pb2

from services.common.config import Recipe
from services.common.recorder import Recorder
from services.trainer.dataset import Row, Rows
from services.trainer.run_queue import Delivery, RunQueue


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
    step: int = 0
    """Optimizer steps of the run when it was asked for."""


@dataclass
class Answers:
    """What is recorded of an evaluation beyond its summary: answers of the version asked for, and
    of each row one."""

    rewards: list[float] = field(default_factory=list)
    """Totals of scored rows."""
    by_function: dict[str, list[float]] = field(default_factory=dict)
    """One function's rewards, where it did not abstain."""
    generated_tokens: list[int] = field(default_factory=list)
    """By conversation."""
    num_clipped: int = 0
    """Conversations whose last turn ended by length."""
    num_failed: int = 0
    """Rows without a reward."""

    def add(self, rollout: sample_pb2.ScoredRollout) -> None:
        """One row's conversation."""
        self.generated_tokens.append(rollout.num_generated_tokens)
        self.num_clipped += rollout.clipped
        for function in rollout.functions:
            if function.HasField("reward"):
                self.by_function.setdefault(function.name, []).append(function.reward)
        if rollout.HasField("reward"):
            self.rewards.append(rollout.reward)
        else:
            self.num_failed += 1


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
    queue: RunQueue, rows: Rows, recipe: Recipe, *, number: int, version: int, step: int
) -> tuple[Evaluation, Answers]:
    """Ask all rows of policy `version`, wait for the answers. Raises EvaluationFailed after
    trainer.eval_timeout_s."""
    begin_s = time.monotonic()
    open_rows: dict[str, int] = {}
    tries = dict.fromkeys(range(len(rows)), 0)
    answers = Answers()

    async def ask(position: int) -> None:
        group_id = f"eval.{number}-{tries[position]}.{queue.attempt}.{position}"
        tries[position] += 1
        open_rows[group_id] = position
        request = request_of(rows[position], group_id=group_id, recipe=recipe, evaluation=True)
        await queue.dispatch(group_id, request.SerializeToString(), evaluation=True)

    for position in range(len(rows)):
        await ask(position)
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
            scored = _read(delivery)
            if scored is None:
                answers.num_failed += 1
            elif scored.oldest_version < version:
                await ask(position)
            else:
                answers.add(scored.rollouts[0])
        await queue.discard_evaluation([delivery.entry_id for delivery in deliveries])
    rewards = answers.rewards
    correct = sum(reward >= recipe.evaluation.correct_at for reward in rewards)
    found = Evaluation(
        accuracy=correct / len(rewards) if rewards else None,
        reward=sum(rewards) / len(rewards) if rewards else None,
        rows=len(rows),
        failed=answers.num_failed,
        version=version,
        seconds=time.monotonic() - begin_s,
        step=step,
    )
    return found, answers


def _read(delivery: Delivery) -> sample_pb2.ScoredGroup | None:
    """The answer to one row; None when there is none."""
    if delivery.reason:
        return None
    try:
        scored = sample_pb2.ScoredGroup.FromString(delivery.data)
    except DecodeError as error:
        structlog.get_logger().error(
            "an evaluation's answer cannot be read", group=delivery.group_id, why=str(error)
        )
        return None
    return scored if scored.rollouts else None


def record_evaluation(record: Recorder, found: Evaluation, answers: Answers, *, step: int) -> None:
    """Record what an evaluation found under one step."""
    record.observe("eval/version", found.version, step=step)
    record.count("eval/failed_total", answers.num_failed, step=step)
    if answers.rewards:
        record.observe_many("eval/reward", answers.rewards, step=step)
    for name, rewards in answers.by_function.items():
        record.observe_many(f"eval/rewards/{name}", rewards, step=step)
    if number := len(answers.generated_tokens):
        record.ratio("eval/mean_length", sum(answers.generated_tokens), number, step=step)
        record.ratio("eval/clipped_ratio", answers.num_clipped, number, step=step)
