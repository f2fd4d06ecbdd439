"""What conversations may call, made ready."""

from pathlib import Path
from typing import Any

import pytest

from services.common.errors import UserError
from services.generator.equipment import equipped
from services.generator.template import ChatTemplate
from services.launcher.tiny_tokenizer import build_tokenizer
from tests.services.generator.fakes import recipe_of
from tests.services.generator.spoken import HERE

COUNTER = {"classes": [{"environment": f"{HERE}:Counter"}]}
ADD = [f"{HERE}:add"]


@pytest.fixture
def template(tmp_path: Path) -> ChatTemplate:
    build_tokenizer(tools=True).save_pretrained(tmp_path)
    return ChatTemplate(tmp_path)


@pytest.mark.parametrize(
    "sections",
    [
        {"tools": {"functions": ADD, "format": "hermess"}},
        {"tools": {"format": "hermess"}, "environments": COUNTER},
    ],
    ids=["of tools", "of an environment"],
)
async def test_an_unknown_format_is_found_at_the_start(
    template: ChatTemplate, sections: dict[str, Any]
) -> None:
    async with equipped(recipe_of(**sections), template) as equipment:
        with pytest.raises(UserError, match=r"tools\.format: vLLM has no parser 'hermess'"):
            equipment.check_formats()


async def test_a_parser_is_made_once_for_the_same_tools(template: ChatTemplate) -> None:
    async with equipped(recipe_of(tools={"functions": ADD}), template) as equipment:
        assert equipment.tools is not None
        first = equipment.parser(equipment.tools.schemas)
        assert equipment.parser(equipment.tools.schemas) is first
        assert equipment.parser([]) is not first
