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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import structlog
from headrace.v1 import policy_pb2 as wire
from headrace.v1 import policy_pb2_grpc

from services.common import canary, grpc_kit, weight_files
from services.common.adapter_files import BASE_VERSION, BaseWeights
from services.common.errors import UserError
from services.common.files import sync
from services.common.memory_folder import MemoryFolder
from services.common.recorder import Recorder
from services.common.weight_delta import Delta
from services.common.weight_files import Held, Pieces, describe
from services.common.weight_server import WeightServer
from services.trainer.attempts import Attempts
from services.trainer.line import VersionLine
from services.trainer.published import Mark, Published
from services.trainer.weight_group import WeightGroup
from services.trainer.weight_tree import Sources, address_of

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
        group: WeightGroup | None = None,
    ) -> None:
        self._memory = MemoryFolder("policy")
        self._folder = self._memory.path
        self._last = checkpoints / "last_version"
        self._attempt, self._max_staleness, self._group = attempt, max_staleness, group
        self.canary_rows = canary.rows(vocab_size)
        self._kept: dict[int, Published] = {}
        self._base: Held | None = None
        self._in_use = 0
        """Version whose file is being read for a proof; 0 for none."""
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

    @property
    def base_path(self) -> Path:
        """Where the torch thread writes the frozen weights of a run with adapters."""
        return self._folder / "base.safetensors"

    async def keep_base(self) -> BaseWeights:
        """Let generators fetch what was written to `base_path`, as version BASE_VERSION."""
        chunk_bytes = weight_files.CHUNK_BYTES
        pieces = await asyncio.to_thread(describe, self.base_path, chunk_bytes=chunk_bytes)
        self._base = Held(self.base_path, pieces, whole=True)
        return BaseWeights(pieces)

    async def describe_next(self) -> Pieces:
        """Digest and checksums of what was written to `next_path()`."""
        chunk_bytes = weight_files.CHUNK_BYTES
        return await asyncio.to_thread(describe, self.next_path(), chunk_bytes=chunk_bytes)

    async def publish(
        self,
        *,
        step: int,
        num_tensors: int,
        dtype: str,
        canary_logprobs: "np.ndarray[Any, Any]",
        perturbed_logprobs: "np.ndarray[Any, Any] | None",
        pieces: Pieces | None = None,
        again: int | None = None,
    ) -> Published:
        """Number, keep and announce what was written to `next_path()`. pieces: of describe_next,
        where it has been called.

        Weights of as many steps as the line's last version are the same ones, restored: they get
        a number of their own and stay at its place. With `again` they keep that number instead: a
        run that is over is served, nothing new is published.

        Raises Fenced when a newer attempt has begun: a version of this one would be of a dead line.
        """
        if pieces is None:
            pieces = await self.describe_next()
        digest = pieces.sha256
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
            file=Held(path, pieces, whole=True),
            num_tensors=num_tensors,
            dtype=dtype,
            canary_logprobs=canary_logprobs,
            perturbed_logprobs=perturbed_logprobs,
        )
        if self._group is not None:
            published.transfer_group, published.broadcast = self._group.offer(version, path)
        self._kept[version] = published
        if again is None:
            self.line.add(version, step=step, sha256=digest, same_weights=same)
        # The one before always stays: the difference is made from it.
        oldest = version - max(1, self._max_staleness)
        for old in [v for v in self._kept if v < oldest and v != self._in_use]:
            for held in self._kept.pop(old).files.values():
                held.path.unlink(missing_ok=True)
        async with self._changed:
            self.current = published
            self._changed.notify_all()
        structlog.get_logger().info(
            "published", version=version, step=step, same_as=before if same else None
        )
        return published

    async def add_perturbed(self, version: int, logprobs: "np.ndarray[Any, Any]") -> None:
        """Announce a version again with the values of the load-path proof, for a replica that
        joins late and fetches it: it may be current no more. Nothing happens when it is not kept
        any more."""
        async with self._changed:
            if (published := self._kept.get(version)) is not None:
                published.perturbed_logprobs = logprobs
                self._changed.notify_all()

    async def add_delta(self, version: int, delta: Delta, path: Path) -> bool:
        """Announce the current version again with its difference, which is at `path`. False when it
        is current no more: nobody would use it."""
        async with self._changed:
            if self.current is None or self.current.version != version:
                return False
            self.current.delta_file = Held(path, delta.pieces, whole=True)
            self.current.delta = delta
            self._changed.notify_all()
            return True

    async def news_since(
        self, told: Mapping[int, Mark], *, fetched: Callable[[], int]
    ) -> Published:
        """What a replica has not been told, as soon as there is something: the current version, or
        the one that it fetches for its proof, once that has the values of it. `told`: the mark that
        each version had when it was announced last."""

        def news() -> Published | None:
            first = self._kept.get(fetched())
            if first is not None and first.perturbed_logprobs is None:
                first = None
            for published in (self.current, first):
                if published is not None and told.get(published.version) != published.mark:
                    return published
            return None

        # The condition is looked at under the lock: between a look and a wait no announcement is
        # missed.
        async with self._changed:
            found = await self._changed.wait_for(news)
            assert found is not None
            return found

    @contextmanager
    def in_use(self, version: int) -> Iterator[Published | None]:
        """A version, None where it is not kept any more. Its file stays until this is left, however
        many are published meanwhile. One at a time."""
        self._in_use = version
        try:
            yield self.find(version)
        finally:
            self._in_use = 0

    def find(self, version: int) -> Published | None:
        """A version that is still kept."""
        return self._kept.get(version)

    def find_file(self, request: wire.FetchWeightsRequest) -> Held | None:
        """The file that is asked for, while its version is kept."""
        if request.version == BASE_VERSION and self._base is not None:
            return self._base if self._base.pieces.sha256 == request.sha256 else None
        published = self._kept.get(request.version)
        return None if published is None else published.files.get(request.sha256)

    def version_of(self, sha256: str) -> int:
        """The newest version kept whose whole file this is; 0 for none. A step that changes
        nothing makes a version with the file of the one before."""
        return max((v for v, kept in self._kept.items() if kept.sha256 == sha256), default=0)

    def before(self, version: int) -> Published | None:
        """The version kept that was published last before this one."""
        earlier = [kept for kept in self._kept if kept < version]
        return self._kept[max(earlier)] if earlier else None

    @property
    def files(self) -> dict[str, Held]:
        """All that may be fetched, by digest."""
        found = {k: v for published in self._kept.values() for k, v in published.files.items()}
        return found if self._base is None else found | {self._base.pieces.sha256: self._base}

    def announcement(self, published: Published) -> wire.WatchPolicyResponse:
        """What generators are told."""
        version = published.message(
            canary_rows=self.canary_rows, publishes=self.line.publishes_of[published.version]
        )
        return wire.WatchPolicyResponse(version=version, max_staleness=self._max_staleness)

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
        self.group: WeightGroup | None = None
        """The generators that versions are broadcast to, where the recipe wants that."""
        self._store: PolicyStore | None = None
        self._opened = asyncio.Event()
        self._files: dict[str, bytes] = {}
        self._files_sha256 = ""
        self.serving: dict[str, int] = {}
        """Version served by each generator that watches now; 0 before its first."""
        self._first: dict[str, int] = {}
        """The version that a generator fetches, or has fetched, to begin with: its proof is made
        with this one."""
        self.proof_wanted = asyncio.Event()
        """Set when a generator that serves nothing yet has begun to fetch a version: it needs the
        perturbed canary of that one."""
        self._streams: dict[str, object] = {}
        self._serving_changed = asyncio.Event()
        self._lag_of = 0
        self._server, self._sources = WeightServer(), Sources()

    def open(
        self, store: PolicyStore, model_folder: Path, more: Mapping[str, bytes] | None = None
    ) -> None:
        """Begin to serve the store and the model's files, and `more` by name. Raises UserError when
        the folder lacks what generators need."""
        self._files = {
            name: (model_folder / name).read_bytes()
            for name in MODEL_FILES
            if (model_folder / name).exists()
        }
        if "config.json" not in self._files or "tokenizer_config.json" not in self._files:
            raise UserError(
                f"model.path: {model_folder} lacks config.json or tokenizer_config.json"
            )
        self._files |= more or {}
        digest = hashlib.sha256()
        for name, data in sorted(self._files.items()):
            digest.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
        self._files_sha256 = digest.hexdigest()
        self._store = store
        self._opened.set()

    @property
    def proofs_wanted(self) -> list[int]:
        """The versions that generators which serve nothing yet have begun to fetch."""
        return sorted(set(self._first.values()))

    @property
    def sent_bytes(self) -> int:
        """Of versions and differences, to all generators."""
        return self._server.sent_bytes

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
        """Stream the current version at once, then every new one; and what a newcomer's proof
        needs."""
        await self._opened.wait()
        store = self._store
        assert store is not None
        name, stream = request.generator, object()
        self._streams[name] = stream
        self._sources.joined(name, address=address_of(context.peer(), request.port))
        self.serving[name] = 0
        structlog.get_logger().info("generator joined", generator=name)
        told: dict[int, Mark] = {}
        try:
            while True:
                news = await store.news_since(told, fetched=lambda: self._first.get(name, 0))
                told = {version: mark for version, mark in told.items() if store.find(version)}
                told[news.version] = news.mark
                yield store.announcement(news)
        finally:
            # A generator that came again is here twice until its broken stream is noticed.
            if self._streams.get(name) is stream:
                del self._streams[name], self.serving[name]
                self._sources.left(name)
                self._serving_changed.set()
                structlog.get_logger().info("generator left", generator=name)

    async def FetchWeights(
        self, request: wire.FetchWeightsRequest, context: Any
    ) -> AsyncIterator[wire.FetchWeightsResponse]:
        """Stream a range of a version's file, or of its difference."""
        held = None if self._store is None else self._store.find_file(request)
        if held is None:
            await grpc_kit.abort(
                context,
                grpc.StatusCode.NOT_FOUND,
                "VERSION_GONE",
                f"version {request.version} with this digest is not kept",
                version=str(request.version),
            )
        stream = self._server.stream(held, offset=request.offset, length=request.length)
        async with aclosing(stream) as pieces:  # a cancelled call's turn is free at once
            async for piece in pieces:
                yield piece

    async def FindSource(
        self, request: wire.FindSourceRequest, context: Any
    ) -> wire.FindSourceResponse:
        """Say from whom to fetch a file."""
        if self._store is not None:
            self._sources.keep_only(self._store.files)
            self._note_first(self._store, request)
        address = self._sources.find(
            request.generator, sha256=request.sha256, failed=request.failed
        )
        return wire.FindSourceResponse(address=address)

    def _note_first(self, store: PolicyStore, request: wire.FindSourceRequest) -> None:
        """See to the proof of a generator that serves nothing yet, with the version that it
        fetches: a newer one would be a second file to fetch before it serves.

        It stays noted when the generator's stream breaks meanwhile: its fetch goes on.
        """
        self._first = {name: v for name, v in self._first.items() if store.find(v) is not None}
        version = store.version_of(request.sha256)
        if version and not self.serving.get(request.generator):
            self._first[request.generator] = version
            self.proof_wanted.set()

    async def FetchModelFiles(
        self, request: wire.FetchModelFilesRequest, context: Any
    ) -> AsyncIterator[wire.FetchModelFilesResponse]:
        """Stream configuration, tokenizer and template."""
        await self._opened.wait()
        for name, data in sorted(self._files.items()):
            for start in range(0, max(1, len(data)), weight_files.CHUNK_BYTES):
                yield wire.FetchModelFilesResponse(
                    set_sha256=self._files_sha256,
                    name=name,
                    data=data[start : start + weight_files.CHUNK_BYTES],
                )

    async def ReportServing(
        self, request: wire.ReportServingRequest, context: Any
    ) -> wire.ReportServingResponse:
        """Note what a generator serves."""
        if request.generator in self.serving:
            self.serving[request.generator] = request.version
            self._first.pop(request.generator, None)
            self._serving_changed.set()
            served = None if self._store is None else self._store.find(request.version)
            if request.without_file:
                served = None
            self._sources.serves(request.generator, () if served is None else served.files)
        store = self._store
        current = None if store is None else store.current
        if current is not None and self.serving and min(self.serving.values()) == current.version:
            # Once a version: a report that is repeated, or of a late joiner, is no slow replica.
            if self._lag_of != current.version:
                self._recorder.observe("perf/weight_sync_lag_s", time.monotonic() - current.at_s)
            self._lag_of = current.version
        return wire.ReportServingResponse()
