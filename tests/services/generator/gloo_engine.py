"""vLLM's NCCL weight transfer on CPUs: its own code, in a group by gloo, and without the CUDA
streams that it receives in."""

import base64
import contextlib
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.weight_transfer import packed_tensor
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from tests.gloo_groups import Gloo

CONNECT_S = 60.0


class _Stream:
    """In place of a CUDA stream: all is done when it is called for."""

    def synchronize(self) -> None: ...


class GlooEngine(NCCLWeightTransferEngine):  # type: ignore[misc,unused-ignore]
    """Connects by gloo."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        self.packed = init_info.packed
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        self.packed_num_buffers = init_info.packed_num_buffers
        assert init_info.nccl_unique_id_b64 is not None
        self.model_update_group = Gloo(
            base64.b64decode(init_info.nccl_unique_id_b64),
            rank=init_info.rank_offset + self.parallel_config.rank,
            world_size=init_info.world_size,
            timeout_s=CONNECT_S,
        )


def without_streams(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let vLLM's receiver run in this process, where there is no CUDA."""
    put(packed_tensor, "_get_streams", lambda device, num: (_Stream(),) * num)
    put(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    put(torch.accelerator, "current_device_index", lambda: 0)
