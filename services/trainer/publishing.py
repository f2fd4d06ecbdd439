"""From the learner's weights to announced versions."""

import asyncio
from typing import Any

from services.common.lifecycle import Lifecycle
from services.common.recorder import Recorder
from services.trainer.delta_maker import DeltaMaker, Wanted
from services.trainer.learner import Learner
from services.trainer.policy import PolicyServicer, PolicyStore
from services.trainer.published import Published
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
        self._deltas = DeltaMaker(recorder, announce=store.add_delta)

    def close(self) -> None:
        """Give up what is made in the background."""
        self._deltas.close()

    @property
    def steps_behind(self) -> int:
        """Optimizer steps applied since the last version."""
        return self._learner.num_applied - self._store.step_of[self._store.version]

    async def publish(self, *, again: int | None = None) -> None:
        """Write and announce the present weights as the next version; as version `again` when the
        run is over and nothing new may be published."""
        learner, store = self._learner, self._store
        path, rows = store.next_path(), store.canary_rows
        with_proof = store.current is None  # all that are here begin with it

        def values() -> tuple[Any, Any]:
            perturbed = learner.perturbed_logprobs(path, rows) if with_proof else None
            return learner.canary_logprobs(rows), perturbed

        num_tensors, gathering_s = await self._torch(learner.write_weights, path)
        self._recorder.observe("perf/weight_sync_barrier_s", gathering_s)
        # The file's digest while torch computes the canary: a step waits for both.
        pieces, (canary, perturbed) = await asyncio.gather(
            store.describe_next(), self._torch(values)
        )
        published = await store.publish(
            step=learner.num_applied,
            num_tensors=num_tensors,
            dtype=learner.dtype,
            canary_logprobs=canary,
            perturbed_logprobs=perturbed,
            pieces=pieces,
            again=again,
        )
        self._lifecycle.details["version"] = str(published.version)
        self._make_delta(published)

    def _make_delta(self, published: Published) -> None:
        """Have the difference to the version before made, where one may be of use: in float32 a
        step changes all weights."""
        before = self._store.before(published.version)
        if published.dtype == "bfloat16" and before is not None:
            wanted = Wanted(
                version=published.version,
                path=published.path,
                chunks=published.file.pieces,
                base_version=before.version,
                base_sha256=before.sha256,
                base=before.path,
            )
            self._deltas.make(wanted)

    async def prove_late(self) -> None:
        """Give generators that join later what their load-path proof needs, for ever: of the
        version that each fetches, though newer ones may be published before this is computed."""
        store, rows = self._store, self._store.canary_rows
        while True:
            await self._servicer.proof_wanted.wait()
            self._servicer.proof_wanted.clear()
            for version in self._servicer.proofs_wanted:
                with store.in_use(version) as fetched:
                    if fetched is None:
                        continue
                    values = fetched.perturbed_logprobs
                    if values is None:
                        values = await self._torch(
                            self._learner.perturbed_logprobs, fetched.path, rows
                        )
                    # Also where another one's fetch had it computed: this one has not been told.
                    await store.add_perturbed(version, values)
