"""Runs inside vLLM's worker process: the worker's end of a transfer group, which is vLLM's own NCCL
weight transfer with an end to every wait.

What takes too long is given up here, where it hangs: connecting goes on in a thread that is left
alone, and a communicator in which nothing has passed for `timeout_s` is aborted. Should the abort
not free the worker, its process ends, and with it the engine: the replica is started anew then.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

ABORT_S = 10.0
"""Longest time from the abort of a communicator until what waits in it has returned."""


class NotReceived(RuntimeError):
    """A group is over; what was received until then is no version."""


class Receiver:
    """One worker's membership, of one group at a time."""

    def __init__(self, make: Callable[[], NCCLWeightTransferEngine]) -> None:
        """make: an engine of vLLM's, for the group that is connected with it."""
        self._make = make
        self._engine: NCCLWeightTransferEngine | None = None
        self._timeout_s = 0.0

    def join(self, info: dict[str, Any], *, timeout_s: float) -> None:
        """Connect; `info` is vLLM's NCCLWeightTransferInitInfo. Raises NotReceived when that fails,
        or the others have not come within `timeout_s`."""
        self.leave()
        engine, connected = self._make(), Future[None]()
        threading.Thread(target=_connect, args=(engine, info, connected), daemon=True).start()
        try:
            connected.result(timeout_s)
        except Exception as error:
            # It may have come to its end in this moment; else the thread ends what it made.
            if connected.cancel() or connected.exception() is not None:
                raise NotReceived(
                    f"the group has not connected within {timeout_s:g} s: {error!r}"
                ) from error
        self._engine, self._timeout_s = engine, timeout_s

    def receive(self, tensors: dict[str, Any], model: Any) -> set[str] | None:
        """Load what is broadcast now; `tensors` is vLLM's NCCLWeightTransferUpdateInfo. The names
        of the parameters that were written; None of a model that does not say. Raises NotReceived,
        and the group is over."""
        engine = self._engine
        if engine is None:
            raise NotReceived("this worker is in no group")
        communicator: Any = engine.model_update_group
        watchdog = _Watchdog(communicator.destroy, timeout_s=self._timeout_s)
        loading = _Loading(model)
        engine.model = loading
        engine.model_update_group = _Watched(communicator, watchdog)
        try:
            with watchdog:
                engine.receive_weights(engine.parse_update_info(tensors))
                if engine.device.type != "cpu":
                    torch.accelerator.synchronize()
            if watchdog.fired:
                raise TimeoutError(f"nothing has come for {self._timeout_s:g} s")
        except Exception as error:
            engine.model_update_group = communicator
            self.leave()
            raise NotReceived(f"the broadcast failed: {error!r}") from error
        engine.model_update_group = communicator
        return loading.written

    def leave(self) -> None:
        """Be in no group."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


def _connect(
    engine: NCCLWeightTransferEngine, info: dict[str, Any], connected: "Future[None]"
) -> None:
    failure: Exception | None = None
    try:
        if engine.device.type != "cpu":  # each thread has its own
            torch.accelerator.set_device_index(engine.device)
        engine.init_transfer_engine(engine.parse_init_info(info))
    except Exception as error:
        failure = error
    if not connected.set_running_or_notify_cancel():
        engine.shutdown()
    elif failure is not None:
        connected.set_exception(failure)
    else:
        connected.set_result(None)


class _Loading:
    """A model that keeps in mind which parameters were written."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.written: set[str] | None = set()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        written = self._model.load_weights(weights)
        if written is None or self.written is None:
            self.written = None
        else:
            self.written |= written


class _Watchdog:
    """Aborts when nothing has been heard for `timeout_s`, and ends the process when even that does
    not help."""

    def __init__(self, abort: Callable[[], None], *, timeout_s: float) -> None:
        self._abort, self._timeout_s = abort, timeout_s
        self._heard = threading.Event()
        self._done = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.fired = False

    def hear(self) -> None:
        """Something has passed."""
        self._heard.set()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done = True
        self._heard.set()
        self._thread.join()

    def _run(self) -> None:
        while self._heard.wait(self._timeout_s):
            self._heard.clear()
            if self._done:
                return
        self.fired = True
        self._abort()
        if not self._heard.wait(ABORT_S):
            print("a broadcast hangs and cannot be aborted: the engine ends", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)


class _Watched:
    """A communicator whose broadcasts are heard of."""

    def __init__(self, communicator: Any, watchdog: _Watchdog) -> None:
        self._communicator, self._watchdog = communicator, watchdog

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        if self._watchdog.fired:  # one that was destroyed does nothing, and says nothing
            raise TimeoutError("the communicator was aborted")
        self._watchdog.hear()
        self._communicator.broadcast(tensor, src=src, stream=stream)
