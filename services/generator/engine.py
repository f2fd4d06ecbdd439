"""vLLM's AsyncLLM in this process: token ids in, exactly what was sampled out, weights replaced
while requests run.

Of a run with adapters the weights stay, and each version is an adapter of them (adapters.py).

With adapters.py, engine_weights.py, weight_backend.py, weight_receiver.py and vllm_parsers.py the
only module that imports vLLM (its names move between releases; pinned to 0.32). A dead engine
cannot be restarted in place: the process exits and is started again.
"""

import asyncio
import functools
import gc
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from services.common.errors import UserError
from services.common.generation_config import Generator
from services.generator import weight_backend
from services.generator.adapters import Adapter, Adapters, AdapterSettings
from services.generator.engine_weights import EngineWeights, death
from services.generator.types import Generated, GenerateFailed, LoadTimes, Span

EXTENSION = "services.generator.weight_backend.Extension"
"""What vLLM imports in its workers."""

BLOCK_TOKENS = 32
"""KV-cache block on CPUs, the smallest there: conversations of a group share their prompt's
blocks."""

PARAMETERS_KEPT = 1024
"""Sampling parameters that are kept for the next request with the same."""

SHUTDOWN_S = 1.0
"""Then vLLM kills its processes. They hold nothing that has to be written, and on CPUs they never
end by themselves, so that its own default only means 5 s more at each end."""


class Engine:
    """One vLLM engine. Build with `start()`."""

    def __init__(
        self, llm: AsyncLLM, *, seeded: bool, adapters: AdapterSettings | None = None
    ) -> None:
        self._llm = llm
        self.adapters = None if adapters is None else Adapters(llm, adapters)
        """Of an engine whose versions are adapters."""
        self.weights = EngineWeights(
            llm,
            num_workers=llm.vllm_config.parallel_config.world_size,
            running=lambda: self._running,
        )
        """What is replaced where versions are whole weights."""
        self._seeded = seeded
        self._running = 0
        self._numbers = itertools.count()  # vLLM makes request ids unique itself
        # Conversations differ in little of it, and making it costs more than what is sent.
        self._parameters = functools.lru_cache(maxsize=PARAMETERS_KEPT)(_parameters)
        self._load_lock = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        folder: Path,
        *,
        settings: Generator,
        dtype: str,
        extension: str = EXTENSION,
        enable_prefix_caching: bool = True,
        with_weights: bool = False,
        adapters: AdapterSettings | None = None,
    ) -> "Engine":
        """Start the engine's processes on a model folder. Its configuration alone is read, and
        weights are dummies until `load()`, unless `with_weights`, or versions are `adapters`: then
        they are the folder's.

        Raises UserError for what vLLM cannot serve as configured.
        """
        on_cpu = current_platform.is_cpu()
        if settings.seeded and on_cpu:
            raise UserError(
                "generator.seeded: leave it off on CPUs: vLLM 0.32 dies there when a seeded prompt "
                "is prefilled in parts"
            )
        if on_cpu and settings.kv_cache_bytes is None:
            raise UserError(
                "generator.kv_cache_bytes: give it on CPUs (for example 67108864), or one engine "
                "takes nearly all memory"
            )
        if adapters is None:
            weight_backend.register()
            of_versions = {
                "worker_extension_cls": extension,
                "weight_transfer_config": WeightTransferConfig(backend=weight_backend.NAME),
            }
        else:
            of_versions = adapters.arguments()
        arguments = AsyncEngineArgs(
            model=str(folder),
            load_format="auto" if with_weights or adapters is not None else "dummy",
            skip_tokenizer_init=True,
            dtype=dtype,
            seed=random.SystemRandom().randrange(1 << 31),
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs or settings.max_inflight,
            max_num_batched_tokens=max(settings.max_num_batched_tokens, settings.max_model_len),
            tensor_parallel_size=settings.tensor_parallel,
            distributed_executor_backend=UniProcExecutor if _on_one_core() else None,
            enforce_eager=settings.enforce_eager,
            enable_prefix_caching=enable_prefix_caching,
            block_size=BLOCK_TOKENS if on_cpu else None,
            kv_cache_memory_bytes=settings.kv_cache_bytes,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            **of_versions,
        )
        # In a thread: the start blocks for half a minute, and status calls must be answered
        # meanwhile.
        llm = await asyncio.to_thread(AsyncLLM.from_engine_args, arguments)
        if adapters is None:
            await llm.init_weight_transfer_engine(WeightTransferInitRequest({}))
            await llm.update_weight_version("0")
        return cls(llm, seeded=settings.seeded, adapters=adapters)

    @property
    def running(self) -> int:
        """Requests inside the engine."""
        return self._running

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        sampled: Callable[[int], None],
        seed: int | None = None,
    ) -> Generated:
        """Sample one completion. All sampling parameters are set here: AsyncLLM takes no defaults
        from the model.

        `sampled` is called once with the number of tokens that the engine has generated, also where
        the call fails. Cancelling it aborts the request in the engine. Raises EngineDead when the
        engine has died, GenerateFailed when it failed at this request alone, and ValueError when
        the prompt does not fit.
        """
        parameters = self._parameters(
            temperature, max_tokens, tuple(stop_token_ids), seed if self._seeded else None
        )
        begin_s = time.monotonic()
        with self._adapter() as adapter:
            output = (await self._run(prompt_ids, parameters, sampled, adapter)).outputs[0]
        ids = list(output.token_ids)
        logprobs = np.asarray(output.logprobs.logprobs, dtype=np.float32)
        assert len(logprobs) == len(ids), "one log-probability a token"
        return Generated(
            token_ids=ids,
            logprobs=logprobs,
            spans=(
                tuple(Span(int(s.version), s.start, s.end) for s in output.weight_versions)
                if adapter is None
                else (Span(adapter.version, 0, len(ids)),)
            ),
            finish_reason=output.finish_reason,
            duration_s=time.monotonic() - begin_s,
        )

    async def row_logprobs(
        self, rows: "np.ndarray[Any, Any]"
    ) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """Log-probabilities, at temperature 1, of tokens 1.. of each row [R, L] given those
        before: float32 [R, L - 1]."""
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        with self._adapter() as adapter:
            outputs = await asyncio.gather(
                *(self._run(row.tolist(), parameters, adapter=adapter) for row in rows)
            )
        return np.asarray([output.prompt_logprobs.logprobs for output in outputs], dtype=np.float32)

    @contextmanager
    def _adapter(self) -> Iterator[Adapter | None]:
        """What requests that begin now run with; None where versions are whole weights."""
        if self.adapters is None:
            yield None
            return
        with self.adapters.used() as adapter:
            yield adapter

    async def load(self, path: Path, version: int) -> LoadTimes:
        """Replace the weights under running requests by those of `path`, then label what follows
        `version`.

        Requests are kept and all caches cleared: each goes on with its prefix recomputed under the
        new weights, so every token's log-probability is that of one exact policy. When the load
        fails the engine stays paused, so that a broken mixture never serves; load a whole file
        again. Where versions are adapters, running requests go on with theirs, without a pause.
        """
        if self.adapters is None:
            return await self.weights.load(path, version)
        async with self._load_lock:
            with death():
                times = await self.adapters.load(path, version)
                await self._llm.resume_generation()  # an earlier one may have failed
                return times

    async def pause(self) -> None:
        """Let nothing run until the next load has succeeded; requests are kept."""
        async with self._load_lock:
            await self.weights.pause()

    async def check(self, timeout_s: float) -> None:
        """Make sure that the engine answers: a hung core is not noticed otherwise. Raises
        TimeoutError, EngineDead."""
        with death():
            await self._llm.check_health()
        # Sampled with log-probabilities, as conversations are: at the first call this compiles.
        parameters = SamplingParams(
            temperature=1.0,
            max_tokens=1,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        with self._adapter() as adapter:
            await asyncio.wait_for(self._run([0], parameters, adapter=adapter), timeout_s)

    def shutdown(self) -> None:
        """End the engine's processes; nothing else may be called after it."""
        self._llm.shutdown(timeout=SHUTDOWN_S)
        # It is part of a cycle, and its finaliser fails when the interpreter runs it at exit.
        del self._llm
        gc.unfreeze()  # a service freezes what it has when it is ready
        gc.collect()

    async def _run(
        self,
        prompt_ids: Sequence[int],
        parameters: SamplingParams,
        sampled: Callable[[int], None] | None = None,
        adapter: Adapter | None = None,
    ) -> Any:
        self._running += 1
        request_id = str(next(self._numbers))
        output: Any = None
        collector = None
        try:
            with death(), _failure():
                # Not AsyncLLM.generate(): where that is cancelled it forgets the request, and with
                # it how many tokens it had generated; so it would take a task of its own.
                collector = await self._llm.add_request(
                    request_id,
                    tokens_input(list(prompt_ids)),
                    parameters,
                    lora_request=None if adapter is None else adapter.request,
                )
                output = collector.get_nowait() or await collector.get()
                return output
        except BaseException:
            # Without effect on a request that has ended. One under way leaves what it had come to.
            await self._llm.abort(request_id)
            output = None if collector is None else collector.output
            raise
        finally:
            if sampled is not None:
                ended = isinstance(output, RequestOutput)
                sampled(len(output.outputs[0].token_ids) if ended else 0)
            self._running -= 1


def _parameters(
    temperature: float, max_tokens: int, stop_token_ids: tuple[int, ...], seed: int | None
) -> SamplingParams:
    """What a completion is sampled with: nothing but temperature reshapes the distribution."""
    return SamplingParams(
        n=1,
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        max_tokens=max_tokens,
        stop_token_ids=list(stop_token_ids),
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # a shallow copy for each request: vLLM sets attributes, the same in all
    )


@contextmanager
def _failure() -> Iterator[None]:
    """Raise GenerateFailed for what vLLM did not expect, ValueError for what it does not take."""
    try:
        yield
    except VLLMClientError as error:
        raise ValueError(str(error)) from error
    except EngineDeadError:
        raise
    except Exception as error:
        raise GenerateFailed(f"vLLM failed at a request: {error!r}") from error


def _on_one_core() -> bool:
    """True where this replica's engine has one CPU core: its worker then needs no own process.

    A second process only spins for the first there: 512 short requests took 1.55 CPU seconds with
    it and 1.0 without. vLLM itself always separates them on CPUs, since only a fresh process can be
    given several OpenMP threads on chosen cores; with one thread the environment says it all.
    """
    one_core = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "").isdecimal()
    return current_platform.is_cpu() and one_core and os.environ.get("OMP_NUM_THREADS") == "1"
