"""The recipes that ship: they can be checked, their code is found, and what their models were
warmed up on is what they ask."""

import re
from pathlib import Path

import pytest

from recipes.guess import Guess
from services.common import config
from services.common.config import Recipe
from services.generator.environments import Environments
from services.generator.template import ChatTemplate
from services.generator.tools import Tools
from services.launcher import checks, tiny_tasks
from services.launcher.tiny_tokenizer import build_tokenizer
from services.trainer import dataset
from tests.deploy.manifests import ROOT

DIGITS = re.compile(r"\d+")

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.fixture(autouse=True)
def project_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where recipes are run."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def template(tmp_path: Path) -> ChatTemplate:
    """Of the tiny models that know tools."""
    build_tokenizer(tools=True).save_pretrained(tmp_path)
    return ChatTemplate(tmp_path)


def recipe_of(name: str) -> Recipe:
    return config.load(ROOT / "recipes" / f"{name}.toml", environ={})


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_in_order(path: Path) -> None:
    recipe = config.load(path, environ={})
    checks.check_recipe(recipe)
    assert recipe.run == path.stem
    rows = dataset.load(recipe)
    assert len(rows.training) > 0
    assert len(rows.evaluation) > 0


def test_the_calculator_asks_what_its_model_has_seen(template: ChatTemplate) -> None:
    recipe = recipe_of("calculator")
    tools, lessons = Tools(recipe), tiny_tasks.calculator(0)
    seen = {each.messages[0]["content"] for each in lessons.shown}
    forms = {DIGITS.sub("#", question) for question in seen}
    assert {"What is # * #?", "Compute # + #."} < forms
    rows = dataset.load(recipe)
    for asked in (rows.training, rows.evaluation):
        questions = [asked[index].messages[0]["content"] for index in range(50)]
        assert {DIGITS.sub("#", question) for question in questions} == forms
        # One in forty of all there are was shown to the model.
        assert sum(question in seen for question in questions) < 10
    prompt = rows.training[0].messages
    rendered = template.render(prompt, tools=lessons.tools or ())
    assert template.render(prompt, tools=tools.schemas) == rendered


async def test_guessing_asks_what_its_model_has_seen(template: ChatTemplate) -> None:
    recipe = recipe_of("guess")
    environments = Environments(recipe)
    rows = dataset.load(recipe)
    for part in (rows.training, rows.evaluation):
        assert sorted(row.columns["secret"] for row in part) == list(range(1, 16))
    row = rows.training[0]
    kind = environments.choose(row.columns)
    assert kind is not None
    instance = await environments.acquire(kind)
    observation = await instance.reset(row.columns)
    await instance.finish()
    await environments.close()
    [message] = row.messages
    prompt = [{**message, "content": message["content"] + (observation or "")}]
    lessons = tiny_tasks.guess(0)
    assert prompt == lessons.shown[0].messages[:1]
    assert template.render(prompt, tools=kind.schemas) == template.render(
        prompt, tools=lessons.tools or ()
    )


async def test_a_game_is_worth_more_the_fewer_guesses_it_takes() -> None:
    game = Guess(greatest=15, limit=6)
    assert await game.reset(secret=5) == " It is from 1 to 15."
    assert [await game.guess(number) for number in (8, 4, 6)] == ["lower", "higher", "lower"]
    assert (game.done, await game.get_reward()) == (False, 0.0)
    assert await game.guess(5) == "correct"
    assert (game.done, await game.get_reward()) == (True, 0.5)
    await game.reset(secret=8)
    assert (game.done, await game.get_reward()) == (False, 0.0)
    assert await game.guess(8) == "correct"
    assert await game.get_reward() == 1.0


async def test_a_game_is_lost_after_the_last_guess() -> None:
    game = Guess(greatest=15, limit=2)
    await game.reset(secret=3)
    assert [await game.guess(number) for number in (1, 2)] == ["higher", "higher"]
    assert (game.done, await game.get_reward()) == (True, 0.0)
