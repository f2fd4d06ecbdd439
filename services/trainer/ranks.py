"""The processes that train together, and how the first one tells the others what to do.

Rank 0 is the trainer service; the others are its children (rank_processes.py) on the same machine,
where they listen on the loopback address only, or those of a node (node.py) on another. Every rank
does the same in the same order: rank 0 sends a command, each rank does its share, and meets the
others in collectives. Nothing is pickled: commands are two integers, what comes with them is bytes
that each command defines.

waits_for: the other ranks. unblocked_by: them; the end of a rank ends all (rank_processes.py).
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from services.common.errors import UserError
from services.trainer.interfaces import LOOPBACK, loopback_interface

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
    """Gather the weights for rank 0 (which of them)."""
    CANARY = 5
    """Log-probabilities of plain rows (the rows)."""
    PERTURBED = 6
    """The same under perturbed weights (path and rows)."""
    SNAPSHOT = 7
    RESTORE = 8
    """Take over a checkpoint (its folder)."""


@dataclass(frozen=True)
class Place:
    """One rank among all, and where the first one is met.

    Ranks are numbered node by node: with 2 nodes of 4 ranks, rank 5 is the second one of node 1.
    """

    rank: int
    size: int
    port: int
    host: str = LOOPBACK
    nodes: int = 1
    interface: str = ""
    """By which ranks of several nodes reach each other; on one they use the loopback interface."""
    session: str = ""
    """Of rank 0's start: ranks that were started for another one never meet these."""
    store: Any = None
    """Rank 0's end of the meeting point, which it opened with `open_place`."""

    @property
    def local_size(self) -> int:
        """Ranks on each node."""
        return self.size // self.nodes

    @property
    def local_rank(self) -> int:
        """This one among those of its node.

        Example: `Place(5, 8, 3000, nodes=2).local_rank` is 1.
        """
        return self.rank % self.local_size

    def environment(self, rank: int) -> dict[str, str]:
        """What another rank of the same node is started with; names as torchrun's where it has the
        same.

        Example: `Place(0, 2, 3000).environment(1)["RANK"]` is "1".
        """
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.local_size),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "RANKS_INTERFACE": self.interface,
            "RANKS_SESSION": self.session,
        }


def open_place(
    size: int,
    *,
    listen: str = LOOPBACK,
    port: int = 0,
    nodes: int = 1,
    interface: str = "",
    session: str = "",
) -> Place:
    """Rank 0's place; it listens on the address `listen` from now on, at a free port where `port`
    is 0. Raises UserError when it cannot."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            listen, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.create_server(address[:2], family=family)
    except OSError as error:
        raise UserError(
            f"network.ranks: rank 0 cannot listen on {listen}:{port} ({error.strerror}); choose "
            "another port, or another network.host"
        ) from error
    port = listening.getsockname()[1]
    every = {"0.0.0.0": LOOPBACK, "::": "::1"}
    host = every.get(str(address[0]), str(address[0]))
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        # Left to itself it would listen on every address of the machine.
        master_listen_fd=listening.detach(),
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    return Place(0, size, port, host, nodes, interface, session, store)


def place_of(environ: Mapping[str, str]) -> Place:
    """The place that `Place.environment` describes."""
    size = int(environ["WORLD_SIZE"])
    return Place(
        int(environ["RANK"]),
        size,
        int(environ["MASTER_PORT"]),
        environ["MASTER_ADDR"],
        nodes=size // int(environ["LOCAL_WORLD_SIZE"]),
        interface=environ["RANKS_INTERFACE"],
        session=environ["RANKS_SESSION"],
    )


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
        """Meet the others; without a place there are none. Raises UserError when some compute on a
        GPU and some do not."""
        if place is None or place.size == 1:
            return cls()
        interface = place.interface or loopback_interface()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # The equals sign: NCCL would take eth10 for eth1.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        store = place.store or TCPStore(place.host, place.port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(place.session, store),
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
        )
        group = cls(place.rank, place.size)
        group.control = _another(IDLE_TIMEOUT_S)
        group.saving = _another(IDLE_TIMEOUT_S)
        group.saved = _another(WRITE_TIMEOUT_S)
        group._check_devices(device)
        return group

    def _check_devices(self, device: torch.device) -> None:
        """Between a GPU and a CPU the first collective of the model would wait for ever."""
        on_gpu = [bool(number) for [number] in self.gather([device.type == "cuda"])]
        if any(on_gpu) and not all(on_gpu):
            raise UserError(
                f"trainer.device: rank {on_gpu.index(True)} computes on a GPU and rank "
                f"{on_gpu.index(False)} has none; give every node GPUs, or set it to "
                '"cpu"'
            )

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

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Let a contiguous tensor on the CPU be, on every rank, what it is on rank 0."""
        # As bytes: gloo knows few dtypes.
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)

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
