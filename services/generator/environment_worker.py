"""What a worker process does for the one environment that lives in it; environment_hosts.py asks.

Each function answers within one frame. It imports little: each instance is a process.
"""

from collections.abc import Mapping
from typing import Any

from services.common.worker_process import load
from services.generator.tool_text import as_text

_instance: Any = None
"""The environment of this process."""


def create(*, reference: str, params: Mapping[str, Any]) -> None:
    """Make the environment that `reference` (`module:Class`) names."""
    global _instance
    make = load(reference)
    assert make is not None
    _instance = make(**params)


def reset(*, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Begin an episode: the observation's text, or None, and whether it is over already."""
    observation = _returned(_instance.reset(**arguments))
    return {"text": None if observation is None else as_text(observation), "done": _done()}


def call(*, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Call a method: its result's text, and whether the episode is over now."""
    return {"text": as_text(_returned(getattr(_instance, method)(**arguments))), "done": _done()}


def get_reward() -> Any:
    """What the environment says of the episode."""
    return _returned(_instance.get_reward())


def close() -> None:
    """Let the environment put its things in order before the process ends."""
    _instance.close()


def _done() -> bool:
    return bool(getattr(_instance, "done", False))


def _returned(value: Any) -> Any:
    if hasattr(value, "__await__"):
        raise TypeError("it returned an awaitable; declare the method with `async def`")
    return value
