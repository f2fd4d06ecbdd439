"""An engine that is started with this `Extension` joins groups by gloo (gloo_engine.py), in its
worker processes, which import this module."""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from services.generator import weight_backend
from tests.services.generator.gloo_engine import GlooEngine, without_streams


class Backend(weight_backend.Backend):
    """With that engine."""

    def group_engine(self) -> NCCLWeightTransferEngine:
        return GlooEngine(self.config, self.vllm_config, self.device, self.model)


class Extension:
    """Naming it makes the worker import this module."""


without_streams()
# Under the same name: the engine asks for no other.
WeightTransferEngineFactory._registry.pop(weight_backend.NAME)
WeightTransferEngineFactory.register_engine(weight_backend.NAME, Backend)
