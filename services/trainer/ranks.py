"""The processes that train together, and how the first one tells the others what to do.

Rank 0 is the trainer service; the others are its children (rank_processes.py) on the same machine,
and listen on the loopback address only. Every rank does the same in the same order: rank 0 sends a
command, each rank does its share, and meets the others in collectives. Nothing is pickled: commands
are two integers, what comes with them is bytes that each command defines.

waits_for: the other ranks. unblocked_by: them; the end of a rank ends all (rank_processes.py).
"""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"

COLLECTIVE_TIMEOUT_S = 600.0
"""Longest wait of a rank within a step for the others: one that hangs is an error then."""

WRITE_TIMEOUT_S = 3600.0
"""Longest wait of a rank for the others' files of a checkpoint."""

IDLE_TIMEOUT_S = 10 * 365 * 86_400.0
"""For waits until there is something to do: until samples are scored, say. What ends such a wait is
the end of rank 0."""


class Command(IntEnum):
    """What rank 0 has all ranks do; the payload in brackets."""

    ACCUMULATE = 1
    """Forward and backward of a row (its own, by `scatter`)."""
    FINISH = 2
    ABANDON = 3
    WEIGHTS = 4
    """Gather the weights for rank 0."""
    CANARY = 5
    """Log-probabilities of plain rows (the rows)."""
    PERTURBED = 6
    """The same under perturbed weights (path and rows)."""
    SNAPSHOT = 7
    RESTORE = 8
    """Take over a checkpoint (its folder)."""


@dataclass(frozen=True)
class Place:
    """One rank among all, and where the first one is met."""

    rank: int
    size: int
    port: int
    store: Any = None
    """Rank 0's end of the meeting point, which it opened with `open_place`."""

    def environment(self, rank: int) -> dict[str, str]:
        """What another rank is started with; the names are torchrun's.

        Example: `Place(0, 2, 3000).environment(1)["RANK"]` is "1".
        """
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self.port),
        }


def open_place(size: int) -> Place:
    """Rank 0's place; the port is free and listens on the loopback address from now on."""
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    store = TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        # Left to itself it would listen on every address of the machine.
        master_listen_fd=listening.detach(),
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    return Place(0, size, port, store)


def place_of(environ: Mapping[str, str]) -> Place:
    """The place that `Place.environment` describes."""
    return Place(int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ["MASTER_PORT"]))


class Group:
    """All ranks as one of them sees them. With one rank there is no process group, and nothing
    waits."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.control: Any = None
        """Commands begin here: the others wait here for rank 0. What follows a command is in the
        default group, where all waits are short. Both are the torch thread's."""
        self.saving: Any = None
        """Where the others wait for a checkpoint to write; this and the next are the saving
        thread's."""
        self.saved: Any = None
        """What became of their files."""

    @classmethod
    def join(cls, place: Place | None, device: torch.device) -> "Group":
        """Meet the others; without a place there are none."""
        if place is None or place.size == 1:
            return cls()
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, loopback)
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        store = place.store or TCPStore(LOOPBACK, place.port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
        )
        group = cls(place.rank, place.size)
        group.control = _another(IDLE_TIMEOUT_S)
        group.saving = _another(IDLE_TIMEOUT_S)
        group.saved = _another(WRITE_TIMEOUT_S)
        return group

    def send(self, command: Command, payload: bytes = b"") -> None:
        """Rank 0: have the others do something."""
        if self.size > 1:
            dist.broadcast(torch.tensor([command, len(payload)]), src=0, group=self.control)
            if payload:
                dist.broadcast(_tensor(payload), src=0)

    def receive(self) -> tuple[Command, bytes]:
        """Another rank: wait for what rank 0 sends."""
        header = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(header, src=0, group=self.control)
        command, num_bytes = header.tolist()
        payload = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes:
            dist.broadcast(payload, src=0)
        return Command(command), payload.numpy().tobytes()

    def scatter(self, payloads: Sequence[bytes]) -> None:
        """Rank 0: give each rank its own bytes, right after `send`; those of rank 0 stay here."""
        assert len(payloads) == self.size
        if self.size == 1:
            return
        sizes = torch.tensor([len(payload) for payload in payloads])
        dist.broadcast(sizes, src=0)
        for rank, payload in enumerate(payloads):
            if rank and payload:
                dist.send(_tensor(payload), dst=rank)

    def receive_own(self) -> bytes:
        """Another rank: its part of what rank 0 scatters."""
        sizes = torch.zeros(self.size, dtype=torch.int64)
        dist.broadcast(sizes, src=0)
        payload = torch.empty(int(sizes[self.rank]), dtype=torch.uint8)
        if payload.numel():
            dist.recv(payload, src=0)
        return payload.numpy().tobytes()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The numbers of all ranks, in the order of ranks, on every rank; equally many each."""
        own = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return [own.tolist()]
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own)
        return [each.tolist() for each in found]


def _another(timeout_s: float) -> Any:
    """A group of all ranks for tensors on the CPU."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


def _tensor(payload: bytes) -> torch.Tensor:
    # Of a bytearray, since torch warns of memory that it may not write to.
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
