"""Which policy version this replica serves: follow the trainer's announcements, load, prove,
report.

State machine: UNPROVEN (start: no version, no work) -> SERVING v -> (fetch v' while generating) ->
LOADING v' (engine paused, requests kept) -> canary -> SERVING v'. A failed load or canary: not
serving; everything held is given back, a whole file is fetched and loaded again; after MAX_LOADS
failures in a row the process ends and is started anew.

It owns no streams and no conversations.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import structlog

from services.common.background import guarded
from services.common.recorder import Recorder
from services.generator.perturbation import perturbed_copy
from services.generator.proof import Canary, LoadNotProven, prove
from services.generator.types import EngineDead, LoadTimes
from services.generator.weight_group import GroupMember
from services.generator.weights import Announcement, FetchFailed, PolicyClient, TooOld

MAX_LOADS = 3
"""Failed loads in a row before the replica gives up."""

LOOK_S = 0.01
"""How often it is seen whether a version on its way has come."""

REFETCH_S = 0.2
"""Pause before a version that could not be fetched is tried again, or a newer one."""


class Loads(Protocol):
    """The part of the engine that serving needs; see engine.py."""

    async def load(self, path: Path, version: int) -> LoadTimes:
        """Replace the weights under running requests; paused when it raises."""
        ...

    async def pause(self) -> None:
        """Let nothing run until the next load has succeeded."""
        ...

    async def row_logprobs(
        self, rows: "np.ndarray[Any, Any]"
    ) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """Log-probabilities of the canary's rows."""
        ...


class Serving:
    """The version served now, and the loop that replaces it."""

    def __init__(
        self,
        engine: Loads,
        client: PolicyClient,
        recorder: Recorder,
        *,
        dtype: str,
        details: MutableMapping[str, str],
        group: GroupMember | None = None,
    ) -> None:
        """dtype: of the engine. details: what this replica says of itself in its status. group: the
        membership by which versions may come instead of being fetched."""
        self._engine, self._client, self._recorder = engine, client, recorder
        self._dtype, self._details, self._group = dtype, details, group
        self._trainer_dtype = dtype
        self._canary = Canary()
        self.version = 0
        """Loaded and labelled; 0 before the first."""
        self.proven = 0
        """The newest version whose canary has passed: results of newer tokens wait for it."""
        self.attempt = 0
        """That published the version served."""
        self.publishes = 0
        """The served version's place in the line of published weights."""
        self._proven_changed = asyncio.Condition()
        self._paused_s = 0.0

    @property
    def behind(self) -> int:
        """Versions between the newest announced and the one served."""
        latest = self._client.latest
        return 0 if latest is None else latest.version - self.version

    @property
    def may_take_work(self) -> bool:
        """True when a version has been proven here and the replica is not too far behind; nor
        serves what an earlier attempt published: it may be of a dead line, where work is lost."""
        latest = self._client.latest
        if self.proven == 0 or latest is None or self.attempt < latest.attempt:
            return False
        return self.behind <= latest.max_staleness

    async def version_to_begin_with(self) -> int:
        """The version served, once one that is on its way is.

        Prompts come when a step is done, which is when a version has just been announced: begun
        with the one before, their groups would be a version older from the first token on.
        """
        while self._client.expects_newer_than(self.version):  # noqa: ASYNC110 - time ends it, too
            await asyncio.sleep(LOOK_S)
        return self.version

    async def start(self, say: Callable[[str], None]) -> None:
        """Load the first version with the load-path proof. Raises LoadNotProven when the engine
        does not pass it."""
        say("waiting for the first policy version")
        path, proven_by = None, None
        while path is None or proven_by is None:
            target = await self._client.newer_than(0)
            # Fetched while the trainer computes the values of its proof, which takes it a while.
            # They are of this version though newer ones may have come: those wait until it serves.
            say(f"fetching policy version {target.version}")
            path = await self._fetch(target)
            if path is not None:
                proven_by = await self._client.provable(target)
        target = proven_by
        self._compare_dtype(target)
        say("proving the weight load path")
        perturbed = await asyncio.to_thread(perturbed_copy, path)
        await self._engine.load(perturbed, 0)
        engine_perturbed = await self._engine.row_logprobs(target.canary_rows)
        times = await self._engine.load(path, target.version)
        engine_true = await self._engine.row_logprobs(target.canary_rows)
        proof = prove(
            engine_true=engine_true,
            engine_perturbed=engine_perturbed,
            trainer_true=target.canary_logprobs,
            trainer_perturbed=target.perturbed_logprobs,
            dtypes={target.dtype, self._dtype},
        )
        structlog.get_logger().info(
            "load path proven",
            movement=proof.movement,
            movement_error=proof.movement_error,
            true_error=proof.true_error,
        )
        gap = self._canary.gap(engine_true, target.canary_logprobs)
        await self._serve(target, path, times, gap)

    async def follow(self, on_failure: Callable[[], Awaitable[None]]) -> None:
        """Serve each newer version, for ever. `on_failure` gives back all held work before a
        failed load is repeated."""
        beside = () if self._group is None else (self._group.run(),)
        await guarded(self._follow(on_failure), *beside)

    async def _follow(self, on_failure: Callable[[], Awaitable[None]]) -> None:
        failures = 0
        while True:
            target = await self._client.newer_than(
                self.version if self.proven else 0, attempt=self.attempt
            )
            path, times = None, None
            if self._group is not None and self._group.is_sent(target):
                times = await self._group.receive(target)
                if times is not None:
                    self._recorder.observe("perf/weight_sync_transfer_s", times.load_s)
            else:
                path = await self._fetch(target)
            if path is None and times is None:
                continue
            self._compare_dtype(target)
            try:
                if path is not None:
                    times = await self._engine.load(path, target.version)
                assert times is not None
                self.version, self.publishes = target.version, target.publishes
                self._paused_s += times.pause_s
                engine = await self._engine.row_logprobs(target.canary_rows)
                gap = self._canary.gap(engine, target.canary_logprobs)
            except EngineDead:
                raise
            except Exception as error:
                failures += 1
                self._recorder.count("policy/canary_failed_total")
                structlog.get_logger().error("load failed", version=target.version, exc_info=True)
                self.proven = 0
                # Where only the canary failed the engine runs: what it samples would bear the label
                # of a version that a later load proves.
                await self._engine.pause()
                await on_failure()
                if path is not None:
                    path.unlink(missing_ok=True)
                elif self._group is not None:
                    self._group.leave("what was broadcast is not proven")
                if failures >= MAX_LOADS:
                    raise LoadNotProven(
                        f"{failures} loads in a row failed; the last: {error}"
                    ) from error
                continue
            failures = 0
            await self._serve(target, path, times, gap)

    async def wait_proven(self, version: int) -> None:
        """Return when the canary of `version` (or a newer one) has passed."""
        if self.proven >= version:
            return
        async with self._proven_changed:
            await self._proven_changed.wait_for(lambda: self.proven >= version)

    def take_paused_s(self) -> float:
        """Seconds paused since the last call."""
        seconds, self._paused_s = self._paused_s, 0.0
        return seconds

    def _compare_dtype(self, target: Announcement) -> None:
        """Say aloud that the trainer computes in another precision than the engine: importance
        ratios of fresh tokens are then no longer 1, and nothing else would tell why."""
        if target.dtype == self._trainer_dtype:
            return
        self._trainer_dtype = target.dtype
        if target.dtype == self._dtype:
            self._details.pop("dtype_mismatch", None)
            return
        self._details["dtype_mismatch"] = f"engine {self._dtype}, trainer {target.dtype}"
        structlog.get_logger().warning(
            "DTYPE MISMATCH: trainer and engine round differently, so their log-probabilities "
            "differ for the same weights; give both recipes the same model.dtype",
            engine=self._dtype,
            trainer=target.dtype,
        )

    async def _fetch(self, target: Announcement) -> Path | None:
        begin_s = time.monotonic()
        try:
            path = await self._client.fetch(target)
        except TooOld as error:
            structlog.get_logger().info("fetch abandoned", why=str(error))
            await asyncio.sleep(REFETCH_S * random.uniform(0.5, 1.5))
            return None
        except FetchFailed as error:
            self._recorder.count("policy/fetch_failed_total")
            structlog.get_logger().error("fetch failed", why=str(error))
            await asyncio.sleep(REFETCH_S * random.uniform(0.5, 1.5))
            return None
        self._recorder.observe("perf/weight_sync_transfer_s", time.monotonic() - begin_s)
        return path

    async def _serve(
        self, target: Announcement, path: Path | None, times: LoadTimes, gap: float
    ) -> None:
        """path: its file; None of a version that was broadcast."""
        self.version, self.attempt = target.version, target.attempt
        self.publishes = target.publishes
        async with self._proven_changed:
            # A new attempt's number may be lower: what was proven before it stays so.
            self.proven = max(self.proven, target.version)
            self._proven_changed.notify_all()
        # The previous file stays until the next version is proven: then it is of no more use.
        self._client.keep_only(*([] if path is None else [path]))
        self._recorder.observe("perf/weight_sync_pause_s", times.pause_s)
        self._recorder.observe("policy/served_version", target.version)
        self._recorder.observe("policy/canary_gap", gap)
        await self._client.report(
            version=target.version,
            pause_s=times.pause_s,
            canary_gap=gap,
            without_file=path is None,
        )
