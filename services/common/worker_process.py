"""What runs in each worker process (`python -m services.common.worker_process`): one call at a
time, in the main thread, of a `module:function`. Started and asked by services/common/workers.py.

The channel is the process's standard input and output: frames of an 8-byte big-endian length and
UTF-8 JSON, so that NaN and the infinities travel as the literals that Python's json module reads
back. The channel is moved to private descriptors first: what user code prints goes to the
service's log and cannot be taken for an answer. The process ends when its input does: no service,
no worker.

It imports little: a generator may have hundreds of these (with asyncio, each would take twice the
time to start and twice the memory).
"""

import ctypes
import importlib
import json
import numbers
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

HEADER = struct.Struct(">Q")
"""Length of the frame that follows."""

LOG_ARGUMENT = "log_metric"
"""The argument by which a function can say numbers beside its result: `log_metric(name, value)`."""

PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent ends (prctl(2))."""


def plain(value: Any) -> Any:
    """Numbers and arrays of other libraries as Python's own: numpy and torch values by `tolist()`.

    Raises TypeError for what has no JSON form.
    """
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent as JSON")


def to_frame(message: Any) -> bytes:
    """A message as it travels. Raises TypeError or ValueError for what JSON cannot hold."""
    body = json.dumps(message, allow_nan=True, separators=(",", ":"), default=plain).encode()
    return HEADER.pack(len(body)) + body


def load(reference: str) -> Callable[..., Any] | None:
    """Import a module, or what a `module:function` names in it."""
    module_name, _, path = reference.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    return found if path else None


def _answer(request: dict[str, Any], loaded: dict[str, Callable[..., Any]]) -> bytes:
    """Do what one frame asks; the frame to send back. Never raises: SystemExit of user code is an
    answer, too.
    """
    stage = "load"
    try:
        for reference in request.get("load", [request.get("call")]):
            if reference not in loaded:
                function = load(reference)
                if function is not None:
                    loaded[reference] = function
        if "load" in request:
            return to_frame({"value": None})
        stage = "call"
        logged: list[tuple[str, float]] = []
        kwargs = request["kwargs"]
        if request["logs"]:
            kwargs[LOG_ARGUMENT] = lambda name, value: logged.append((str(name), float(value)))
        value = loaded[request["call"]](**kwargs)
        return to_frame({"value": value, "logged": logged})
    except BaseException as error:
        # The first frame is this function's own; what the user can act on begins below it.
        below = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(type(error), error, below))
        return to_frame(
            {
                "while": stage,
                "error": f"{type(error).__name__}: {_described(error)}",
                "traceback": text,
            }
        )


def _described(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"(its text cannot be made: {type(second).__name__})"


def die_with_parent() -> None:
    """End at once when the service is killed, also in the middle of a call that never returns
    (Linux).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next frame, or None at the end of the input."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    body = stream.read(length)
    if len(body) < length:
        return None
    request: dict[str, Any] = json.loads(body)
    return request


def _serve() -> None:
    """Answer frames until the input ends."""
    die_with_parent()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    assert hasattr(sys.stdout, "reconfigure")
    sys.stdout.reconfigure(line_buffering=True)
    loaded: dict[str, Callable[..., Any]] = {}
    while (request := _read(requests)) is not None:
        answers.write(_answer(request, loaded))
        answers.flush()
    # Not by returning: a thread that user code left running would keep the process.
    os._exit(0)


if __name__ == "__main__":
    _serve()
