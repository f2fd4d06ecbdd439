"""From the learner's weights to announced versions."""

from typing import Any

from services.common.lifecycle import Lifecycle
from services.common.recorder import Recorder
from services.trainer.learner import Learner
from services.trainer.policy import PolicyServicer, PolicyStore
from services.trainer.torch_thread import TorchThread


class Publisher:
    """Publishes the present weights, and proves them to generators that join."""

    def __init__(
        self,
        learner: Learner,
        store: PolicyStore,
        servicer: PolicyServicer,
        torch: TorchThread,
        lifecycle: Lifecycle,
        recorder: Recorder,
    ) -> None:
        self._learner, self._store, self._servicer = learner, store, servicer
        self._torch, self._lifecycle, self._recorder = torch, lifecycle, recorder

    @property
    def steps_behind(self) -> int:
        """Optimizer steps applied since the last version."""
        return self._learner.num_applied - self._store.step_of[self._store.version]

    async def publish(self, *, again: int | None = None) -> None:
        """Write and announce the present weights as the next version; as version `again` when the
        run is over and nothing new may be published."""
        learner, store = self._learner, self._store
        path, rows = store.next_path(), store.canary_rows
        with_proof = store.current is None or self._servicer.unproven

        def write() -> tuple[tuple[int, float], Any, Any]:
            written = learner.write_weights(path)
            perturbed = learner.perturbed_logprobs(path, rows) if with_proof else None
            return written, learner.canary_logprobs(rows), perturbed

        (num_tensors, gathering_s), canary, perturbed = await self._torch(write)
        self._recorder.observe("perf/weight_sync_barrier_s", gathering_s)
        published = await store.publish(
            step=learner.num_applied,
            num_tensors=num_tensors,
            dtype=learner.dtype,
            canary_logprobs=canary,
            perturbed_logprobs=perturbed,
            again=again,
        )
        self._lifecycle.details["version"] = str(published.version)

    async def prove_late(self) -> None:
        """Give generators that join between two versions what their load-path proof needs, for
        ever."""
        while True:
            await self._servicer.proof_wanted.wait()
            self._servicer.proof_wanted.clear()
            # Again, should a version without them have been published meanwhile.
            while (current := self._store.current) and current.perturbed_logprobs is None:
                rows = self._store.canary_rows
                values = await self._torch(self._learner.perturbed_logprobs, current.path, rows)
                await self._store.add_perturbed(current.version, values)
