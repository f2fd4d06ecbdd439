"""Reward functions: resolved once, then called for one group at a time, their answers checked.

How a function is called is what users of TRL know: keyword arguments `prompts`, `completions`,
`texts` and a few more (OURS), every column of the dataset row as a list with one entry a
conversation, and the recipe's `params`; what the signature does not take is left out. By
`log_metric`, which it takes by name, it can say numbers of its own. It returns one number or None
(it abstains) a conversation. See docs/rewards.md.
"""

import asyncio
import copy
import inspect
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common import config, plugins, workers
from services.common.async_calls import awaited
from services.common.background import Strays
from services.common.errors import UserError
from services.scorer.advantages import MAX_MAGNITUDE
from services.scorer.conversations import Conversations

OURS = (
    *("prompts", "completions", "texts", "end_reasons", "environments", "environment_rewards"),
    workers.LOG_ARGUMENT,
)
"""Arguments that a dataset column or a parameter of the same name cannot replace."""

METRIC_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""What may stand in `rewards/NAME`."""


class RewardError(ValueError):
    """A function returned what cannot be read as rewards: no retry would help, the group is
    refused.
    """


@dataclass(frozen=True)
class Function:
    """A reward function of the recipe, ready to be called."""

    name: str
    """In metrics and in FunctionReward."""
    weight: float
    params: Mapping[str, Any]
    reference: str
    """`module:function`, for workers."""
    call: Callable[..., Any]
    is_async: bool
    """Awaited in the event loop; else called in a worker process."""
    accepts: frozenset[str] | None
    """Names of its arguments; None when it takes any."""
    needs: frozenset[str]
    """Arguments without a default."""
    logs: bool = False
    """It takes `log_metric`."""

    def arguments(self, conversations: Conversations) -> dict[str, Any]:
        """What it is called with. Raises MissingColumn."""
        offered = {**conversations.arguments(), **self.params}
        missing = sorted(self.needs - offered.keys() - {workers.LOG_ARGUMENT})
        if missing:
            raise MissingColumn(
                f"it needs {', '.join(missing)}, and the row has only the columns "
                f"{', '.join(sorted(conversations.row)) or '(none)'}"
            )
        if self.accepts is None:
            return offered
        return {name: value for name, value in offered.items() if name in self.accepts}


class MissingColumn(LookupError):
    """The row lacks a column that the function cannot do without."""


@dataclass(frozen=True)
class Failure:
    """A call that gave no rewards: the function abstains for the whole group."""

    reason: str
    """One line."""
    traceback_text: str = ""
    """Of the user's code, where it raised."""


@dataclass(frozen=True)
class Verdict:
    """What one function said of one group."""

    name: str
    rewards: list[float | None]
    """One a conversation; None where it abstained."""
    num_nonfinite: int = 0
    """Of the abstentions: NaN, an infinity, or beyond MAX_MAGNITUDE."""
    failure: Failure | None = None
    """Set when the call gave nothing; all rewards are then None."""
    seconds: float | None = None
    """The call lasted, without its wait for a worker; None where there was none."""
    logged: tuple[tuple[str, float], ...] = ()
    """What it said by `log_metric`, name and value."""


def resolve(settings: config.Rewards) -> tuple[Function, ...]:
    """The recipe's functions. Raises UserError naming the key of the first that cannot be used."""
    loaded = plugins.load_rewards(settings)
    functions: list[Function] = []
    for position, (entry, call) in enumerate(zip(settings.functions, loaded, strict=True)):
        key = f"rewards.functions[{position}]"
        name = entry.name or entry.function.rpartition(":")[2]
        if not METRIC_NAME.fullmatch(name):
            raise UserError(f"{key}.name: {name!r} must match {METRIC_NAME.pattern}")
        if any(name == other.name for other in functions):
            raise UserError(f"{key}.name: there are two functions {name!r}; name one of them")
        accepts, needs = _signature(call)
        _check_params(f"{key}.params", entry.params, accepts)
        functions.append(
            Function(
                name=name,
                weight=entry.weight,
                params=entry.params,
                reference=plugins.reward_reference(entry.function),
                call=call,
                is_async=inspect.iscoroutinefunction(call)
                or inspect.iscoroutinefunction(type(call).__call__),
                accepts=accepts,
                needs=needs,
                logs=accepts is not None and workers.LOG_ARGUMENT in accepts,
            )
        )
    return tuple(functions)


def preload(settings: config.Rewards, functions: Sequence[Function]) -> list[str]:
    """What workers import before their first call: the sync functions and what the built-in ones
    need.
    """
    wanted = []
    for entry, function in zip(settings.functions, functions, strict=True):
        if not function.is_async:
            wanted.append(function.reference)
            builtin = plugins.BUILTIN_REWARDS.get(entry.function)
            if builtin is not None and builtin.needs:
                wanted.append(builtin.needs)
    return wanted


@dataclass
class Judges:
    """All reward functions of a run with the workers that the sync ones run in."""

    functions: tuple[Function, ...]
    pool: workers.Pool
    timeout_s: float
    _stray: Strays = field(default_factory=Strays)
    """Async calls, also those cut off that have not ended yet."""

    async def judge(self, conversations: Conversations) -> list[Verdict]:
        """Call all functions at once for one group; a verdict each, in the recipe's order.

        A timeout, an exception or a missing column is a verdict with its failure. Raises
        RewardError for an answer that cannot be read as rewards. Cancelling it ends what it
        started.
        """
        tasks = [
            asyncio.create_task(self._one(function, conversations)) for function in self.functions
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, function: Function, conversations: Conversations) -> Verdict:
        number = len(conversations.members)
        lasted_s: list[float] = []
        logged: list[tuple[str, float]] = []

        def log(name: str, value: float) -> None:
            logged.append((str(name), float(value)))

        try:
            arguments = function.arguments(conversations)
            if function.is_async:
                given = {workers.LOG_ARGUMENT: log} if function.logs else {}
                returned = await self._await(function, arguments, given, took=lasted_s.append)
            else:
                returned = await self.pool.call(
                    function.reference,
                    arguments,
                    timeout_s=self.timeout_s,
                    took=lasted_s.append,
                    logged=log if function.logs else None,
                )
        except (workers.WorkerError, MissingColumn) as error:
            text = error.traceback_text if isinstance(error, workers.CallRaised) else ""
            failure = Failure(reason=str(error), traceback_text=text)
            return Verdict(
                name=function.name,
                rewards=[None] * number,
                failure=failure,
                seconds=next(iter(lasted_s), None),
            )
        rewards, num_nonfinite = read_rewards(returned, number=number, name=function.name)
        return Verdict(
            name=function.name,
            rewards=rewards,
            num_nonfinite=num_nonfinite,
            seconds=lasted_s[0],
            logged=tuple(logged),
        )

    async def _await(
        self,
        function: Function,
        arguments: dict[str, Any],
        given: dict[str, Any],
        *,
        took: Callable[[float], None],
    ) -> Any:
        """Await an async function, at most its timeout, even when it does not let itself be
        cancelled.
        """

        async def run() -> Any:
            # A copy: what one function changes in place, the others must not see.
            return await function.call(**(copy.deepcopy(arguments) | given))

        begin_s = time.monotonic()
        try:
            return await awaited(run(), timeout_s=self.timeout_s, strays=self._stray)
        finally:
            took(time.monotonic() - begin_s)


def read_rewards(returned: Any, *, number: int, name: str) -> tuple[list[float | None], int]:
    """A function's answer as doubles, and how many of them were no usable number (they abstain).

    True and False are 1.0 and 0.0, numbers of numpy and torch are numbers, None abstains. Raises
    RewardError, naming the function, for a wrong length (a single reward is never spread over the
    group), text, nested lists and anything else.
    """
    if callable(getattr(returned, "tolist", None)):
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        kind = type(returned).__name__
        raise RewardError(
            f"{name}: expected a list of {number} rewards, got a value of type {kind}"
        )
    if len(returned) != number:
        raise RewardError(f"{name}: expected {number}, got {len(returned)} rewards")
    rewards: list[float | None] = []
    num_nonfinite = 0
    for position, value in enumerate(returned):
        if value is None:
            rewards.append(None)
            continue
        number_value = _number(value)
        if number_value is None:
            kind = type(value).__name__
            raise RewardError(f"{name}: reward {position} is of type {kind}; give a number or None")
        usable = math.isfinite(number_value) and abs(number_value) <= MAX_MAGNITUDE
        rewards.append(number_value if usable else None)
        num_nonfinite += not usable
    return rewards, num_nonfinite


def _number(value: Any) -> float | None:
    """A scalar as a float; None when it is none."""
    if not isinstance(value, int | float | list | str):
        try:
            value = workers.plain(value)
        except TypeError:
            return None
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _signature(call: Callable[..., Any]) -> tuple[frozenset[str] | None, frozenset[str]]:
    """Names that a callable takes by keyword (None: any), and those of them without a default."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError:
        # Some callables of C extensions have none to read.
        return None, frozenset()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needs = frozenset(p.name for p in named if p.default is p.empty)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None, needs
    return frozenset(p.name for p in named), needs


def _check_params(key: str, params: Mapping[str, Any], accepts: frozenset[str] | None) -> None:
    for name, value in params.items():
        if name in OURS:
            raise UserError(f"{key}: {name} is given by the scorer; name the parameter differently")
        if accepts is not None and name not in accepts:
            raise UserError(f"{key}: the function takes no argument {name}")
        try:
            json.dumps(value)
        except TypeError as error:
            raise UserError(f"{key}.{name}: write it as text or number: {error}") from None
