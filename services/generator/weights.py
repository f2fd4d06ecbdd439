"""The way of a policy version from the trainer into this replica: announced, fetched, checked.

`PolicyClient` speaks PolicyService. A fetch (weight_fetch.py) goes on while the engine generates;
it resumes where a broken connection left it, and is abandoned only when its version is too old to
serve. Files live in memory-backed storage where there is some; the previous file is kept until the
next is proven. What is here, and what is coming, others may have from here (`find_file`).
"""

import asyncio
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import grpc
import structlog
from headrace.v1 import policy_pb2 as wire
from headrace.v1 import policy_pb2_grpc, transfer_pb2, transfer_pb2_grpc

from services.common.config import Network
from services.common.grpc_kit import UNARY_DEADLINE_S
from services.common.memory_folder import MemoryFolder
from services.common.recorder import Recorder
from services.common.weight_files import Held
from services.generator import announcement
from services.generator.announcement import Announcement as Announcement
from services.generator.weight_fetch import Fetch
from services.generator.weight_fetch import FetchFailed as FetchFailed
from services.generator.weight_fetch import TooOld as TooOld
from services.generator.weight_links import Backoff, Links, raise_if_hopeless

MAX_EXPECTED_S = 30.0
"""Longest time that a version is waited for after its announcement, however rare versions are."""

SUFFIX = ".safetensors"
"""Of a file that is whole and has its digest."""


class PolicyClient:
    """This replica's view of the trainer's PolicyService."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        generator: str,
        network: Network,
        recorder: Recorder,
        port: int = 0,
    ) -> None:
        """channel: to the trainer, for all but weights, which have connections of their own. port:
        where this replica serves what `find_file` finds to others; 0 for nowhere."""
        self._stub = policy_pb2_grpc.PolicyServiceStub(channel)
        self._transfers = transfer_pb2_grpc.TransferServiceStub(channel)
        self._generator, self._port, self._recorder = generator, port, recorder
        self._links = Links(network)
        self._files: dict[str, Held] = {}
        """What is here, and what is coming, by digest."""
        self._provable: dict[str, Announcement] = {}
        """Announcements that had the values of the load-path proof, by the file's digest."""
        self.latest: Announcement | None = None
        self._served: wire.ReportServingRequest | None = None
        self._announced_s, self._expected_by_s = -math.inf, -math.inf
        self._changed = asyncio.Condition()
        self._memory = MemoryFolder("weights")
        self._folder = self._memory.path

    async def close(self) -> None:
        """Close what was fetched over, and remove the fetched files."""
        await self._links.keep_only()
        for held in self._files.values():
            held.drop()
        self._memory.close()

    async def model_files(self, cache: Path) -> Path:
        """The folder with the model's configuration, tokenizer and chat template, fetched when not
        cached.

        Waits for the trainer as long as it takes. The cache is named by the set's digest.
        """
        pause = Backoff()
        while True:
            try:
                return await self._model_files(cache)
            except grpc.aio.AioRpcError as error:
                raise_if_hopeless(error)
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
        pause = Backoff()
        request = wire.WatchPolicyRequest(generator=self._generator, port=self._port)
        while True:
            known = False
            try:
                async for answer in self._stub.WatchPolicy(request):
                    pause.reset()
                    await self._see(announcement.read(answer))
                    if not known:
                        known = True
                        await self._report_again()
            except grpc.aio.AioRpcError as error:
                raise_if_hopeless(error)
            await pause()

    async def _see(self, announced: Announcement) -> None:
        latest = self.latest
        if latest is not None and announced.attempt < latest.attempt:
            return
        if announced.perturbed_logprobs.size:
            self._provable[announced.sha256] = announced
        if latest is not None and (latest.attempt, latest.version) > (
            announced.attempt,
            announced.version,
        ):
            # Not a newer one: what the proof of this one needs, which is fetched here.
            async with self._changed:
                self._changed.notify_all()
            return
        if latest is None or announced.version != latest.version:
            before_s, self._announced_s = self._announced_s, time.monotonic()
            waited_s = min(MAX_EXPECTED_S, (self._announced_s - before_s) / 2)
            self._expected_by_s = self._announced_s + waited_s
        async with self._changed:
            self.latest = announced
            self._provable = {
                sha256: each for sha256, each in self._provable.items() if not self._outdated(each)
            }
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

    async def provable(self, target: Announcement) -> Announcement | None:
        """Wait for the values of the load-path proof of a version that has been fetched: its
        announcement with them. The trainer computes them once a replica that serves nothing yet
        fetches a version, and then announces it again, whether it is still current or not. None
        where the version is not worth a proof any more: too old to be served, or of an attempt
        that has been replaced."""
        await self._latest_that(
            lambda latest: target.sha256 in self._provable or self._outdated(target)
        )
        found = self._provable.get(target.sha256)
        if found is None:
            return None
        # The same weights may have come as two versions: what is fetched keeps its own number.
        return replace(target, perturbed_logprobs=found.perturbed_logprobs)

    def _outdated(self, announced: Announcement) -> bool:
        latest = self.latest
        assert latest is not None
        behind = latest.version - announced.version
        return latest.attempt > announced.attempt or behind > latest.max_staleness

    async def other_than(self, seen: Announcement | None) -> Announcement:
        """Wait until another announcement than `seen` is the latest one."""
        return await self._latest_that(lambda latest: latest is not seen)

    async def _latest_that(self, suits: Callable[[Announcement], bool]) -> Announcement:
        async with self._changed:
            await self._changed.wait_for(lambda: self.latest is not None and suits(self.latest))
            assert self.latest is not None
            return self.latest

    async def fetch(self, target: Announcement) -> Path:
        """Fetch a version's file; returns its path. Raises TooOld or FetchFailed; after the second
        the next fetch goes on with what is here."""
        held = self._files.get(target.sha256)
        path = self._folder / f"{target.version}-{target.sha256[:16]}.safetensors"
        if held is not None and held.complete and held.path.exists():
            return held.path
        if held is None or held.complete:
            held = Held(path.with_suffix(".part"), target.file)
            self._files[target.sha256] = held
        fetch = Fetch(
            target,
            held,
            generator=self._generator,
            links=self._links,
            recorder=self._recorder,
            latest=lambda: self.latest,
            base_of=self._whole,
            hold=self._hold,
        )
        try:
            await fetch.run()
        except TooOld:
            self._delete(held)
            raise
        held.path = held.path.rename(path)
        return path

    def find_file(self, sha256: str) -> Held | None:
        """What is here, or coming, of a file."""
        return self._files.get(sha256)

    def _whole(self, sha256: str) -> Held | None:
        held = self._files.get(sha256)
        # A file that is complete and not yet proven by its digest is no base.
        whole = held is not None and held.complete and held.path.suffix == SUFFIX
        return held if whole else None

    def _hold(self, held: Held) -> None:
        self._files[held.pieces.sha256] = held

    def keep_only(self, *paths: Path) -> None:
        """Delete fetched files other than `paths`; of these the differences stay, too."""
        names = {path.stem for path in paths}
        for held in [held for held in self._files.values() if held.path.stem not in names]:
            self._delete(held)
        for path in self._folder.iterdir():
            if path.suffix in (SUFFIX, ".part", ".delta") and path.stem not in names:
                path.unlink(missing_ok=True)

    def _delete(self, held: Held) -> None:
        held.drop()
        held.path.unlink(missing_ok=True)
        self._files.pop(held.pieces.sha256, None)

    async def join_transfer(self, num_workers: int) -> transfer_pb2.JoinTransferResponse:
        """Ask for a place in the transfer group; there may be none yet. Raises AioRpcError."""
        request = transfer_pb2.JoinTransferRequest(
            generator=self._generator, num_workers=num_workers
        )
        answer: transfer_pb2.JoinTransferResponse = await self._transfers.JoinTransfer(
            request, timeout=UNARY_DEADLINE_S
        )
        return answer

    async def begin_transfer(
        self, group: str, version: int, *, timeout_s: float
    ) -> transfer_pb2.BeginTransferResponse:
        """Say that the engine is paused for a version, and wait for the other members of the group,
        which they are given `timeout_s` for. Raises AioRpcError."""
        request = transfer_pb2.BeginTransferRequest(
            generator=self._generator, group=group, version=version
        )
        answer: transfer_pb2.BeginTransferResponse = await self._transfers.BeginTransfer(
            request, timeout=timeout_s + UNARY_DEADLINE_S
        )
        return answer

    async def report(
        self, *, version: int, pause_s: float, canary_gap: float, without_file: bool = False
    ) -> None:
        """Tell the trainer what this replica serves, and whether it has no file of it to send to
        others; a trainer that is away learns it when the watch has reached it again."""
        self._served = wire.ReportServingRequest(
            generator=self._generator,
            version=version,
            pause_s=pause_s,
            canary_gap=canary_gap,
            without_file=without_file,
        )
        await self._report_again()

    async def _report_again(self) -> None:
        if self._served is None:
            return
        try:
            await self._stub.ReportServing(self._served, timeout=UNARY_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            structlog.get_logger().warning("report not taken", why=error.code().name)


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
