"""The tensors of a checkpoint as safetensors files, one of each rank, in the layout of
torch.distributed.checkpoint's HuggingFaceStorageReader: any number of ranks reads what any other
number has written.

    rank-00000.safetensors    "master.lm_head.weight": rows 0 to 24
    rank-00001.safetensors    "master.lm_head.weight": rows 25 to 49

Where the rows begin is in the file's metadata. The files are written here and not by torch, whose
writer makes each of them in memory first.
"""

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

OFFSETS, OFFSETS_OF_ONE = "DCP_SHARDING_INFO", "saved_offsets"
"""In the metadata of a file: {tensor: {"saved_offsets": [...]}} as JSON."""


@dataclass(frozen=True)
class Part:
    """Some rows of a tensor, on the CPU."""

    tensor: torch.Tensor
    first_row: int = 0


def name_of(rank: int) -> str:
    """The file of a rank."""
    return f"rank-{rank:05}.safetensors"


def write(path: Path, parts: Mapping[str, Part]) -> None:
    """Write what one rank has. Raises OSError and SafetensorError."""
    # A rank may have no rows of a small tensor; the reader takes an empty part for an overlap.
    held = {name: part for name, part in parts.items() if part.tensor.numel()}
    offsets = {
        name: {OFFSETS_OF_ONE: [part.first_row, *[0] * (part.tensor.ndim - 1)][: part.tensor.ndim]}
        for name, part in held.items()
    }
    save_file(
        {name: part.tensor for name, part in held.items()},
        path,
        metadata={"format": "pt", OFFSETS: json.dumps(offsets)},
    )


def shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every whole tensor in the files of a folder."""
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: (about.size, about.properties.dtype)
        for name, about in found.items()
        if isinstance(about, TensorStorageMetadata)
    }


def read(folder: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Read tensors in place: all rows of a plain one, this rank's of a DTensor. Raises ValueError
    when a tensor is not there or has another shape."""
    reader = HuggingFaceStorageReader(str(folder))
    with warnings.catch_warnings():
        # That it reads for one process is what is asked: ranks find what they need by themselves.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(dict(into), storage_reader=reader, no_dist=True)


def read_whole(folder: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Whole tensors, in one process and without others. Raises KeyError for one that is not
    there."""
    about = shapes(folder)
    tensors = {name: torch.empty(about[name][0], dtype=about[name][1]) for name in names}
    read(folder, tensors)
    return tensors


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint by the names of the model's parameters, float32 where the
    optimizer keeps them so; what is tied once."""
    prefix = "master."
    names = [name for name in shapes(folder) if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensor for name, tensor in read_whole(folder, names).items()}
