"""One version on its way into this replica: several streams fill one file, chunk by chunk.

Each chunk comes from the trainer or from another generator, as it is or as the difference to a
version that is here, and is checked against the trainer's announcement before it counts. What is
not right is thrown away and fetched again, that chunk alone. The digest of the whole is that of its
chunks' digests, which are computed behind them, side by side.

    a generator that is dead, slow or wrong  -> another source, at last the trainer
    the trainer away, a connection cut       -> again, what is missing
    frames of a difference that are wrong    -> those chunks whole; after MAX_BAD_FRAMES all
    a digest that is wrong                   -> the file again, from the trainer, no difference
    a version that is too old to serve       -> TooOld, and nothing else abandons a fetch

waits_for: sources. unblocked_by: the trainer, generators that fetch the same.
"""

import asyncio
import hashlib
import itertools
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import structlog
from headrace.v1 import policy_pb2 as wire

from services.common import grpc_kit, weight_delta
from services.common.background import guarded
from services.common.recorder import Recorder
from services.common.weight_delta import BadFrame, Delta
from services.common.weight_files import Held, digest_of
from services.generator.announcement import Announcement
from services.generator.weight_links import (
    NUM_STREAMS,
    TRAINER,
    Backoff,
    Links,
    raise_if_hopeless,
)

SPAN_BYTES = 16 << 20
"""Asked for at once by a stream, at most: what another stream cannot take over."""

MAX_WHOLE = 5
"""Files with another digest than was announced, or refusals of one chunk; then it has failed."""

MAX_BAD_FRAMES = 3
"""Of a difference; then it is left alone."""

MAX_REFUSED = 3
"""Chunks of one generator; then it is left alone."""

PEER_STALL_S = 5.0
"""A generator that sends no chunk for so long is left."""

TRAINER_STALL_S = 60.0
"""A stream of the trainer that brings nothing for so long is opened again: it may wait for its
turn."""

SLOW_BYTES_PER_S = 2 << 20
"""A generator that sends less, all streams together and over PEER_STALL_S, is left."""

HASH_CHUNKS = 8
"""Whose digests a thread makes at a time."""

MISSING, BUSY, HERE = 0, 1, 2


class FetchFailed(RuntimeError):
    """A version could not be fetched whole; the message says why."""


class TooOld(RuntimeError):
    """The version is not worth fetching any more: newer ones have been announced meanwhile, or it
    is no longer kept."""


class _Broken(RuntimeError):
    """A source that does not go on."""


class Fetch:
    """Fills a held file with a version's chunks."""

    def __init__(
        self,
        target: Announcement,
        held: Held,
        *,
        generator: str,
        links: Links,
        recorder: Recorder,
        latest: Callable[[], Announcement | None],
        base_of: Callable[[str], Held | None],
        hold: Callable[[Held], None],
    ) -> None:
        """latest: the newest announcement. base_of: a complete file by its digest. hold: called
        with the file of a difference that others may have from here."""
        self._target, self.held = target, held
        self._generator, self._links, self._recorder = generator, links, recorder
        self._latest, self._base_of, self._hold = latest, base_of, hold
        self._state = bytearray(
            HERE if held.has(piece) else MISSING for piece in range(held.pieces.num)
        )
        span_bytes = min(SPAN_BYTES, held.pieces.size_bytes // (2 * NUM_STREAMS))
        self._span = max(1, held.pieces.at(span_bytes))
        """Chunks asked for at once, at most."""
        self._returned = asyncio.Event()
        self._sources: dict[str, str] = {}
        self._asking = asyncio.Lock()
        self._failed: set[str] = set()
        self._refused_by: Counter[str] = Counter()
        self._refusals: Counter[int] = Counter()
        self._received: dict[str, tuple[float, int]] = {}
        """Of each generator: since when, and bytes."""
        self._raw: set[int] = set()
        """Chunks that are not to come from the difference."""
        self._bad_frames = 0
        self._began_whole = held.missing_bytes < held.pieces.size_bytes
        """Whether chunks came, or come, that are not from the difference."""
        self._no_delta = False
        self._delta: tuple[Delta, Held, int] | None = None
        """The difference that is used, its file, a descriptor of the base."""
        self._fetched_bytes: Counter[str] = Counter()
        self._delta_bytes = 0
        """Of chunks that were made from differences."""
        self._peers_off = False

    async def run(self) -> None:
        """Return when the file is complete and has the announced digest. Raises TooOld, FetchFailed
        and UserError; what is here by then stays in `held`."""
        with ThreadPoolExecutor(NUM_STREAMS + 1, thread_name_prefix="weights") as threads:
            # Left before the descriptors are closed: a thread must not write into another file.
            self._threads = threads
            self._descriptor = os.open(self.held.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                await self._until_right()
            except OSError as error:  # no more room, mostly
                raise FetchFailed(f"version {self._target.version}: {error}") from error
            finally:
                threads.shutdown()
                os.close(self._descriptor)
                self._close_delta()
                await self._links.keep_only(TRAINER)
                self._record()

    async def _until_right(self) -> None:
        for _ in range(MAX_WHOLE):
            workers = (self._work(number) for number in range(NUM_STREAMS))
            digest = await guarded(self._digest(), *workers)
            if digest == self._target.sha256:
                return
            why = f"digest {digest[:12]}… where {self._target.sha256[:12]}… was announced"
            structlog.get_logger().error("file refused", version=self._target.version, why=why)
            self._recorder.count("policy/refused_files_total")
            self.held.clear()
            self._state = bytearray(len(self._state))
            self._no_delta = self._peers_off = True
            self._sources.clear()
        raise FetchFailed(f"version {self._target.version}: {why}")

    async def _digest(self) -> str:
        """Of the whole file, behind its chunks."""
        made, piece, num = [], 0, self.held.pieces.num
        loop = asyncio.get_running_loop()
        while piece < num:
            await self.held.wait(piece)
            end = piece + 1
            while end < num and end < piece + HASH_CHUNKS and self.held.has(end):
                end += 1
            made.append(loop.run_in_executor(self._threads, self._digests, piece, end))
            piece = end
        return digest_of(itertools.chain.from_iterable(await asyncio.gather(*made)))

    def _digests(self, piece: int, end: int) -> list[bytes]:
        """In a thread: of some chunks, as they are in the file."""
        bounds = map(self.held.pieces.bounds, range(piece, end))
        return [
            hashlib.sha256(os.pread(self._descriptor, last - first, first)).digest()
            for first, last in bounds
        ]

    # -- streams

    async def _work(self, number: int) -> None:
        """One stream after another, for ever."""
        pause = Backoff()
        while True:
            span = self._take()
            if span is None:
                self._returned.clear()
                await self._returned.wait()
                continue
            delta = self._usable_delta() if span[0] not in self._raw else None
            self._began_whole |= delta is None
            try:
                if not await self._span_from(number, range(*span), delta, pause):
                    await pause()
            finally:
                for piece in range(*span):
                    self._state[piece] = HERE if self.held.has(piece) else MISSING
                self._returned.set()

    def _take(self) -> tuple[int, int] | None:
        """The next chunks that nobody fetches; None when there are none."""
        begin = self._state.find(MISSING)
        if begin < 0:
            return None
        end = begin + 1
        while (
            end < len(self._state)
            and end - begin < self._span
            and self._state[end] == MISSING
            and begin not in self._raw
            and end not in self._raw
        ):
            end += 1
        self._state[begin:end] = bytes([BUSY]) * (end - begin)
        return begin, end

    async def _span_from(
        self, number: int, span: range, delta: "tuple[Delta, Held, int] | None", pause: Backoff
    ) -> bool:
        """Fetch some chunks; False when the trainer should be given a pause first."""
        pieces = self.held.pieces if delta is None else delta[0].pieces
        source = await self._source(pieces.sha256)
        begin, end = pieces.bounds(span[0])[0], pieces.bounds(span[-1])[1]
        request = wire.FetchWeightsRequest(
            version=self._target.version, sha256=pieces.sha256, offset=begin, length=end - begin
        )
        call = self._links.stub(source, number).FetchWeights(request)
        try:
            for piece in span:
                message = await self._read(call, source)
                await self._take_in(piece, message, delta, source)
                pause.reset()
            # To its end, which frees the sender's turn for the next stream; a cancelled call's may
            # be freed late.
            await call.read()
        except grpc.aio.AioRpcError as error:
            return self._failed_by(error, source, delta)
        except _Broken as error:
            if source == TRAINER:
                return False
            self._leave(source, str(error))
        finally:
            call.cancel()
        return True

    async def _read(self, call: Any, source: str) -> Any:
        limit_s = TRAINER_STALL_S if source == TRAINER else PEER_STALL_S
        try:
            async with asyncio.timeout(limit_s):
                message = await call.read()
        except TimeoutError:
            raise _Broken(f"nothing for {limit_s:g} s") from None
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise _Broken("its stream ended early")
        self._check_age()
        self._fetched_bytes[source] += len(message.data)
        if source != TRAINER:
            self._check_rate(source, len(message.data))
        return message

    def _check_age(self) -> None:
        latest, target = self._latest(), self._target
        behind = latest.version - target.version if latest else 0
        if behind > target.max_staleness:
            raise TooOld(f"version {target.version} is {behind} behind")

    def _check_rate(self, source: str, num_bytes: int) -> None:
        now_s = time.monotonic()
        since_s, received = self._received.get(source, (now_s, 0))
        received += num_bytes
        lasted_s = now_s - since_s
        if lasted_s >= PEER_STALL_S:
            # Frames are small: chunks made of them are what counts, and those come as fast.
            if received < SLOW_BYTES_PER_S * lasted_s and self._delta is None:
                raise _Broken(f"{received / lasted_s / 1e6:.1f} MB/s")
            since_s, received = now_s, 0
        self._received[source] = since_s, received

    async def _take_in(
        self, piece: int, message: Any, delta: "tuple[Delta, Held, int] | None", source: str
    ) -> None:
        """Check one chunk and write it; one that is not right is counted and stays missing."""
        pieces = self.held.pieces if delta is None else delta[0].pieces
        begin, end = pieces.bounds(piece)
        right = message.offset == begin and len(message.data) == end - begin
        if right:
            loop = asyncio.get_running_loop()
            right = await loop.run_in_executor(
                self._threads, self._write, piece, message.data, delta
            )
        if not right:
            self._refuse(piece, delta, source)
            return
        if not self.held.has(piece) and delta is not None:
            self._delta_bytes += end - begin
        self.held.mark(piece)
        if delta is not None:
            delta[1].mark(piece)

    def _write(self, piece: int, data: bytes, delta: "tuple[Delta, Held, int] | None") -> bool:
        """In a thread: write the chunk that these bytes are, or that the frame makes of the base.
        False when it is another one than was announced."""
        begin, end = self.held.pieces.bounds(piece)
        chunk = data
        if delta is not None:
            _, frames, base = delta
            try:
                chunk = weight_delta.decode(data, os.pread(base, end - begin, begin))
            except BadFrame:
                return False
        crc32 = self.held.pieces.crc32
        assert crc32 is not None
        if zlib.crc32(chunk) != crc32[piece]:
            return False
        _write_all(self._descriptor, chunk, begin)
        if delta is not None:
            with frames.path.open("r+b", buffering=0) as file:
                _write_all(file.fileno(), data, frames.pieces.bounds(piece)[0])
        return True

    def _refuse(self, piece: int, delta: Any, source: str) -> None:
        self._recorder.count("policy/refused_chunks_total")
        structlog.get_logger().warning(
            "chunk refused",
            version=self._target.version,
            chunk=piece,
            source=source or "trainer",
            difference=delta is not None,
        )
        if delta is not None:
            self._raw.add(piece)
            self._bad_frames += 1
            # Whoever has the difference from here waits for this frame: it will not come.
            delta[1].drop()
            if self._bad_frames >= MAX_BAD_FRAMES:
                self._no_delta = True
            return
        self._refused_by[source] += 1
        if source != TRAINER and self._refused_by[source] >= MAX_REFUSED:
            raise _Broken("its chunks are wrong")
        self._refusals[piece] += source == TRAINER
        if self._refusals[piece] >= MAX_WHOLE:
            raise FetchFailed(
                f"version {self._target.version}: chunk {piece} is damaged at the trainer"
            )

    def _failed_by(self, error: grpc.aio.AioRpcError, source: str, delta: Any) -> bool:
        """What a failed call means; see `_span_from`."""
        self._check_age()
        gone = error.code() is grpc.StatusCode.NOT_FOUND
        if source != TRAINER:
            self._leave(source, f"{error.code().name}: {error.details()}")
            return True
        if gone and delta is not None:
            self._no_delta = True
            return True
        if gone:
            version = self._target.version
            raise TooOld(f"version {version} is no longer kept by the trainer") from error
        raise_if_hopeless(error)
        return False

    # -- sources

    async def _source(self, sha256: str) -> str:
        """Whom to fetch a file from, asked once for all streams."""
        async with self._asking:
            if sha256 not in self._sources:
                self._sources[sha256] = TRAINER if self._peers_off else await self._find(sha256)
            return self._sources[sha256]

    async def _find(self, sha256: str) -> str:
        request = wire.FindSourceRequest(
            generator=self._generator, sha256=sha256, failed=sorted(self._failed)
        )
        pause = Backoff()
        while True:
            try:
                answer = await self._links.stub(TRAINER, 0).FindSource(
                    request, timeout=grpc_kit.UNARY_DEADLINE_S
                )
                return str(answer.address)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return TRAINER  # one that has all sent by itself
                raise_if_hopeless(error)
            self._check_age()
            await pause()

    def _leave(self, source: str, why: str) -> None:
        """Fetch from this generator no more."""
        if source in self._failed:
            return
        self._failed.add(source)
        self._sources = {file: each for file, each in self._sources.items() if each != source}
        self._recorder.count("policy/sources_left_total")
        structlog.get_logger().warning(
            "source left", version=self._target.version, source=source, why=why
        )

    # -- the difference

    def _usable_delta(self) -> "tuple[Delta, Held, int] | None":
        """The difference to fetch instead of chunks, once it is announced, its base is here and it
        is smaller than what is missing."""
        if self._no_delta:
            return None
        if self._delta is None:
            latest = self._latest()
            same = latest is not None and latest.sha256 == self._target.sha256
            delta = latest.delta if latest is not None and same else self._target.delta
            base = None if delta is None else self._base_of(delta.base_sha256)
            if delta is None or base is None:
                return None
            if delta.pieces.size_bytes >= self.held.missing_bytes:
                self._no_delta = True
                return None
            frames = Held(self.held.path.with_suffix(".delta"), delta.pieces)
            if not self._began_whole:
                self._hold(frames)  # else some of its frames would never come
            self._delta = delta, frames, base.open()
        return self._delta

    def _close_delta(self) -> None:
        if self._delta is not None:
            _, frames, base = self._delta
            os.close(base)
            if not frames.complete:
                frames.drop()

    def _record(self) -> None:
        """What came from where."""
        from_trainer = self._fetched_bytes.pop(TRAINER, 0)
        self._recorder.count("perf/weight_fetched_bytes/trainer", from_trainer)
        peers = sum(self._fetched_bytes.values())
        self._recorder.count("perf/weight_fetched_bytes/generators", peers)
        self._fetched_bytes.clear()
        self._recorder.ratio("perf/weight_delta_frac", self._delta_bytes, from_trainer + peers)
        self._delta_bytes = 0


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        num = os.pwrite(descriptor, view, offset)
        view, offset = view[num:], offset + num
