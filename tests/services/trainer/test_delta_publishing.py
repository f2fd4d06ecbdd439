"""Which versions the publisher has differences made of."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.lifecycle import Lifecycle
from services.trainer.policy import PolicyServicer, PolicyStore
from services.trainer.publishing import Publisher
from tests.services.common import safetensors_bytes
from tests.services.generator.fakes import recorder
from tests.waiting import until


class Learner:
    """Writes words that change a little with each step."""

    def __init__(self, dtype: str) -> None:
        self.dtype, self.num_applied = dtype, 0

    def write_weights(self, path: Path) -> tuple[int, float]:
        words = np.random.default_rng(0).integers(0, 1 << 16, 50_000).astype(np.uint16)
        words[:: 50 + self.num_applied] += 1
        stored = {"bfloat16": "BF16", "float32": "F32"}[self.dtype]
        safetensors_bytes.write(path, {"w": words.tobytes()}, dtype=stored)
        return 1, 0.0

    def canary_logprobs(self, rows: Any) -> Any:
        return np.zeros((rows.shape[0], rows.shape[1] - 1), np.float32)

    def perturbed_logprobs(self, path: Path, rows: Any) -> Any:
        return self.canary_logprobs(rows)


async def in_place(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_versions_in_bfloat16_are_announced_again_with_their_difference(
    tmp_path: Path, dtype: str
) -> None:
    store = PolicyStore(checkpoints=tmp_path, attempt=1, vocab_size=50, max_staleness=2)
    learner: Any = Learner(dtype)
    measured = recorder()
    parts: list[Any] = [PolicyServicer(measured), in_place, Lifecycle("trainer"), measured]
    publisher = Publisher(learner, store, *parts)
    try:
        await publisher.publish()
        first = store.current
        assert first is not None
        learner.num_applied = 1
        await publisher.publish()
        second = store.current
        assert second is not None
        if dtype == "bfloat16":
            await until(lambda: second.delta)
            assert second.delta is not None
            assert second.delta.base_sha256 == first.sha256
            message = store.announcement(second).version.delta
            assert message.base_version == 1
            assert message.size_bytes == second.delta.pieces.size_bytes
            learner.num_applied = 2
            await publisher.publish()  # nothing has failed
        assert first.delta is None
        assert publisher._deltas._tasks or dtype == "float32"
    finally:
        publisher.close()
        store.close()
