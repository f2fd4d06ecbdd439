"""Code that the user names in the recipe as `module:function`: found, imported and checked, with
errors for people.

Cheap enough to run before anything starts. Modules are looked for in the working directory too, so
that a file beside the recipe needs no packaging.
"""

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.common.config import ENVIRONMENT_REWARD, Rewards
from services.common.errors import UserError


@dataclass(frozen=True)
class Builtin:
    """A reward function that ships with the project and has a plain name."""

    reference: str
    """Its `module:function`."""
    needs: str | None = None
    """A package that it imports when first called."""


BUILTIN_REWARDS = {
    "reasoning_gym": Builtin("services.scorer.builtin_rewards:reasoning_gym", "reasoning_gym"),
    "exact_match": Builtin("services.scorer.builtin_rewards:exact_match"),
    ENVIRONMENT_REWARD: Builtin("services.scorer.builtin_rewards:environment"),
}
"""Reward functions by plain name."""


def load(reference: str, key: str) -> Callable[..., Any]:
    """The callable that `reference` (`module:function`, or `module:Class.method`) names.

    `key` is the recipe key that it comes from. Raises UserError, in one line, when the module
    cannot be found or fails to import, has no such name, or the name is not callable.
    """
    module_name, _, path = reference.partition(":")
    if not module_name or not path:
        raise UserError(f"{key}: {reference!r} is not of the form module:function")
    add_working_directory()
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{key}: {reference!r}: there is no module {error.name}; start from the folder "
                "that holds it, or install it"
            ) from None
        raise UserError(_import_failed(key, reference, module_name, error)) from error
    except (Exception, SystemExit) as error:
        raise UserError(_import_failed(key, reference, module_name, error)) from error
    where = module_name
    for part in path.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{key}: {reference!r}: {where} has no {part}{hint}")
        found, where = getattr(found, part), f"{where}.{part}"
    if not callable(found):
        raise UserError(f"{key}: {reference!r} is of type {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def reward_reference(function: str) -> str:
    """The `module:function` behind a recipe's reward function, which may be a built-in's plain
    name.
    """
    builtin = BUILTIN_REWARDS.get(function)
    return function if builtin is None else builtin.reference


def load_rewards(rewards: Rewards) -> list[Callable[..., Any]]:
    """All reward functions of a recipe, in its order. Raises UserError for the first that cannot be
    used.
    """
    loaded = []
    for position, entry in enumerate(rewards.functions):
        key = f"rewards.functions[{position}].function"
        builtin = BUILTIN_REWARDS.get(entry.function)
        if builtin is None and ":" not in entry.function:
            raise UserError(
                f"{key}: {entry.function!r} is neither module:function nor built in "
                f"({', '.join(BUILTIN_REWARDS)})"
            )
        if builtin is not None and builtin.needs and not importlib.util.find_spec(builtin.needs):
            raise UserError(f"{key}: {entry.function!r} needs the package {builtin.needs}")
        loaded.append(load(reward_reference(entry.function), key))
    return loaded


def add_working_directory() -> None:
    """Let modules of the working directory be imported, as `python -m` does and installed commands
    do not.
    """
    here = os.getcwd()
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)


def _import_failed(key: str, reference: str, module_name: str, error: BaseException) -> str:
    """One line with the place in the user's code, which a bare message would not name."""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}, line {error.lineno}"
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}, line {frame.lineno}"
    what = str(error).splitlines()[0] if str(error) else ""
    return (
        f"{key}: {reference!r}: importing {module_name} failed at {place}: "
        f"{type(error).__name__}: {what}"
    )
