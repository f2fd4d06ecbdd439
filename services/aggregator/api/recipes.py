"""The recipes of a run: what it was started with, without secrets."""

from datetime import datetime

from fastapi import APIRouter
from pydantic import JsonValue

from services.aggregator import recipes
from services.aggregator.api.backend import Backend
from services.aggregator.api.models import Answer, moment
from services.aggregator.api.problems import documented
from services.aggregator.api.runs import known_run


class Recipe(Answer):
    """A recipe, resolved. Passwords, webhooks and keys that are secrets by their name are `***`."""

    since: datetime
    """When an aggregator was first started with it."""
    values: dict[str, JsonValue]
    """By dotted key, defaults included; a key without a value is not there."""
    given: list[str]
    """Keys that the file, the environment or the command line gives; the others are defaults."""


class Recipes(Answer):
    """What a run was started with."""

    run: str
    recipes: list[Recipe]
    """The latest first. Empty where no aggregator was started with a recipe of this run: one knows
    the recipe of its own run, and not of others that send to it."""


def router(backend: Backend) -> APIRouter:
    """The endpoint of recipes."""
    routes = APIRouter(
        prefix="/api/v1/runs", tags=["runs"], responses=documented(401, 404, 422, 503)
    )

    @routes.get("/{run}/recipes", summary="What a run was started with")
    def show_recipes(run: str) -> Recipes:
        with backend.read() as connection:
            found = recipes.recipes_of(connection, known_run(connection, run).name)
        return Recipes(
            run=run,
            recipes=[
                Recipe(since=moment(each.since_s), values=dict(each.values), given=each.given)
                for each in found
            ],
        )

    return routes
