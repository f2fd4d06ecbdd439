"""A fault for tests: a load that reports success and leaves the packed output head as it was.

An engine that is started with this `Extension` has the backend without the step that packs the head
again, which is what vLLM's own reload does on CPUs with tied embeddings.
"""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from services.generator import weight_backend


class StaleHead(weight_backend.Backend):
    """Loads all, packs nothing."""

    def repack_embeddings(self) -> None:
        """Left out on purpose."""


class Extension:
    """Naming it makes the worker import this module."""


# Under the same name: the engine asks for no other.
WeightTransferEngineFactory._registry.pop(weight_backend.NAME)
WeightTransferEngineFactory.register_engine(weight_backend.NAME, StaleHead)
