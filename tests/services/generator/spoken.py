"""Conversations whose model says what a test decides, with a real tokenizer, tools and
environments."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.common.config import Recipe
from services.generator.conversation import Ask, Setting
from services.generator.equipment import equipped
from services.generator.template import ChatTemplate
from services.generator.types import Generated, Message
from services.launcher.tiny_tokenizer import END, build_tokenizer
from tests.services.generator.fakes import FakeEngine, generated, recipe_of

TOKENIZER = build_tokenizer(tools=True)
HERE = "tests.services.generator.spoken"

Say = Callable[[str], str]
"""From the prompt's text to what the model says; `END` ends its turn, without it the turn was cut
by length."""


def ids(text: str) -> list[int]:
    """A text's tokens, as the model would say it."""
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def call(name: str, **arguments: Any) -> str:
    """One block in the Hermes format."""
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Speaker(FakeEngine):
    """An engine that says what it is told, in the tokens of the tokenizer."""

    def __init__(self, say: Say | Sequence[str], *, versions: Sequence[int] = (3,)) -> None:
        super().__init__(self._answer)
        self._say, self._versions = say, versions

    async def _answer(self, number: int) -> Generated:
        if callable(self._say):
            text = self._say(str(TOKENIZER.decode(self.calls[number]["prompt_ids"])))
        else:
            text = self._say[number]
        reason = "stop" if text.endswith(END) else "length"
        tokens = ids(text)
        versions = self._versions[: len(tokens)]
        return generated(tokens, versions=versions, finish_reason=reason)

    @property
    def prompts(self) -> list[str]:
        """What it was asked, as text."""
        return [str(TOKENIZER.decode(call["prompt_ids"])) for call in self.calls]


@asynccontextmanager
async def setting_of(
    engine: FakeEngine, folder: Path, *, template: str | None = None, **sections: Any
) -> AsyncIterator[Setting]:
    """A replica's setting with the recipe's tools and environments started; 512 tokens of
    context."""
    tokenizer = build_tokenizer(tools=True)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    sections["generator"] = {"max_model_len": 512, **sections.get("generator", {})}
    sections["generation"] = {"max_completion_tokens": 256, **sections.get("generation", {})}
    recipe: Recipe = recipe_of(trainer={"token_budget": 4096}, **sections)
    async with equipped(recipe, ChatTemplate(folder)) as equipment:
        yield equipment.setting(engine)


def ask_of(
    setting: Setting, prompt: str | list[Message] = "hi", *, row: Mapping[str, Any] | None = None
) -> Ask:
    """One conversation; `sampled` and `retried` are not listened to."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    columns = row or {}
    return Ask(
        prompt=messages,
        row=columns,
        kind=None if setting.environments is None else setting.environments.choose(columns),
        temperature=0.5,
        max_completion_tokens=setting.recipe.generation.max_completion_tokens,
        seed=lambda turn: 100 + turn,
        sampled=lambda _: None,
        retried=lambda: None,
    )


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class Counter:
    """An environment that counts to `goal`."""

    async def reset(self, *, goal: int) -> str | None:
        self.count, self.goal, self.done = 0, goal, False
        return f" Count to {goal}."

    async def up(self, by: int) -> int:
        """Count up.

        Args:
            by: How far.
        """
        self.count += by
        self.done = self.count == self.goal
        return self.count

    async def get_reward(self) -> float:
        return float(self.count == self.goal)
