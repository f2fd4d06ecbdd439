"""The way of a policy version from the trainer into this replica: announced, fetched, checked.

`PolicyClient` speaks PolicyService. A fetch goes on while the engine generates; it resumes at the
byte where a broken connection left it, checks every piece and the whole file, and is abandoned only
when its version is too old to serve. Files live in memory-backed storage where there is some; the
previous file is kept until the next is proven.
"""

import asyncio
import math
import random
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import structlog
from headrace.v1 import policy_pb2 as wire
from headrace.v1 import policy_pb2_grpc

from services.common.errors import UserError
from services.common.files import sha256
from services.common.grpc_kit import UNARY_DEADLINE_S
from services.common.memory_folder import MemoryFolder

RETRY_S = (0.2, 3.0)
"""Shortest and longest pause before a broken stream is opened again."""

MAX_EXPECTED_S = 30.0
"""Longest time that a version is waited for after its announcement, however rare versions are."""

MAX_FETCHES = 5
"""Tries at one version; then it has failed."""


class FetchFailed(RuntimeError):
    """A version could not be fetched whole; the message says why."""


class TooOld(RuntimeError):
    """The version is not worth fetching any more: a newer one has been announced meanwhile, or
    it is no longer kept."""


@dataclass(frozen=True)
class Announcement:
    """A version as the trainer announced it."""

    version: int
    attempt: int
    step: int
    sha256: str
    size_bytes: int
    dtype: str
    canary_rows: "np.ndarray[Any, Any]"
    """int64 [rows, tokens]."""
    canary_logprobs: "np.ndarray[Any, Any]"
    """float32 [rows, tokens - 1]."""
    perturbed_logprobs: "np.ndarray[Any, Any]"
    """The same under the perturbed weights; empty where the trainer sent none."""
    max_staleness: int
    publishes: int
    """Its place in the line of published weights; see policy.proto."""


def _announcement(answer: wire.WatchPolicyResponse) -> Announcement:
    version = answer.version
    tokens = version.canary.row_tokens
    return Announcement(
        version=version.version,
        attempt=version.attempt,
        step=version.step,
        sha256=version.sha256,
        size_bytes=version.size_bytes,
        dtype=version.dtype,
        canary_rows=np.frombuffer(version.canary.token_ids, "<u4")
        .reshape(-1, tokens)
        .astype(np.int64),
        canary_logprobs=np.frombuffer(version.canary.logprobs, "<f4").reshape(-1, tokens - 1),
        perturbed_logprobs=np.frombuffer(version.canary.perturbed_logprobs, "<f4").reshape(
            -1, tokens - 1
        ),
        max_staleness=answer.max_staleness,
        publishes=version.publishes,
    )


class PolicyClient:
    """This replica's view of the trainer's PolicyService, over one channel."""

    def __init__(self, channel: grpc.aio.Channel, *, generator: str) -> None:
        self._stub = policy_pb2_grpc.PolicyServiceStub(channel)
        self._generator = generator
        self.latest: Announcement | None = None
        self._served: wire.ReportServingRequest | None = None
        self._announced_s, self._expected_by_s = -math.inf, -math.inf
        self._changed = asyncio.Condition()
        self._memory = MemoryFolder("weights")
        self._folder = self._memory.path

    def close(self) -> None:
        """Remove the fetched files."""
        self._memory.close()

    async def model_files(self, cache: Path) -> Path:
        """The folder with the model's configuration, tokenizer and chat template, fetched when not
        cached.

        Waits for the trainer as long as it takes. The cache is named by the set's digest.
        """
        pause = _Backoff()
        while True:
            try:
                return await self._model_files(cache)
            except grpc.aio.AioRpcError as error:
                _raise_if_hopeless(error)
            await pause()

    async def _model_files(self, cache: Path) -> Path:
        content: dict[str, bytearray] = {}
        folder: Path | None = None
        call = self._stub.FetchModelFiles(wire.FetchModelFilesRequest())
        try:
            async for piece in call:
                if folder is None:
                    folder = cache / piece.set_sha256
                    if await asyncio.to_thread(folder.is_dir):
                        return folder
                content.setdefault(Path(piece.name).name, bytearray()).extend(piece.data)
        finally:
            call.cancel()
        assert folder is not None, "a model has files"
        await asyncio.to_thread(_write_folder, folder, content)
        return folder

    async def watch(self) -> None:
        """Keep `latest` current, for ever; announcements of an attempt lower than one seen are
        ignored.

        A trainer knows nothing of a replica whose stream is new: what is served is said again.
        """
        pause = _Backoff()
        request = wire.WatchPolicyRequest(generator=self._generator)
        while True:
            known = False
            try:
                async for answer in self._stub.WatchPolicy(request):
                    pause.reset()
                    await self._see(_announcement(answer))
                    if not known:
                        known = True
                        await self._report_again()
            except grpc.aio.AioRpcError as error:
                _raise_if_hopeless(error)
            await pause()

    async def _see(self, announced: Announcement) -> None:
        if self.latest is not None and announced.attempt < self.latest.attempt:
            return
        if self.latest is None or announced.version != self.latest.version:
            before_s, self._announced_s = self._announced_s, time.monotonic()
            waited_s = min(MAX_EXPECTED_S, (self._announced_s - before_s) / 2)
            self._expected_by_s = self._announced_s + waited_s
        async with self._changed:
            self.latest = announced
            self._changed.notify_all()

    def expects_newer_than(self, version: int) -> bool:
        """Whether a newer version has been announced, and not so long ago that waiting for it would
        cost more than it brings: half of the time between the last two announcements."""
        latest = self.latest
        return (
            latest is not None
            and latest.version > version
            and time.monotonic() < self._expected_by_s
        )

    async def newer_than(self, version: int, *, attempt: int | None = None) -> Announcement:
        """Wait until a version above `version` is announced, or any of an attempt above `attempt`:
        a trainer that was replaced may have published past the one that goes on. The latest one."""
        return await self._latest_that(
            lambda latest: (
                latest.version > version or (attempt is not None and latest.attempt > attempt)
            )
        )

    async def provable(self) -> Announcement:
        """Wait until the latest announcement has the values of the load-path proof. The trainer
        computes them when a replica joins, and then announces the version again."""
        return await self._latest_that(lambda latest: latest.perturbed_logprobs.size > 0)

    async def other_than(self, seen: Announcement | None) -> Announcement:
        """Wait until another announcement than `seen` is the latest one."""
        return await self._latest_that(lambda latest: latest is not seen)

    async def _latest_that(self, suits: Callable[[Announcement], bool]) -> Announcement:
        async with self._changed:
            await self._changed.wait_for(lambda: self.latest is not None and suits(self.latest))
            assert self.latest is not None
            return self.latest

    async def fetch(self, target: Announcement) -> Path:
        """Fetch a version's file; returns its path. Raises TooOld or FetchFailed."""
        path = self._folder / f"{target.version}-{target.sha256[:16]}.safetensors"
        if path.exists():
            return path
        partial = path.with_suffix(".part")
        pause = _Backoff()
        why = ""
        for _ in range(MAX_FETCHES):
            offset = partial.stat().st_size if partial.exists() else 0
            try:
                await self._fetch_from(target, partial, offset)
                digest = await asyncio.to_thread(sha256, partial)
                if digest == target.sha256:
                    partial.rename(path)
                    return path
                why = f"digest {digest[:12]}… where {target.sha256[:12]}… was announced"
                partial.unlink()
            except grpc.aio.AioRpcError as error:
                _raise_if_hopeless(error)
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    partial.unlink(missing_ok=True)
                    raise TooOld(
                        f"version {target.version} is no longer kept by the trainer"
                    ) from error
                why = f"{error.code().name}: {error.details()}"
            except _BadPiece as error:
                why = str(error)
            await pause()
        raise FetchFailed(f"version {target.version}: {why}")

    async def _fetch_from(self, target: Announcement, partial: Path, offset: int) -> None:
        request = wire.FetchWeightsRequest(
            version=target.version, sha256=target.sha256, offset=offset
        )
        call = self._stub.FetchWeights(request)
        try:
            with partial.open("ab") as file:
                async for piece in call:
                    if piece.offset != offset or zlib.crc32(piece.data) != piece.crc32:
                        raise _BadPiece(f"a damaged piece at byte {offset}")
                    file.write(piece.data)
                    offset += len(piece.data)
                    behind = self.latest.version - target.version if self.latest else 0
                    if behind > target.max_staleness:
                        raise TooOld(f"version {target.version} is {behind} behind")
        finally:
            call.cancel()
        if offset != target.size_bytes:
            raise _BadPiece(f"{offset} bytes where {target.size_bytes} were announced")

    def keep_only(self, *paths: Path) -> None:
        """Delete fetched files other than `paths`."""
        for path in self._folder.iterdir():
            if path.suffix in (".safetensors", ".part") and path not in paths:
                path.unlink(missing_ok=True)

    async def report(self, *, version: int, pause_s: float, canary_gap: float) -> None:
        """Tell the trainer what this replica serves; a trainer that is away learns it when the
        watch has reached it again."""
        self._served = wire.ReportServingRequest(
            generator=self._generator, version=version, pause_s=pause_s, canary_gap=canary_gap
        )
        await self._report_again()

    async def _report_again(self) -> None:
        if self._served is None:
            return
        try:
            await self._stub.ReportServing(self._served, timeout=UNARY_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            structlog.get_logger().warning("report not taken", why=error.code().name)


class _BadPiece(RuntimeError):
    """A piece that is not what was sent."""


class _Backoff:
    """Jittered exponential pauses."""

    def __init__(self) -> None:
        self._next_s = RETRY_S[0]

    def reset(self) -> None:
        self._next_s = RETRY_S[0]

    async def __call__(self) -> None:
        await asyncio.sleep(self._next_s * random.uniform(0.5, 1.0))
        self._next_s = min(RETRY_S[1], self._next_s * 2)


def _raise_if_hopeless(error: grpc.aio.AioRpcError) -> None:
    """Let errors through that no retry will mend."""
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        raise UserError(
            f"network.token_file: the trainer refuses this token ({error.details()})"
        ) from error
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        raise UserError("network.trainer: something answers there that is no trainer") from error


def _write_folder(folder: Path, content: Mapping[str, bytearray]) -> None:
    """Write files into a new folder that appears as a whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for name, data in content.items():
            (fresh / name).write_bytes(data)
        fresh.rename(folder)
    except OSError:
        shutil.rmtree(fresh)
        # Another replica was faster: its folder has the same digest.
        if not folder.is_dir():
            raise
