"""The recipe's sections on how conversations are made: sampling, the engine, tools, environments.

Torch-free and import-cheap, as all of the recipe.
"""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from services.common.section import Section


def _fixed(value: float, why: str) -> AfterValidator:
    """Only `value` is accepted; the error says why."""

    def check(given: float) -> float:
        if given != value:
            raise ValueError(f"only {value} is allowed (off): {why}")
        return given

    return AfterValidator(check)


_TRUNCATES = (
    "the engine's log-probabilities would be over the truncated support, the trainer's are over "
    "the whole vocabulary, and an unchanged policy would look changed"
)
_PENALISES = (
    "the engine's log-probabilities would be of the penalised distribution, the trainer's are of "
    "the policy itself, and an unchanged policy would look changed"
)


class Generation(Section):
    """How conversations are made."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """Conversations of a group."""
    temperature: Annotated[float, Field(ge=0.01, le=10)] = 1.0
    """Softmax temperature; the engine raises smaller values to 0.01, so they are refused here."""
    top_p: Annotated[float, _fixed(1.0, _TRUNCATES)] = 1.0
    """Fixed at off: the engine's log-probabilities would be over the truncated support."""
    top_k: Annotated[int, _fixed(0, _TRUNCATES)] = 0
    """Fixed at off, for the same reason."""
    min_p: Annotated[float, _fixed(0.0, _TRUNCATES)] = 0.0
    """Fixed at off, for the same reason."""
    repetition_penalty: Annotated[float, _fixed(1.0, _PENALISES)] = 1.0
    """Fixed at off: the engine's log-probabilities would be of the penalised distribution."""
    max_completion_tokens: Annotated[int, Field(ge=1)] = 512
    """Most generated tokens of one conversation, all its turns together."""
    max_turns: Annotated[int, Field(ge=1)] = 8
    """Most engine calls of one conversation."""
    min_turn_tokens: Annotated[int, Field(ge=1)] = 16
    """Where less than this would be left for the next turn, the conversation ends before it."""
    fork_threshold_tokens: Annotated[int, Field(ge=0)] = 16
    """A turn's prompt that differs from the tokens held so far within the last answer, by fewer
    tokens than this, replaces them; else a new sequence begins. 0 never replaces."""
    reasoning_parser: str | None = None
    """vLLM's parser that takes a turn's reasoning out of its text, by name ("qwen3"); without one
    the text stays whole."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Wall time of one conversation. Past it, it ends with the turns that are finished; without a
    finished turn it has failed."""


class Generator(Section):
    """The engine of one replica."""

    replicas: Annotated[int, Field(ge=1)] = 1
    """Processes that `headrace run` starts; on Kubernetes the Deployment says it."""
    max_inflight: Annotated[int, Field(ge=1)] = 64
    """Conversations at a time in one replica."""
    max_num_seqs: Annotated[int, Field(ge=1)] | None = None
    """Of these, how many the engine samples at a time; all unless given. Fewer keep some waiting
    inside the engine, so that its batch stays full while others end, begin or wait for tools:
    worth it where completions are a few tokens long."""
    max_model_len: Annotated[int, Field(ge=16)] = 2048
    """Longest prompt plus completion, in tokens."""
    max_num_batched_tokens: Annotated[int, Field(ge=64)] = 16384
    """Tokens that the engine prefills at once."""
    kv_cache_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    """KV cache of one replica. Without it the engine takes what `gpu_memory_utilization` says,
    alone on its device."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the device's memory, where `kv_cache_bytes` is not given."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """GPUs of one replica."""
    enforce_eager: bool = True
    """No graph capture: faster start, slower decoding on GPUs."""
    seeded: bool = False
    """A seed per conversation, from (run, group, generation). Refused on CPUs: vLLM 0.32 dies
    there when a seeded prompt is prefilled in parts."""


class Tools(Section):
    """What the model may call."""

    functions: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """`module:function` each, with type hints and a docstring that describes every argument.
    `async def` is awaited; any other runs in a worker process."""
    format: str = "hermes"
    """How the model writes calls: "hermes" (`<tool_call>` with JSON, also Qwen's), read by
    ourselves, or the name of one of vLLM's tool parsers."""
    timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Of one call; one cut off is a failed call, and the model is told."""
    workers: Annotated[int, Field(ge=1)] = 2
    """Worker processes for sync tools that one generator starts with; more are started, up to
    `generator.max_inflight`, while calls wait behind slow ones."""


class EnvironmentClass(Section):
    """One environment that conversations may live in."""

    environment: str
    """`module:Class` with `reset(**row)`, methods as tools and optionally `get_reward()`; or
    "openenv", a server that speaks that protocol."""
    name: str | None = None
    """What the dataset's column calls it; the class's own name by default."""
    params: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    """Keyword arguments of the class; for "openenv" `url`, the server's address, and if wanted
    `reward` ("last" of an episode's steps, or their "sum") and `observation`, the one field of
    observations that the model is told."""


class Environments(Section):
    """Environments: each conversation has an instance of its own."""

    classes: Annotated[tuple[EnvironmentClass, ...], Field(strict=False)] = ()
    """None: conversations have the tools alone."""
    column: str | None = None
    """The dataset column that names a row's environment, null for none; needed for more than
    one."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Of one call of `reset`, a method or `get_reward`; past it the conversation has failed."""

    def name_of(self, position: int) -> str:
        """The name of the class at a position: its own, or what follows the colon."""
        chosen = self.classes[position]
        return chosen.name or chosen.environment.rpartition(":")[2]


def mistakes(environments: Environments, tools: Tools) -> Iterator[str]:
    """What is wrong between keys of these sections, one line each."""
    names = [environments.name_of(position) for position in range(len(environments.classes))]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"environments.classes: two are called {name!r}; give one another name"
    if len(names) > 1 and environments.column is None:
        yield (
            "environments.column: name the dataset column that chooses one of "
            f"{', '.join(names)} for each row"
        )
    if environments.column is not None and not names:
        yield "environments.column: environments.classes has none to choose from"
    for function in sorted({f for f in tools.functions if tools.functions.count(f) > 1}):
        yield f"tools.functions: {function!r} is there twice"
