"""What is kept of a run's recipe: all that says what it was, and no secret."""

import json
from pathlib import Path
from typing import Any

import httpx

from services.aggregator import recipes
from services.aggregator.ingest import Ingest
from services.aggregator.store import Store
from services.common.config import Recipe, load
from tests.services.aggregator.making import NOW_S, Producer, observed

TEXT = """
run = "demo"
data.reasoning_gym = {task = "chain_sum"}
trainer.max_steps = 150
queue.url = "redis://me:hunter2@queue:6379/0?sentinel_password=hunter2"
aggregator.database = "postgresql://me:hunter2@database/headrace"
alerts.webhook = "https://hooks.example/hunter2/hunter2"

[[rewards.functions]]
function = "mine:judged"
params = {api_key = "hunter2", url = "https://me:hunter2@judge.example", max_tokens = 7}
"""


def read(tmp_path: Path, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.toml"
    path.write_text(TEXT)
    return load(path, overrides=overrides, environ={})


def test_no_secret_is_kept_and_all_else_is(tmp_path: Path) -> None:
    values, given = recipes.shown(read(tmp_path))
    assert "hunter2" not in json.dumps(values)
    assert values["queue.url"] == "redis://me:***@queue:6379/0?sentinel_password=***"
    assert values["rewards.functions.0.params.api_key"] == "***"
    assert values["rewards.functions.0.params.max_tokens"] == 7
    assert values["rewards.functions.0.weight"] == 1.0
    assert (
        values["generation.max_completion_tokens"]
        == Recipe.model_fields["generation"].default.max_completion_tokens
    )
    assert "trainer.max_steps" in given
    assert "rewards.functions.0.function" in given
    assert "generation.max_completion_tokens" not in given


def test_a_recipe_is_kept_once_until_it_changes(store: Store, tmp_path: Path) -> None:
    assert recipes.remember(store, read(tmp_path), now_s=NOW_S)
    assert not recipes.remember(store, read(tmp_path), now_s=NOW_S + 1)
    assert recipes.remember(store, read(tmp_path, "trainer.max_steps=300"), now_s=NOW_S + 2)
    with store.engine.begin() as connection:
        found = recipes.recipes_of(connection, "demo")
        assert recipes.recipes_of(connection, "other") == []
    assert [each.since_s for each in found] == [NOW_S + 2, NOW_S]
    assert [each.values["trainer.max_steps"] for each in found] == [300, 150]


async def test_the_endpoint_and_the_end_of_a_run(
    client: httpx.AsyncClient, store: Store, ingest: Ingest, tmp_path: Path
) -> None:
    async def asked() -> Any:
        return (await client.get("/api/v1/runs/demo/recipes")).raise_for_status().json()["recipes"]

    Producer("trainer-0").send(ingest, [("loss", observed([1.0]))])
    assert await asked() == []
    recipes.remember(store, read(tmp_path), now_s=NOW_S)
    (kept,) = await asked()
    assert kept["values"]["trainer.max_steps"] == 150
    assert "trainer.max_steps" in kept["given"]
    assert (await client.get("/api/v1/runs/nobody/recipes")).status_code == 404
    assert store.delete_run("demo")
    with store.engine.begin() as connection:
        assert recipes.recipes_of(connection, "demo") == []
