"""What can be found wrong before anything starts. Each mistake is one line: what, where, what to
do.
"""

from pathlib import Path

from services.common import plugins, secret_keys
from services.common.certificates import certificates_of
from services.common.config import Recipe
from services.common.errors import UserError
from services.common.queue_url import read_url
from services.common.tokens import tokens_of
from services.launcher import tiny_model


def check_recipe(recipe: Recipe) -> None:
    """Raise UserError for what can be seen without reaching anything: the queue's URL, reward
    functions, tools, environments, model, data, memory.
    """
    url = secret_keys.queue_url(recipe.queue)
    if url is not None:
        read_url(url)
    plugins.load_rewards(recipe.rewards)
    if recipe.tools.functions or recipe.environments.classes:
        # Here, since it imports transformers, which takes seconds.
        from services.generator import equipment

        equipment.load(recipe)
    check_model(recipe.model.path)
    tokens_of(recipe.network)
    certificates_of(recipe.network)
    secret_keys.database_password(recipe.aggregator)
    if recipe.data.file is not None and not Path(recipe.data.file).is_file():
        raise UserError(f"data.file: there is no file {recipe.data.file}")
    if recipe.generator.replicas > 1 and recipe.generator.kv_cache_bytes is None:
        raise UserError(
            f"generator.kv_cache_bytes: give it, since {recipe.generator.replicas} engines share "
            "one machine: else the first reserves all its memory (67108864 does for a tiny model)"
        )


def check_one_machine(recipe: Recipe) -> None:
    """Raise UserError for a trainer on several machines: this one alone would wait for ever."""
    if recipe.trainer.nodes > 1:
        raise UserError(
            f"trainer.nodes: {recipe.trainer.nodes} machines, and this command runs everything on "
            "one; leave it out, or start the services one by one (docs/multi-node.md)"
        )


def check_model(path: str) -> None:
    """Raise UserError unless `path` is a model folder or names a tiny model, which is not made."""
    if not path.startswith(tiny_model.PREFIX):
        tiny_model.resolve(path)
        return
    name = path.removeprefix(tiny_model.PREFIX).removesuffix(tiny_model.TIED_SUFFIX)
    if name not in tiny_model.TASKS:
        known = ", ".join(tiny_model.PREFIX + task for task in tiny_model.TASKS)
        raise UserError(
            f"model.path: there is no tiny model {path}; choose {known} (or one of them with "
            f"{tiny_model.TIED_SUFFIX}), or give a Hugging Face model folder"
        )
