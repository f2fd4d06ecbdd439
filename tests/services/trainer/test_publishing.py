"""What the publisher computes for generators that join in mid-run."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from headrace.v1 import policy_pb2 as wire

from services.common.lifecycle import Lifecycle, cancel
from services.trainer.policy import PolicyServicer, PolicyStore
from services.trainer.publishing import Publisher
from services.trainer.torch_thread import TorchThread
from tests.services.generator.fakes import recorder
from tests.waiting import until


class Learner:
    """Its weights are the number of its steps."""

    dtype = "float32"

    def __init__(self) -> None:
        self.num_applied = 0
        self.read: list[str] = []
        """What was in each file that a proof was computed with."""

    def write_weights(self, path: Path) -> tuple[int, float]:
        path.write_text(f"weights of step {self.num_applied}")
        return 1, 0.0

    def canary_logprobs(self, rows: Any) -> Any:
        return np.zeros((rows.shape[0], rows.shape[1] - 1), np.float32)

    def perturbed_logprobs(self, path: Path, rows: Any) -> Any:
        self.read.append(path.read_text())
        return self.canary_logprobs(rows) + 1


class House:
    """A publisher whose late proofs wait until they are let go."""

    def __init__(self, folder: Path) -> None:
        self.store = PolicyStore(checkpoints=folder, attempt=1, vocab_size=50, max_staleness=1)
        self.learner = Learner()
        self.servicer = PolicyServicer(recorder())
        self.servicer._store = self.store
        self.executor = ThreadPoolExecutor(1)
        self.torch = TorchThread(self.executor)
        parts: list[Any] = [self.servicer, self._turn, Lifecycle("trainer"), recorder()]
        learner: Any = self.learner
        self.publisher = Publisher(learner, self.store, *parts)
        self.late = asyncio.Event()

    async def _turn(self, function: Any, *arguments: Any) -> Any:
        if function == self.learner.perturbed_logprobs:
            await self.late.wait()
        return await self.torch(function, *arguments)

    async def publish(self) -> None:
        await self.publisher.publish()
        self.learner.num_applied += 1

    async def begins_to_fetch(self, name: str) -> None:
        assert self.store.current is not None
        sha256 = self.store.current.sha256
        await self.servicer.FindSource(
            wire.FindSourceRequest(generator=name, sha256=sha256), context=None
        )


async def test_a_late_proof_is_of_the_version_that_is_fetched(tmp_path: Path) -> None:
    """Versions 3 to 5 are published while it waits for its turn; without a newcomer nothing is
    computed for them."""
    here = House(tmp_path)
    proving = asyncio.create_task(here.publisher.prove_late())
    try:
        for _ in range(2):
            await here.publish()
        assert here.learner.read == ["weights of step 0"]  # all begin with the first
        await here.begins_to_fetch("one")
        await until(lambda: here.store._in_use == 2)
        for _ in range(3):
            await here.publish()
        two = here.store.find(2)
        assert two is not None
        here.late.set()
        await until(lambda: two.perturbed_logprobs is not None)
        assert here.learner.read == ["weights of step 0", "weights of step 1"]
        assert here.store.current is not None
        assert here.store.current.perturbed_logprobs is None

        # Two that fetch the same version cost one more forward, and a third that comes later none.
        for name in ("two", "three"):
            await here.begins_to_fetch(name)
        current = here.store.current
        await until(lambda: current.perturbed_logprobs is not None)
        await here.begins_to_fetch("four")
        await until(lambda: not here.servicer.proof_wanted.is_set())
        assert here.learner.read[2:] == ["weights of step 4"]
    finally:
        await cancel(proving)
        here.publisher.close()
        here.store.close()
        here.executor.shutdown()
