"""Runs inside vLLM's worker process: load one policy version from a safetensors file.

Importing this module registers the backend "headrace" with vLLM's weight transfer; the engine names
`Extension` as `worker_extension_cls`, which makes vLLM import it in the worker. vLLM's layerwise
reload does the work. It has one trap: on CPUs, with tied embeddings, the reload succeeds and the
output head keeps serving the old weights, because the CPU backend has packed a copy of them. So
every embedding is packed once more after the reload. The load-path proof of
services/generator/proof.py shows that it helped.
"""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

NAME = "headrace"
"""Of the backend, in vLLM's registry."""


@dataclass
class FileInit(WeightTransferInitInfo):  # type: ignore[misc,unused-ignore]
    """Nothing to agree on beforehand."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):  # type: ignore[misc,unused-ignore]
    """A whole version."""

    path: str
    """Its safetensors file, on this machine."""


class FileBackend(WeightTransferEngine[FileInit, FileUpdate]):  # type: ignore[misc,unused-ignore]
    """Loads all parameters from a file, or raises; the caller then loads a whole file again."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Put every layer back into the form that checkpoints are loaded into."""
        self._expected = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the file; raises when a parameter of the model is not in it."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            finalize_layerwise_reload(self.model, self.model_config)
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Stream the tensors of the file into the model, one at a time."""
        with safe_open(update_info.path, framework="pt") as file:
            names = list(file.keys())
            loaded = self.model.load_weights((name, file.get_tensor(name)) for name in names)
        # A few models do not say; for them the proof and the canary stand alone.
        if loaded is not None:
            missing = sorted(self._expected - set(loaded))
            if missing:
                raise ValueError(
                    f"{len(missing)} parameters were not written: {', '.join(missing[:5])}"
                )

    def finish_weight_update(self) -> None:
        """Bring every layer back into the form that is served, the packed output head included."""
        finalize_layerwise_reload(self.model, self.model_config)
        self.repack_embeddings()

    def repack_embeddings(self) -> None:
        """Pack embeddings (the output head is one) from the weights just loaded."""
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing is held."""


def register() -> None:
    """Make the backend known to this process; safe to call again."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, FileBackend)


class Extension:
    """Empty on purpose: naming it makes the worker import this module."""


register()
