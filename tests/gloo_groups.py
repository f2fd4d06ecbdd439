"""Transfer groups by gloo, between processes or threads, where there is no GPU: rank 0 as the
trainer is, and the others as vLLM's workers are."""

import json
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from services.trainer.weight_sending import TransferFailed

HOST = "127.0.0.1"
ABORTED: list[Any] = []
"""Kept: the end of a process group closes its connections, but first waits for what is under way in
it, which ends when a peer's are closed. NCCL's abort does not wait."""
LOOK_S = 0.001


class Gloo:
    """One rank of a group; what waits in it can be cut off, as in NCCL."""

    def __init__(
        self, group_id: bytes, *, rank: int, world_size: int, timeout_s: float, store: Any = None
    ) -> None:
        port = json.loads(group_id.rstrip(b"\0"))["port"]
        if store is None:
            store = TCPStore(HOST, port, is_master=False, wait_for_workers=False, use_libuv=False)
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=HOST)]
        options._timeout, options._threads = timedelta(seconds=timeout_s), 1
        self._store = store
        self._gloo: Any = gloo(PrefixStore("group", store), rank, world_size, options)
        self.aborted = threading.Event()

    def broadcast(self, tensor: torch.Tensor, src: int = 0, stream: Any = None) -> None:
        """Raises TransferFailed when it has been aborted, or a peer is gone."""
        gloo = self._gloo
        if gloo is None:
            raise TransferFailed("aborted")
        work = gloo.broadcast(tensor, src)
        while not work.is_completed():
            if self.aborted.is_set():
                ABORTED.append((gloo, work, tensor))
                raise TransferFailed("aborted")
            time.sleep(LOOK_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise TransferFailed(f"gloo: {error}") from error

    def destroy(self) -> None:
        """End it, also for what waits in it, here and at its peers."""
        self.aborted.set()
        self._gloo = None


class Sender:
    """Rank 0; see weight_sending.Communicator."""

    def __init__(self, gloo: Gloo, *, timeout_s: float) -> None:
        self._gloo, self._timeout_s = gloo, timeout_s
        self.num_chunks = 0
        self.goes_on = threading.Event()
        """Cleared: no chunk is sent."""
        self.goes_on.set()

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        while not self.goes_on.wait(LOOK_S):
            if self._gloo.aborted.is_set():
                raise TransferFailed("aborted")
        parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        limit = threading.Timer(self._timeout_s, self._gloo.destroy)
        limit.start()
        try:
            self._gloo.broadcast(torch.cat(parts))
        finally:
            limit.cancel()
        self.num_chunks += 1

    def finish(self) -> None:
        """Nothing is on its way: `send` waits."""

    def abort(self) -> None:
        self._gloo.destroy()


class GlooTransport:
    """See weight_sending.Transport."""

    def __init__(self) -> None:
        self.senders: list[Sender] = []
        self._stores: dict[bytes, Any] = {}

    def new_id(self) -> bytes:
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, use_libuv=False)
        group_id = json.dumps({"port": store.port}).encode().ljust(128, b"\0")
        self._stores[group_id] = store
        return group_id

    def connect(
        self, group_id: bytes, *, world_size: int, timeout_s: float, given_up: threading.Event
    ) -> Sender:
        try:
            gloo = Gloo(
                group_id,
                rank=0,
                world_size=world_size,
                timeout_s=timeout_s,
                store=self._stores[group_id],
            )
        except RuntimeError as error:
            raise TransferFailed(f"gloo: {error}") from error
        self.senders.append(Sender(gloo, timeout_s=timeout_s))
        return self.senders[-1]
