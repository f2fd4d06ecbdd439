"""Runs inside vLLM's worker process: load one policy version, from a safetensors file or as it is
broadcast to a group that the worker is in (weight_receiver.py). Either way is the same load.

Importing this module registers the backend "headrace" with vLLM's weight transfer; the engine names
`Extension` as `worker_extension_cls`, which makes vLLM import it in the worker. vLLM's layerwise
reload does the work. It has one trap: on CPUs, with tied embeddings, the reload succeeds and the
output head keeps serving the old weights, because the CPU backend has packed a copy of them, and
what it shares with the embedding is loaded through that alone. So embeddings that share their
weights are packed once more after the reload. The load-path proof of services/generator/proof.py
shows that it helped.

Embeddings that are only looked up need no packed copy, which vLLM makes of each: here one is made
at its first use as an output head, so that mostly there is none, neither in memory nor in the time
of a load.
"""

from collections import Counter
from collections.abc import Iterable
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
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from services.generator.weight_receiver import Receiver

NAME = "headrace"
"""Of the backend, in vLLM's registry."""


@dataclass
class Init(WeightTransferInitInfo):  # type: ignore[misc,unused-ignore]
    """A group to be in from now on; nothing has to be agreed on for files."""

    group: dict[str, Any] | None = None
    """vLLM's NCCLWeightTransferInitInfo."""
    timeout_s: float = 0.0
    """Of the group; see weight_receiver.py."""


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc,unused-ignore]
    """A whole version, in one of two ways."""

    path: str | None = None
    """Its safetensors file, on this machine."""
    tensors: dict[str, Any] | None = None
    """What is broadcast: vLLM's NCCLWeightTransferUpdateInfo."""


class Backend(WeightTransferEngine[Init, Update]):  # type: ignore[misc,unused-ignore]
    """Loads all parameters, or raises; the caller then loads a whole file."""

    init_info_cls = Init
    update_info_cls = Update
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._receiver = Receiver(self.group_engine)
        for module in model.modules() if device.type == "cpu" else ():
            # Heads are of a subclass, but some models have their embedding for a head, too.
            method = getattr(module, "quant_method", None)
            if (
                type(module) is VocabParallelEmbedding
                and type(method) is UnquantizedEmbeddingMethod
            ):
                setattr(method, "process_weights_after_loading", pack_when_used)  # noqa: B010 - mypy
                pack_when_used(module)

    def group_engine(self) -> NCCLWeightTransferEngine:
        """What connects and receives in a group."""
        return NCCLWeightTransferEngine(self.config, self.vllm_config, self.device, self.model)

    def init_transfer_engine(self, init_info: Init) -> None:
        """Join a group where there is one. Raises NotReceived."""
        if init_info.group is not None:
            self._receiver.join(init_info.group, timeout_s=init_info.timeout_s)

    def start_weight_update(self) -> None:
        """Put every layer back into the form that checkpoints are loaded into."""
        self._expected = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a version; raises when a parameter of the model is not in it."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            finalize_layerwise_reload(self.model, self.model_config)
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        """Stream the tensors of the version into the model."""
        if update_info.tensors is None:
            loaded = self._load_file(str(update_info.path))
        else:
            loaded = self._receiver.receive(update_info.tensors, self.model)
        # A few models do not say; for them the proof and the canary stand alone.
        if loaded is not None:
            missing = sorted(self._expected - set(loaded))
            if missing:
                raise ValueError(
                    f"{len(missing)} parameters were not written: {', '.join(missing[:5])}"
                )

    def _load_file(self, path: str) -> Iterable[str] | None:
        """One tensor at a time; the names of the parameters that were written."""
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            loaded: Iterable[str] | None = self.model.load_weights(
                (name, file.get_tensor(name)) for name in names
            )
        return loaded

    def finish_weight_update(self) -> None:
        """Bring every layer back into the form that is served, the packed output head included."""
        finalize_layerwise_reload(self.model, self.model_config)
        self.repack_embeddings()

    def repack_embeddings(self) -> None:
        """Pack embeddings (the output head is one) that share their weights from those just
        loaded. Others have been packed as they were loaded: again takes a third of a load."""
        modules = list(self.model.modules())
        users = Counter(
            id(weights) for module in modules for weights in module.parameters(recurse=False)
        )
        for module in modules:
            shares = any(users[id(weights)] > 1 for weights in module.parameters(recurse=False))
            if shares and isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Be in no group."""
        self._receiver.leave()


def pack_when_used(layer: Any) -> None:
    """Have an embedding's weights packed when it is first called as a linear layer, as they are
    then; instead of vLLM's `process_weights_after_loading`, which packs them at once."""

    def first(*arguments: Any) -> torch.Tensor:
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        result: torch.Tensor = layer.cpu_linear(*arguments)
        return result

    layer.cpu_linear = first


def register() -> None:
    """Make the backend known to this process; safe to call again."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, Backend)


class Extension:
    """Empty on purpose: naming it makes the worker import this module."""


register()
