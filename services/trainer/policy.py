"""Policy versions: written, numbered once and for all, announced, and served to generators by gRPC.

A version is a safetensors file in memory-backed storage; the rename makes it visible and the
announcement, with digest and canary, makes it current. Files are kept as long as a generator may
still want them.
"""

import asyncio
import fcntl
import hashlib
import os
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import structlog
from headrace.v1 import policy_pb2 as wire
from headrace.v1 import policy_pb2_grpc

from services.common import canary, grpc_kit
from services.common.errors import UserError
from services.common.files import sha256, sync
from services.common.memory_folder import MemoryFolder
from services.common.recorder import Recorder
from services.trainer.attempts import Attempts
from services.trainer.line import VersionLine

CHUNK_BYTES = 1 << 20
"""One piece of a file on the wire."""

NUMBER_BYTES = 21
"""Of the file with the last version's number, newline included."""

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""What a generator needs besides weights, as far as a model has them."""


@dataclass
class Published:
    """One version that generators may fetch."""

    version: int
    attempt: int
    step: int
    path: Path
    sha256: str
    num_tensors: int
    dtype: str
    canary_logprobs: "np.ndarray[Any, Any]"
    perturbed_logprobs: "np.ndarray[Any, Any] | None"
    at_s: float = field(default_factory=time.monotonic)

    @property
    def mark(self) -> tuple[int, bool]:
        """What is new in an announcement: the version, and whether it has the load-path proof."""
        return self.version, self.perturbed_logprobs is not None


class PolicyStore:
    """The versions of this attempt. Use from the event loop; only `write_path` is for the torch
    thread.

    The last number used is kept in `checkpoints/last_version`, durable before a version is
    announced, so that no number is ever used twice. `line` are the versions that the weights come
    from, of earlier attempts too.
    """

    def __init__(
        self,
        *,
        checkpoints: Path,
        attempt: int,
        vocab_size: int,
        max_staleness: int,
        line: VersionLine | None = None,
    ) -> None:
        self._memory = MemoryFolder("policy")
        self._folder = self._memory.path
        self._last = checkpoints / "last_version"
        self._attempt, self._max_staleness = attempt, max_staleness
        self.canary_rows = canary.rows(vocab_size)
        self._kept: dict[int, Published] = {}
        self.line = VersionLine() if line is None else line
        self.current: Published | None = None
        self._changed = asyncio.Condition()

    @property
    def version(self) -> int:
        """The current version's number; 0 before the first of this attempt."""
        return 0 if self.current is None else self.current.version

    @property
    def step_of(self) -> dict[int, int]:
        """Optimizer steps applied behind each version of the line."""
        return self.line.step_of

    def close(self) -> None:
        """Remove the files."""
        self._memory.close()

    def next_path(self) -> Path:
        """Where the torch thread writes the next version."""
        return self._folder / "next.safetensors"

    async def publish(
        self,
        *,
        step: int,
        num_tensors: int,
        dtype: str,
        canary_logprobs: "np.ndarray[Any, Any]",
        perturbed_logprobs: "np.ndarray[Any, Any] | None",
        again: int | None = None,
    ) -> Published:
        """Number, keep and announce what was written to `next_path()`.

        Weights of as many steps as the line's last version are the same ones, restored: they get
        a number of their own and stay at its place. With `again` they keep that number instead: a
        run that is over is served, nothing new is published.

        Raises Fenced when a newer attempt has begun: a version of this one would be of a dead line.
        """
        digest = await asyncio.to_thread(sha256, self.next_path())
        before = self.line.current
        same = before in self.line and self.line[before].step == step
        if same and self.line[before].sha256 != digest:
            structlog.get_logger().error("restored weights are not those of version", was=before)
            same = False
        if again is None:
            Attempts(self._last.parent).check_last(self._attempt)
        version = self._claim_number() if again is None else again
        path = self._folder / f"{version}.safetensors"
        self.next_path().rename(path)
        published = Published(
            version=version,
            attempt=self._attempt,
            step=step,
            path=path,
            sha256=digest,
            num_tensors=num_tensors,
            dtype=dtype,
            canary_logprobs=canary_logprobs,
            perturbed_logprobs=perturbed_logprobs,
        )
        self._kept[version] = published
        if again is None:
            self.line.add(version, step=step, sha256=digest, same_weights=same)
        # The one before always stays: the torch thread may be about to read it for a late joiner.
        for old in [v for v in self._kept if v < version - max(1, self._max_staleness)]:
            self._kept.pop(old).path.unlink(missing_ok=True)
        async with self._changed:
            self.current = published
            self._changed.notify_all()
        structlog.get_logger().info(
            "published", version=version, step=step, same_as=before if same else None
        )
        return published

    async def add_perturbed(self, version: int, logprobs: "np.ndarray[Any, Any]") -> None:
        """Announce the current version again with the values of the load-path proof, for a
        replica that joins late; nothing happens when it is current no more."""
        async with self._changed:
            if self.current is not None and self.current.version == version:
                self.current.perturbed_logprobs = logprobs
                self._changed.notify_all()

    async def announced_since(self, seen: tuple[int, bool] | None) -> Published:
        """The current version, as soon as its mark is another than `seen`."""
        # The condition is looked at under the lock: between a look and a wait no announcement is
        # missed.
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.current is not None and self.current.mark != seen
            )
            assert self.current is not None
            return self.current

    def find(self, version: int) -> Published | None:
        """A version that is still kept."""
        return self._kept.get(version)

    def announcement(self, published: Published) -> wire.WatchPolicyResponse:
        """What generators are told."""
        perturbed = published.perturbed_logprobs
        return wire.WatchPolicyResponse(
            version=wire.PolicyVersion(
                version=published.version,
                attempt=published.attempt,
                step=published.step,
                sha256=published.sha256,
                size_bytes=published.path.stat().st_size,
                num_tensors=published.num_tensors,
                dtype=published.dtype,
                publishes=self.line.publishes_of[published.version],
                canary=wire.Canary(
                    row_tokens=self.canary_rows.shape[1],
                    token_ids=self.canary_rows.astype("<u4").tobytes(),
                    logprobs=published.canary_logprobs.astype("<f4").tobytes(),
                    perturbed_logprobs=b""
                    if perturbed is None
                    else perturbed.astype("<f4").tobytes(),
                ),
            ),
            max_staleness=self._max_staleness,
        )

    def _claim_number(self) -> int:
        """The next number, durably. It is written in place: a full disk has room for that."""
        descriptor = os.open(self._last, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # a trainer that was replaced may still publish
            text = os.pread(descriptor, NUMBER_BYTES, 0)
            number = int(text or b"0") + 1
            os.pwrite(descriptor, b"%0*d\n" % (NUMBER_BYTES - 1, number), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if number == 1:
            sync(self._last.parent)
        return number


class PolicyServicer(policy_pb2_grpc.PolicyServiceServicer):  # type: ignore[misc]
    """PolicyService over a PolicyStore; answers UNAVAILABLE before the store is there."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._store: PolicyStore | None = None
        self._opened = asyncio.Event()
        self._files: dict[str, bytes] = {}
        self._files_sha256 = ""
        self.serving: dict[str, int] = {}
        """Version served by each generator that watches now; 0 before its first."""
        self.proof_wanted = asyncio.Event()
        """Set when a generator has joined that needs the perturbed canary of the current
        version."""
        self._streams: dict[str, object] = {}
        self._serving_changed = asyncio.Event()
        self._lag_of = 0

    def open(self, store: PolicyStore, model_folder: Path) -> None:
        """Begin to serve. Raises UserError when the folder lacks what generators need."""
        self._files = {
            name: (model_folder / name).read_bytes()
            for name in MODEL_FILES
            if (model_folder / name).exists()
        }
        if "config.json" not in self._files or "tokenizer_config.json" not in self._files:
            raise UserError(
                f"model.path: {model_folder} lacks config.json or tokenizer_config.json"
            )
        digest = hashlib.sha256()
        for name, data in sorted(self._files.items()):
            digest.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
        self._files_sha256 = digest.hexdigest()
        self._store = store
        self._opened.set()

    @property
    def unproven(self) -> bool:
        """True when a connected generator does not serve yet."""
        return any(version == 0 for version in self.serving.values())

    async def wait_served(self, version: int, *, timeout_s: float) -> bool:
        """True once every connected generator serves `version`, and there is one; False after
        `timeout_s`. One caller at a time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.serving or min(self.serving.values()) < version:
                    self._serving_changed.clear()
                    await self._serving_changed.wait()
        except TimeoutError:
            return False
        return True

    async def WatchPolicy(
        self, request: wire.WatchPolicyRequest, context: Any
    ) -> AsyncIterator[wire.WatchPolicyResponse]:
        """Stream the current version at once, then every new one."""
        await self._opened.wait()
        store = self._store
        assert store is not None
        name, stream = request.generator, object()
        self._streams[name] = stream
        self.serving[name] = 0
        self.proof_wanted.set()
        structlog.get_logger().info("generator joined", generator=name)
        sent: tuple[int, bool] | None = None
        try:
            while True:
                current = await store.announced_since(sent)
                sent = current.mark
                yield store.announcement(current)
        finally:
            # A generator that came again is here twice until its broken stream is noticed.
            if self._streams.get(name) is stream:
                del self._streams[name], self.serving[name]
                self._serving_changed.set()
                structlog.get_logger().info("generator left", generator=name)

    async def FetchWeights(
        self, request: wire.FetchWeightsRequest, context: Any
    ) -> AsyncIterator[wire.FetchWeightsResponse]:
        """Stream one version's file from an offset."""
        published = None if self._store is None else self._store.find(request.version)
        if published is None or published.sha256 != request.sha256:
            await grpc_kit.abort(
                context,
                grpc.StatusCode.NOT_FOUND,
                "VERSION_GONE",
                f"version {request.version} with this digest is not kept",
                version=str(request.version),
            )
        offset = request.offset
        with published.path.open("rb") as file:
            file.seek(offset)
            while data := file.read(CHUNK_BYTES):
                yield wire.FetchWeightsResponse(offset=offset, data=data, crc32=zlib.crc32(data))
                offset += len(data)

    async def FetchModelFiles(
        self, request: wire.FetchModelFilesRequest, context: Any
    ) -> AsyncIterator[wire.FetchModelFilesResponse]:
        """Stream configuration, tokenizer and template."""
        await self._opened.wait()
        for name, data in sorted(self._files.items()):
            for start in range(0, max(1, len(data)), CHUNK_BYTES):
                yield wire.FetchModelFilesResponse(
                    set_sha256=self._files_sha256, name=name, data=data[start : start + CHUNK_BYTES]
                )

    async def ReportServing(
        self, request: wire.ReportServingRequest, context: Any
    ) -> wire.ReportServingResponse:
        """Note what a generator serves."""
        if request.generator in self.serving:
            self.serving[request.generator] = request.version
            self._serving_changed.set()
        store = self._store
        current = None if store is None else store.current
        if current is not None and self.serving and min(self.serving.values()) == current.version:
            # Once a version: a report that is repeated, or of a late joiner, is no slow replica.
            if self._lag_of != current.version:
                self._recorder.observe("perf/weight_sync_lag_s", time.monotonic() - current.at_s)
            self._lag_of = current.version
        return wire.ReportServingResponse()
