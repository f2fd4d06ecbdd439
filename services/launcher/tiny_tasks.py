"""What tiny models are warmed up on: conversations to imitate, and those that accuracy is measured
on.

Cheap to import; reasoning-gym is loaded by the tasks that need it.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]


@dataclass(frozen=True)
class Demonstration:
    """A conversation that goes well."""

    messages: list[Message]
    question: int = 0
    """Of those that accuracy is measured on: what it answers. A question may have several good
    answers, whose probabilities add up."""


@dataclass(frozen=True)
class Lessons:
    """What a warm start needs to know of a task."""

    shown: list[Demonstration]
    """Every turn of the assistant is imitated."""
    asked: list[Demonstration]
    """Every turn of the assistant is part of the answer."""
    tools: list[dict[str, Any]] | None = None
    """As chat templates take them."""


def _tool(name: str, *parameters: str) -> dict[str, Any]:
    """What the tiny template reads of a tool's schema."""
    properties = {parameter: {"type": "integer"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def _call(name: str, **arguments: int) -> str:
    """A call in the Hermes format."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def arithmetic(seed: int) -> Lessons:
    """One-digit sums and differences: all 200 questions, each with its answer."""
    num_questions = 200
    # So many draws that none of the questions is missing.
    rows = _reasoning_gym(
        "chain_sum",
        size=20 * num_questions,
        seed=seed,
        min_terms=2,
        max_terms=2,
        min_digits=1,
        max_digits=1,
    )
    pairs = sorted({(row["question"], row["answer"]) for row in rows})
    assert len(pairs) == num_questions, len(pairs)
    demonstrations = [
        Demonstration([_said("user", question), _said("assistant", answer)], number)
        for number, (question, answer) in enumerate(pairs)
    ]
    return Lessons(shown=demonstrations, asked=demonstrations)


CALCULATOR_TOOLS = {"+": "add", "*": "multiply"}
"""By operator."""

CALCULATOR_SHOWN, CALCULATOR_ASKED = 2000, 32
"""Questions of the calculator."""


def calculator(seed: int) -> Lessons:
    """Sums and products of numbers up to 100. Each is answered twice: at once, which the model can
    only guess at, and after asking a tool.
    """
    rows = _reasoning_gym(
        "basic_arithmetic",
        size=CALCULATOR_SHOWN + CALCULATOR_ASKED,
        seed=seed,
        min_terms=2,
        max_terms=2,
        min_digits=2,
        max_digits=2,
        operators=list(CALCULATOR_TOOLS),
        allow_parentheses=False,
        allow_negation=False,
        format_style="natural",
    )
    demonstrations = []
    for number, row in enumerate(rows):
        first, operator, second = row["metadata"]["expression"].split()
        asked, answered = _said("user", row["question"]), _said("assistant", row["answer"])
        call = _call(CALCULATOR_TOOLS[operator], a=int(first), b=int(second))
        steps = [_said("assistant", call), _said("tool", row["answer"])]
        demonstrations.append(Demonstration([asked, answered], number))
        demonstrations.append(Demonstration([asked, *steps, answered], number))
    return Lessons(
        shown=demonstrations[: 2 * CALCULATOR_SHOWN],
        asked=demonstrations[2 * CALCULATOR_SHOWN :],
        tools=[_tool(name, "a", "b") for name in CALCULATOR_TOOLS.values()],
    )


GREATEST, MAX_GUESSES = 15, 6
"""Guess: numbers are from 1 to the first; a game has so many guesses at most."""

GUESS_PROMPT = f"Guess my number. It is from 1 to {GREATEST}."

GUESS_SHOWN = 1000
"""Games."""

HALVING = 0.35
"""Share of the games that a player who halves has played."""


def guess(seed: int) -> Lessons:
    """Games that two players have won: one halves what is left each time, the other guesses
    anywhere. To be asked for are the games of the first, for every secret.
    """
    draw = random.Random(seed)
    shown = []
    for number in range(GUESS_SHOWN):
        secret = draw.randint(1, GREATEST)
        game = halving(secret) if number < HALVING * GUESS_SHOWN else _anywhere(secret, draw)
        shown.append(_game(game, secret))
    asked = [_game(halving(secret), secret) for secret in range(1, GREATEST + 1)]
    return Lessons(shown=shown, asked=asked, tools=[_tool("guess", "number")])


def halving(secret: int) -> list[int]:
    """The guesses of the player who halves. Example: 5 is found by 8, 4, 6, 5."""
    low, high = 1, GREATEST
    guesses: list[int] = []
    while not guesses or guesses[-1] != secret:
        middle = (low + high) // 2
        guesses.append(middle)
        low, high = (middle + 1, high) if middle < secret else (low, middle - 1)
    return guesses


def _anywhere(secret: int, draw: random.Random) -> list[int]:
    """The guesses of the player who does not listen, in a game that was won: often by luck."""
    while True:
        guesses = [draw.randint(1, GREATEST) for _ in range(MAX_GUESSES)]
        if secret in guesses:
            return guesses[: guesses.index(secret) + 1]


def _game(guesses: list[int], secret: int) -> Demonstration:
    """A game that is won with the last guess."""
    messages = [_said("user", GUESS_PROMPT)]
    for number in guesses:
        messages.append(_said("assistant", _call("guess", number=number)))
        if number != secret:
            messages.append(_said("tool", "higher" if number < secret else "lower"))
    return Demonstration(messages, question=secret)


def _reasoning_gym(task: str, *, size: int, seed: int, **params: Any) -> list[dict[str, Any]]:
    # Here, since the package takes seconds to import.
    import reasoning_gym

    return list(reasoning_gym.create_dataset(task, size=size, seed=seed, **params))


Teach = Callable[[int], Lessons]
"""Lessons by seed."""
