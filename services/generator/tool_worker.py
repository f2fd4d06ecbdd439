"""What worker processes run to call a tool. Imports little."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from services.common.worker_process import load
from services.generator.tool_text import as_text

CALL = f"{__name__}:call"
"""For Pool.call and Lease.call."""


def call(reference: str, arguments: Mapping[str, Any]) -> str:
    """What the tool `reference` (`module:function`) gives for these arguments, as text. Raises
    what it raises."""
    return as_text(_loaded(reference)(**arguments))


@functools.cache
def _loaded(reference: str) -> Callable[..., Any]:
    function = load(reference)
    assert function is not None, "a reference names something in a module"
    return function
