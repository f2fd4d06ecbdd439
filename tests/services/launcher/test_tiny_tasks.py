"""What tiny models are warmed up on, held against the tools and the environment of the recipes."""

import re
from collections.abc import Callable

import pytest

from recipes import calculator
from recipes.guess import Guess
from services.generator.parsing import Hermes
from services.launcher import tiny_tasks, tiny_tokenizer
from services.launcher.tiny_tasks import Demonstration, Lessons

TOOLS = {"add": calculator.add, "multiply": calculator.multiply}


@pytest.mark.parametrize("teach", [tiny_tasks.arithmetic, tiny_tasks.calculator, tiny_tasks.guess])
def test_lessons_are_a_function_of_the_seed(teach: Callable[[int], Lessons]) -> None:
    one, two, other = teach(3), teach(3), teach(4)
    assert one == two
    # The 200 questions of arithmetic are all of them, whatever the seed.
    assert (one == other) is (teach is tiny_tasks.arithmetic)


def test_arithmetic_asks_every_question_once() -> None:
    lessons = tiny_tasks.arithmetic(0)
    assert lessons.asked == lessons.shown
    assert lessons.tools is None
    asked = [
        re.findall(r"(\d) ([+-]) (\d)", each.messages[0]["content"])[-1] for each in lessons.shown
    ]
    assert len(set(asked)) == len(asked) == 200
    for (first, operator, second), each in zip(asked, lessons.shown, strict=True):
        right = int(first) + int(second) if operator == "+" else int(first) - int(second)
        assert each.messages[-1] == {"role": "assistant", "content": str(right)}


def test_the_calculator_is_shown_each_question_with_and_without_the_tool() -> None:
    lessons = tiny_tasks.calculator(0)
    for rows in (lessons.shown, lessons.asked):
        for at_once, by_tool in zip(rows[::2], rows[1::2], strict=True):
            assert at_once.question == by_tool.question
            assert at_once.messages == [by_tool.messages[0], by_tool.messages[-1]]
            answers_by_tool(by_tool)
    assert len(lessons.shown) == 2 * tiny_tasks.CALCULATOR_SHOWN
    assert len({each.question for each in lessons.asked}) == tiny_tasks.CALCULATOR_ASKED


def answers_by_tool(each: Demonstration) -> None:
    """The recipe's own tool says what the demonstration says that it says."""
    question, said, result, answer = (message["content"] for message in each.messages)
    [call] = Hermes().parse(said).calls
    assert call.mistake is None
    assert call.name is not None
    assert call.arguments is not None
    operator = {"add": "+", "multiply": "*"}[call.name]
    assert re.findall(r"(\d+) ([+*]) (\d+)", question) == [
        (str(call.arguments["a"]), operator, str(call.arguments["b"]))
    ]
    assert result == answer == str(TOOLS[call.name](**call.arguments))
    assert [message["role"] for message in each.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


async def test_games_are_played_by_the_rules_of_the_environment() -> None:
    lessons = tiny_tasks.guess(0)
    game = Guess(greatest=tiny_tasks.GREATEST, limit=tiny_tasks.MAX_GUESSES)
    halved = 0
    for each in [*lessons.shown, *lessons.asked]:
        observation = await game.reset(each.question)
        assert each.messages[0] == {"role": "user", "content": f"Guess my number.{observation}"}
        replies = [message["content"] for message in each.messages[2::2]]
        numbers = []
        for position, said in enumerate(each.messages[1::2]):
            assert not game.done
            [call] = Hermes().parse(said["content"]).calls
            assert (call.name, call.mistake) == ("guess", None)
            numbers.append((call.arguments or {})["number"])
            reply = await game.guess(**(call.arguments or {}))
            assert reply == (replies[position] if position < len(replies) else "correct")
        assert game.done
        assert game.found
        halved += numbers == tiny_tasks.halving(each.question)
    # The other player's luck is the same game at times.
    assert 0.3 < (halved - len(lessons.asked)) / len(lessons.shown) < 0.45
    assert [each.question for each in lessons.asked] == list(range(1, 16))


def test_halving_needs_four_guesses_at_most() -> None:
    games = [tiny_tasks.halving(secret) for secret in range(1, 16)]
    assert games[4] == [8, 4, 6, 5]
    assert sorted(map(len, games)) == [1] + [2] * 2 + [3] * 4 + [4] * 8


def test_conversations_fit_the_model() -> None:
    tokenizer = tiny_tokenizer.build_tokenizer(tools=True)
    for teach, longest in ((tiny_tasks.calculator, 96), (tiny_tasks.guess, 256)):
        lessons = teach(0)
        for each in lessons.shown:
            text = tokenizer.apply_chat_template(each.messages, tools=lessons.tools, tokenize=False)
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert len(ids) <= longest
            assert tokenizer.unk_token_id not in ids
