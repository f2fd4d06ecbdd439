"""A snapshot of all ranks on its way to disk: each rank writes a file of its own, at the same time.

Rank 0's thread for checkpoints names the folder and the snapshot, every other rank has a thread
that waits for it (`follow`); then each writes its file and says what became of it. Training goes on
meanwhile.

waits_for: the other ranks' writing. unblocked_by: their end ends all (rank_processes.py).
"""

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from services.common.files import sha256, sync
from services.trainer import tensor_files
from services.trainer.ranks import Group
from services.trainer.tensor_files import Part

MESSAGE_BYTES = 2048
"""Room for what a rank says: a path, or what became of its file."""


@dataclass(frozen=True)
class Digest:
    """What a file must be."""

    bytes: int
    sha256: str


class RankFiles:
    """What rank 0 holds of a snapshot; the other ranks hold their own parts."""

    def __init__(self, group: Group, parts: Mapping[str, Part], *, number: int = 0) -> None:
        self._group, self._parts, self._number = group, parts, number

    def write(self, folder: Path) -> dict[str, Digest]:
        """Have every rank write its file into a folder that is there, durably; the files by name.

        Raises OSError when one of them cannot be written.
        """
        _broadcast(self._group, json.dumps([self._number, str(folder.absolute())]))
        said = _exchanged(self._group, _written(self._group.rank, folder, self._parts))
        for rank, each in enumerate(said):
            if "error" in each:
                raise OSError(f"rank {rank}: {each['error']}" if len(said) > 1 else each["error"])
        return {each.pop("name"): Digest(**each) for each in said}


class Snapshots:
    """What another rank holds: the newest snapshot, counted as rank 0 counts them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._number = 0
        self._parts: Mapping[str, Part] = {}

    def put(self, parts: Mapping[str, Part]) -> None:
        """The next one has been taken; the one before is over."""
        with self._changed:
            self._number += 1
            self._parts = parts
            self._changed.notify_all()

    def get(self, number: int) -> Mapping[str, Part]:
        """That one, once it has been taken: its name may come before."""
        with self._changed:
            self._changed.wait_for(lambda: self._number >= number)
            assert self._number == number, f"snapshot {number} is over, {self._number} is here"
            return self._parts


def follow(group: Group, snapshots: Snapshots) -> None:
    """Another rank: write what rank 0 says whenever it says so, for ever."""
    while True:
        number, folder = json.loads(_broadcast(group, ""))
        _exchanged(group, _written(group.rank, Path(folder), snapshots.get(number)))


def _written(rank: int, folder: Path, parts: Mapping[str, Part]) -> dict[str, Any]:
    file = folder / tensor_files.name_of(rank)
    try:
        tensor_files.write(file, parts)
        sync(file)
        digest = Digest(file.stat().st_size, sha256(file))
    except (OSError, SafetensorError) as error:
        return {"error": str(error)[: MESSAGE_BYTES // 4]}
    return {"name": file.name, **asdict(digest)}


def _broadcast(group: Group, text: str) -> str:
    """What rank 0 says, on every rank."""
    if group.size == 1:
        return text
    message = _message(text)
    dist.broadcast(message, src=0, group=group.saving)
    return _text(message)


def _exchanged(group: Group, own: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank says, in the order of ranks."""
    if group.size == 1:
        return [own]
    found = [_message("") for _ in range(group.size)]
    dist.all_gather(found, _message(json.dumps(own)), group=group.saved)
    return [json.loads(_text(each)) for each in found]


def _message(text: str) -> torch.Tensor:
    data = text.encode()
    assert len(data) <= MESSAGE_BYTES, f"{len(data)} bytes are too many to say: {text[:80]}…"
    return torch.frombuffer(bytearray(data.ljust(MESSAGE_BYTES, b"\0")), dtype=torch.uint8)


def _text(message: torch.Tensor) -> str:
    return message.numpy().tobytes().rstrip(b"\0").decode()
