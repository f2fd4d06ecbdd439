"""What conversations may call, made ready: tools, environments and the parser that reads calls."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from services.common.config import Recipe
from services.generator.conversation import Generates, Setting
from services.generator.environments import Environments
from services.generator.parsing import Parser, make_parser
from services.generator.template import ChatTemplate
from services.generator.tools import Tools


@dataclass(frozen=True)
class Equipment:
    """Tools and environments that are started."""

    recipe: Recipe
    template: ChatTemplate
    tools: Tools | None
    environments: Environments | None
    _parsers: dict[str, Parser] = field(default_factory=dict)
    """By tools' schemas: some of vLLM's take a millisecond to make, and conversations are many."""

    def setting(self, engine: Generates) -> Setting:
        """What conversations with this engine have in common."""
        return Setting(
            engine=engine,
            template=self.template,
            recipe=self.recipe,
            tools=self.tools,
            environments=self.environments,
            parsers=self.parser,
        )

    def parser(self, schemas: Sequence[dict[str, Any]]) -> Parser:
        """What reads a turn's text, for tools with these schemas. May import vLLM.

        Raises UserError for a format that nobody knows.
        """
        key = json.dumps(schemas)
        if key not in self._parsers:
            self._parsers[key] = make_parser(
                self.recipe.tools.format,
                self.recipe.generation.reasoning_parser,
                tokenizer=self.template.tokenizer,
                tools=list(schemas),
            )
        return self._parsers[key]

    def check_formats(self) -> None:
        """Make all parsers now: a format that nobody knows must not wait for a conversation. Raises
        UserError. May import vLLM.
        """
        schemas = [] if self.tools is None else self.tools.schemas
        self.parser(schemas)
        for kind in () if self.environments is None else self.environments.kinds:
            self.parser([*schemas, *kind.schemas])


@asynccontextmanager
async def equipped(recipe: Recipe, template: ChatTemplate) -> AsyncIterator[Equipment]:
    """Load, check and start what the recipe names; end it all afterwards.

    Raises UserError, naming the key, for what cannot be used; nothing is running then.
    """
    tools, environments = load(recipe)
    equipment = Equipment(recipe, template, tools, environments)
    try:
        if tools is not None:
            await tools.start()
        if environments is not None:
            await environments.start()
        yield equipment
    finally:
        if environments is not None:
            await environments.close()
        if tools is not None:
            await tools.close()


def load(recipe: Recipe) -> tuple[Tools | None, Environments | None]:
    """Find and check the recipe's tools and environments; nothing is started. Raises UserError."""
    tools = Tools(recipe) if recipe.tools.functions else None
    environments = None
    if recipe.environments.classes:
        environments = Environments(recipe, taken=() if tools is None else tools.names)
    return tools, environments
