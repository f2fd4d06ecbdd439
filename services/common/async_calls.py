"""Users' async functions, awaited for a limited time: they end as a call in a worker process does,
so that who calls need not know which of the two it is."""

import traceback
from collections.abc import Coroutine
from typing import Any

from services.common.background import Strays
from services.common.workers import CallRaised, CallTimedOut


async def awaited(body: Coroutine[Any, Any, Any], *, timeout_s: float, strays: Strays) -> Any:
    """The result of `body`. Raises CallTimedOut past `timeout_s`, also where it does not let itself
    be cancelled, and CallRaised for whatever it raises."""
    task = await strays.outcome(body, timeout_s=timeout_s)
    if task is None:
        raise CallTimedOut(f"did not return within {timeout_s:g} s")
    if task.cancelled():
        raise CallRaised("CancelledError: it cancelled itself", traceback_text="")
    error = task.exception()
    if error is not None:
        raise raised(error) from error
    return task.result()


def raised(error: BaseException) -> CallRaised:
    """A user's exception as workers report it."""
    text = "".join(traceback.format_exception(error))
    return CallRaised(f"{type(error).__name__}: {error}", traceback_text=text)
