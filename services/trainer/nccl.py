"""NCCL as rank 0 of a transfer group uses it: few functions of its library, by ctypes.

torch's own process groups cannot talk to vLLM's workers, which connect by an ncclUniqueId and begin
with the sum of one number (`PyNcclCommunicator.from_unique_id_bytes` of vLLM 0.32). The
communicator here is a non-blocking one: each call returns at once, and whether it has come to its
end is asked until a deadline; so that a lost peer can be given up, and nothing waits inside NCCL
for ever.

The library is the one that torch has loaded; generators need the same version of it, which the lock
files of both see to.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.common.errors import UserError
from services.trainer.weight_sending import TransferFailed

LIBRARY = "libnccl.so.2"

ID_BYTES = 128
"""Of an ncclUniqueId."""

SUCCESS, IN_PROGRESS = 0, 7
"""Of ncclResult_t."""

UINT8, FLOAT32, SUM = 1, 7, 0
"""Of ncclDataType_t and ncclRedOp_t."""

POLL_S = 0.001
"""How often it is asked whether a call has come to its end."""

NUM_SLOTS = 2
"""Chunks on the GPU at a time: one is copied there while the other is sent."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_ubyte * ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.18; a newer library takes it by its size and version."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


UNDEFINED = -(1 << 31)
"""A field of the configuration that NCCL chooses."""


def _non_blocking() -> _Config:
    return _Config(
        size=ctypes.sizeof(_Config),
        magic=0xCAFEBEEF,
        version=21800,
        blocking=0,
        cga_cluster_size=UNDEFINED,
        min_ctas=UNDEFINED,
        max_ctas=UNDEFINED,
        net_name=None,
        split_share=UNDEFINED,
    )


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRankConfig": (
        *(ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int),
        ctypes.POINTER(_Config),
    ),
    "ncclCommGetAsyncError": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)),
    "ncclBroadcast": (
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_void_p, ctypes.c_void_p),
    ),
    "ncclAllReduce": (
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_void_p, ctypes.c_void_p),
    ),
    "ncclCommAbort": (ctypes.c_void_p,),
}
"""Arguments; all give an ncclResult_t."""


class Library:
    """NCCL's functions. Raises OSError when the library, or AttributeError when one of them, is
    not there."""

    def __init__(self, name: str = LIBRARY) -> None:
        loaded = ctypes.CDLL(name)
        self._functions: dict[str, Callable[..., int]] = {}
        for function, arguments in SIGNATURES.items():
            found = getattr(loaded, function)
            found.restype, found.argtypes = ctypes.c_int, arguments
            self._functions[function] = found
        self._words = loaded.ncclGetErrorString
        self._words.restype, self._words.argtypes = ctypes.c_char_p, (ctypes.c_int,)
        self._more = loaded.ncclGetLastError
        self._more.restype, self._more.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)

    def call(self, function: str, *arguments: Any) -> int:
        """SUCCESS or IN_PROGRESS. Raises TransferFailed for anything else."""
        result = self._functions[function](*arguments)
        if result not in (SUCCESS, IN_PROGRESS):
            raise TransferFailed(f"{function}: {self.words(result)}")
        return result

    def words(self, result: int) -> str:
        """What a result means, and the last thing that NCCL has said."""
        more = self._more(None) or b""
        return ": ".join(text.decode().strip() for text in (self._words(result), more) if text)


class NcclTransport:
    """Groups by NCCL, from a GPU of this process."""

    def __init__(self, device: torch.device, *, library: str = LIBRARY) -> None:
        """Raises UserError when weights cannot be sent from here."""
        if device.type != "cuda":
            raise UserError(
                f'weights.transport: "nccl" sends from a GPU, and the trainer is on {device.type}; '
                'set it to "grpc", or give the trainer a GPU (trainer.device = "cuda")'
            )
        self._device = device
        try:
            self._library = Library(library)
        except (OSError, AttributeError) as error:
            raise UserError(
                f'weights.transport: "nccl" needs NCCL ({library}), as torch for CUDA brings it '
                f'along, and it is not there ({error}); set it to "grpc", or mend that'
            ) from error

    def new_id(self) -> bytes:
        """An ncclUniqueId: where rank 0 waits for the others. Raises TransferFailed."""
        made = _UniqueId()
        self._library.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made.internal)

    def connect(
        self, group_id: bytes, *, world_size: int, timeout_s: float, given_up: threading.Event
    ) -> "NcclCommunicator":
        """Be rank 0; all ranks call this at the same time. Raises TransferFailed."""
        communicator = NcclCommunicator(self._library, self._device, timeout_s=timeout_s)
        try:
            communicator.connect(group_id, world_size=world_size, given_up=given_up)
        except BaseException:
            communicator.abort()
            raise
        return communicator


@dataclass
class _Slot:
    """A chunk that is on its way, and the stream that it takes."""

    stream: Any
    chunk: torch.Tensor | None = None
    sent: Any = None
    """Event behind it."""


class NcclCommunicator:
    """Rank 0 of one group; see weight_sending.py."""

    def __init__(self, library: Library, device: torch.device, *, timeout_s: float) -> None:
        self._library, self._device, self._timeout_s = library, device, timeout_s
        self._comm = ctypes.c_void_p()
        self._lock = threading.Lock()
        """No call may run in a communicator while it is aborted."""
        self._aborted = False
        self._slots: list[_Slot] = []
        self._number = 0

    def connect(self, group_id: bytes, *, world_size: int, given_up: threading.Event) -> None:
        """Meet the other ranks, and join their first sum. Raises TransferFailed."""
        unique = _UniqueId.from_buffer_copy(group_id)
        with torch.cuda.device(self._device):
            self._slots = [
                _Slot(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
                for _ in range(NUM_SLOTS)
            ]
            stream = self._slots[0].stream
            with torch.cuda.stream(stream):
                number = torch.zeros(1, device=self._device)
            config = _non_blocking()
            self._call(
                "ncclCommInitRankConfig",
                *(ctypes.byref(self._comm), world_size, unique, 0, ctypes.byref(config)),
            )
            self._settle("connecting", given_up)
            pointer = number.data_ptr()
            self._call(
                "ncclAllReduce",
                *(pointer, pointer, 1, FLOAT32, SUM, self._comm, stream.cuda_stream),
            )
            self._settle("the first sum", given_up)
            self._wait(stream.record_event().query, "the first sum", given_up)

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast one chunk; see weight_sending.py."""
        slot = self._slots[self._number % NUM_SLOTS]
        self._number += 1
        self._wait_for(slot)
        parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        num_bytes = sum(part.numel() for part in parts)
        with torch.cuda.device(self._device), torch.cuda.stream(slot.stream):
            slot.chunk = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            begin = 0
            for part in parts:
                slot.chunk[begin : begin + part.numel()].copy_(part)
                begin += part.numel()
            pointer = slot.chunk.data_ptr()
            self._call(
                "ncclBroadcast",
                *(pointer, pointer, num_bytes, UINT8, 0, self._comm, slot.stream.cuda_stream),
            )
            self._settle("a chunk")  # before the event: it may not have been enqueued yet
            slot.sent = slot.stream.record_event()

    def finish(self) -> None:
        """Wait for all chunks. Raises TransferFailed."""
        for slot in self._slots:
            self._wait_for(slot)

    def abort(self) -> None:
        """End the communicator; see weight_sending.py."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            if self._comm:
                with torch.cuda.device(self._device):
                    self._library.call("ncclCommAbort", self._comm)

    def _wait_for(self, slot: _Slot) -> None:
        if slot.sent is not None:
            self._wait(slot.sent.query, "a chunk")
            slot.sent = slot.chunk = None

    def _call(self, function: str, *arguments: Any) -> None:
        with self._lock:
            if self._aborted:
                raise TransferFailed("the group is over")
            self._library.call(function, *arguments)

    def _settle(self, doing: str, given_up: threading.Event | None = None) -> None:
        """Wait until NCCL has done what it was last called for."""
        self._wait(lambda: self._state() == SUCCESS, doing, given_up)

    def _state(self) -> int:
        """Of the communicator. Raises TransferFailed when it has failed."""
        state = ctypes.c_int(SUCCESS)
        self._call("ncclCommGetAsyncError", self._comm, ctypes.byref(state))
        if state.value not in (SUCCESS, IN_PROGRESS):
            raise TransferFailed(f"NCCL: {self._library.words(state.value)}")
        return state.value

    def _wait(
        self,
        done: Callable[[], bool],
        doing: str,
        given_up: threading.Event | None = None,
    ) -> None:
        """Ask until it is done. Raises TransferFailed when it takes too long or NCCL has failed."""
        deadline_s = time.monotonic() + self._timeout_s
        while not done():
            self._state()
            if time.monotonic() > deadline_s:
                raise TransferFailed(f"{doing} took more than {self._timeout_s:g} s")
            if given_up is not None and given_up.is_set():
                raise TransferFailed(f"given up at {doing}")
            time.sleep(POLL_S)
