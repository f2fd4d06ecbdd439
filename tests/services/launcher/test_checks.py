from pathlib import Path

import pytest

from services.common import config
from services.common.errors import UserError
from services.launcher import checks

RECIPE = """
[data]
reasoning_gym = {task = "chain_sum"}
[trainer]
max_steps = 3
"""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("queue.url=sentinel://h/m", r"queue\.url: 'sentinel://h/m' is not a Redis URL"),
        ("model.path=nowhere", r"model\.path: no such folder: nowhere"),
        ("model.path=tiny:algebra", r"there is no tiny model tiny:algebra; choose tiny:arith"),
        ("generator.replicas=2", r"generator\.kv_cache_bytes: give it, since 2 engines"),
        ("network.token_file=nowhere", r"network\.token_file: cannot be read"),
        (
            'rewards.functions=[{function="nonsense"}]',
            r"rewards\.functions\[0\]\.function: 'nonsense' is neither",
        ),
    ],
)
def test_each_mistake_is_named(tmp_path: Path, override: str, message: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    checks.check_recipe(config.load(path, environ={}))
    with pytest.raises(UserError, match=message):
        checks.check_recipe(config.load(path, overrides=[override], environ={}))


def test_a_trainer_on_several_machines_is_not_for_one(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    checks.check_one_machine(config.load(path, overrides=["trainer.ranks=2"], environ={}))
    overrides = ["trainer.ranks=2", "trainer.nodes=2", "network.ranks=a:29500"]
    with pytest.raises(UserError, match=r"^trainer\.nodes: 2 machines, and this command runs"):
        checks.check_one_machine(config.load(path, overrides=overrides, environ={}))


def test_a_data_file_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('data.file = "rows.jsonl"\ntrainer.max_steps = 3\n')
    with pytest.raises(UserError, match=r"data\.file: there is no file rows\.jsonl"):
        checks.check_recipe(config.load(path, environ={}))
