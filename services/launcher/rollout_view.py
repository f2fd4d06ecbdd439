"""Conversations for people: what was said, what was called, and which tokens would be trained."""

from headrace.v1 import generator_pb2, rollout_pb2
from rich.console import Console
from rich.text import Text

ENDS = {
    rollout_pb2.END_REASON_STOP: "the model stopped",
    rollout_pb2.END_REASON_LENGTH: "out of tokens (generation.max_completion_tokens)",
    rollout_pb2.END_REASON_CONTEXT: "the context is full (generator.max_model_len)",
    rollout_pb2.END_REASON_TURNS: "out of turns (generation.max_turns)",
    rollout_pb2.END_REASON_TIME: "out of time (generation.timeout_s)",
}

TRAINED, CONTEXT, HEAD, FAILED = "bold green", "dim", "bold", "red"

MARKS = ("⟦", "⟧")
"""Around trained tokens where there is no colour."""


def print_answer(answer: generator_pb2.GenerateResponse, *, console: Console) -> None:
    """All conversations, one below the other, then those that failed."""
    texts = iter(answer.texts)
    for number, rollout in enumerate(answer.rollouts, start=1):
        _say(console, f"conversation {number} of {len(answer.rollouts)}", HEAD)
        _print_rollout(rollout, [next(texts) for _ in rollout.sequences], console)
        _say(console, "")
    for reason, count in sorted(answer.failed.items()):
        _say(console, f"{count} failed: {reason}: {answer.why[reason]}", FAILED)


def _print_rollout(
    rollout: rollout_pb2.Rollout, texts: list[generator_pb2.SequenceText], console: Console
) -> None:
    for number, turn in enumerate(rollout.turns, start=1):
        _say(
            console,
            f"  turn {number}: {turn.num_prompt_tokens:,} tokens in, "
            f"{turn.num_generated_tokens:,} out ({turn.finish_reason}), {turn.duration_s:.2f} s",
        )
        for call in turn.calls:
            told = "failed" if call.failed else "gave"
            where = " in the environment" if call.by_environment else ""
            style = FAILED if call.failed else ""
            _say(
                console,
                f"    {call.name or '(no call)'} {call.arguments}{where} {told} in "
                f"{call.duration_s:.3f} s: {call.text}",
                style,
            )
    for number, text in enumerate(texts, start=1):
        trained = sum(segment.num_tokens for segment in text.segments if segment.trained)
        tokens = sum(segment.num_tokens for segment in text.segments)
        _say(
            console,
            f"  sequence {number} of {len(texts)}: {tokens:,} tokens, {trained:,} of them trained",
        )
        _say(console, _sequence(text, marked=console.no_color or not console.is_terminal))
    _say(console, f"  {_end(rollout)}")


def _sequence(text: generator_pb2.SequenceText, *, marked: bool) -> Text:
    shown = Text()
    for segment in text.segments:
        said = segment.text
        if marked and segment.trained:
            said = f"{MARKS[0]}{said}{MARKS[1]}"
        shown.append(said, style=TRAINED if segment.trained else CONTEXT)
    return shown


def _end(rollout: rollout_pb2.Rollout) -> str:
    """One line: why it ended, how its turns were joined, and where the time went."""
    parts = [f"ended: {ENDS[rollout.end_reason]}"]
    if len(rollout.turns) > 1:
        seen = rollout.transitions
        parts.append(
            f"turns joined: {seen.clean} clean, {seen.realigned} realigned "
            f"({seen.demoted_tokens} tokens demoted), {seen.forked} forked"
        )
    engine_s = sum(turn.duration_s for turn in rollout.turns)
    parts.append(
        f"{rollout.duration_s:.2f} s (engine {engine_s:.2f}, tools {rollout.tool_s:.2f}, "
        f"environment {rollout.env_s:.2f})"
    )
    if rollout.environment:
        reward = (
            f"{rollout.environment_reward:g}"
            if rollout.HasField("environment_reward")
            else "no reward"
        )
        parts.append(f"environment {rollout.environment}: {reward}")
    return " · ".join(parts)


def _say(console: Console, text: str | Text, style: str = "") -> None:
    console.print(Text(text) if isinstance(text, str) else text, style=style, soft_wrap=True)
