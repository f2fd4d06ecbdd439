import ast
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common import config, workers
from services.common.errors import UserError
from services.scorer import rewards
from services.scorer.conversations import Conversation, Conversations
from services.scorer.rewards import Judges, RewardError, read_rewards
from tests.waiting import until

HERE = "tests.services.scorer.reward_functions"


def settings(*functions: str | dict[str, Any], **kwargs: Any) -> config.Rewards:
    entries = [{"function": f} if isinstance(f, str) else f for f in functions]
    full = [entry | {"function": entry["function"].replace("HERE", HERE)} for entry in entries]
    return config.Rewards.model_validate({"functions": full, **kwargs})


@asynccontextmanager
async def judges(recipe: config.Rewards) -> AsyncIterator[Judges]:
    functions = rewards.resolve(recipe)
    pool = workers.Pool(recipe.workers, preload=rewards.preload(recipe, functions))
    try:
        yield Judges(functions, pool, timeout_s=recipe.timeout_s)
    finally:
        await pool.close()


def group(*texts: str, **row: Any) -> Conversations:
    prompt = [{"role": "user", "content": "Solve."}]
    members = [
        Conversation(prompt, [{"role": "assistant", "content": text}], end_reason="stop")
        for text in texts
    ]
    return Conversations(members, row=row)


async def test_functions_of_all_kinds_are_called_for_the_whole_group() -> None:
    recipe = settings(
        "HERE:length", "HERE:async_length", "HERE:judge", "HERE:judge.grade", "HERE:returns_array"
    )
    async with judges(recipe) as called:
        verdicts = await called.judge(group("a", "bb", ""))
    assert [verdict.rewards for verdict in verdicts] == [
        [1, 2, 0],
        [1, 2, 0],
        [1, 1, 1],
        [2, 2, 2],
        [0, 1, 2],
    ]
    names = [verdict.name for verdict in verdicts]
    assert names == ["length", "async_length", "judge", "judge.grade", "returns_array"]
    assert [f.is_async for f in called.functions] == [False, True, False, True, False]
    assert all(verdict.failure is None for verdict in verdicts)


async def test_arguments_are_columns_and_params_and_our_names_win(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    path = str(seen)
    recipe = settings({"function": "HERE:everything", "params": {"beta": 2}})
    async with judges(recipe) as called:
        (verdict,) = await called.judge(
            group("x", "y", path=path, answer=7, texts="a", end_reasons="b", tags=["p", None])
        )
    assert verdict.rewards == [0, 0]
    prompt = [{"role": "user", "content": "Solve."}]
    assert dict(ast.literal_eval(seen.read_text())) == {
        "answer": [7, 7],
        "beta": 2,
        "completions": [
            [{"role": "assistant", "content": "x"}],
            [{"role": "assistant", "content": "y"}],
        ],
        "end_reasons": ["stop", "stop"],
        "environment_rewards": [None, None],
        "environments": ["", ""],
        "path": [path, path],
        "prompts": [prompt, prompt],
        "tags": [["p", None], ["p", None]],
        "texts": ["x", "y"],
    }


@pytest.mark.parametrize("name", rewards.OURS)
def test_no_column_and_no_parameter_replaces_what_is_ours(name: str) -> None:
    function = {"function": "HERE:everything", "params": {name: 1}}
    with pytest.raises(UserError, match=f"{name} is given by the scorer"):
        rewards.resolve(settings(function))
    if name != workers.LOG_ARGUMENT:  # it is no list: the call itself gives it
        assert group("x", **{name: 7}).arguments() == group("x").arguments()
    given = set(group("x").arguments()) | {workers.LOG_ARGUMENT}
    assert given == set(rewards.OURS)


async def test_the_environment_s_reward_is_what_it_gave_and_abstains_without_one() -> None:
    members = [
        Conversation([], [], "stop", environment="Guess", environment_reward=reward)
        for reward in (0.25, None, 0.0, math.nan)
    ]
    async with judges(settings("environment")) as called:
        (verdict,) = await called.judge(Conversations(members, row={}))
    assert (verdict.name, verdict.rewards) == ("environment", [0.25, None, 0.0, None])
    assert verdict.num_nonfinite == 1


async def test_none_survives_the_worker_and_nan_abstains_and_is_counted() -> None:
    async with judges(settings("HERE:scripted")) as called:
        (verdict,) = await called.judge(group("1", "None", "nan", "inf", "True", "0"))
    assert verdict.rewards == [1, None, None, None, 1, 0]
    assert verdict.num_nonfinite == 2


@pytest.mark.parametrize("function", ["HERE:raises", "HERE:async_raises"])
async def test_an_exception_is_an_abstention_of_that_function_alone(function: str) -> None:
    async with judges(settings(function, "HERE:length")) as called:
        failed, fine = await called.judge(group("a", "bb"))
    assert failed.rewards == [None, None]
    assert failed.failure is not None
    assert failed.failure.reason == "ValueError: a bug of the user"
    assert 'raise ValueError("a bug of the user")' in failed.failure.traceback_text
    assert fine.rewards == [1, 2]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("HERE:hangs", "did not return within 0.3 s"),
        ("HERE:async_hangs", "did not return within 0.3 s"),
        ("HERE:kills", "its process ended with status 9"),
    ],
)
async def test_a_function_that_hangs_or_dies_abstains(function: str, why: str) -> None:
    async with judges(settings(function, timeout_s=0.3, workers=1)) as called:
        for _ in range(2):
            (verdict,) = await called.judge(group("a", "b"))
            assert verdict.rewards == [None, None]
            assert verdict.failure is not None
            assert verdict.failure.reason == why
            assert verdict.seconds is not None
            assert verdict.seconds >= (0.3 if "return" in why else 0)


async def test_a_function_s_time_is_without_its_wait_for_a_worker() -> None:
    entries = [{"function": "HERE:sleeps", "name": name} for name in ("first", "second")]
    async with judges(settings(*entries, workers=1)) as called:
        verdicts = await called.judge(group("a", "b"))
    for verdict in verdicts:
        assert verdict.seconds is not None
        assert 1.0 <= verdict.seconds < 2.0


async def test_an_async_function_that_ignores_cancellation_is_not_waited_for() -> None:
    async with judges(settings("HERE:async_stubborn", timeout_s=0.02)) as called:
        (verdict,) = await called.judge(group("a"))
        assert verdict.failure is not None
        assert called._stray
        await until(lambda: not called._stray)


async def test_a_function_may_say_numbers_of_its_own() -> None:
    recipe = settings("HERE:logs", "HERE:async_logs", "HERE:logs_and_raises", "HERE:length")
    async with judges(recipe) as called:
        verdicts = await called.judge(group("a", "bb", log_metric="a column of that name"))
    first, second, failed, silent = (verdict.logged for verdict in verdicts)
    assert first[:2] == second[:2] == (("chars", 1.0), ("chars", 2.0))
    assert [name for name, _ in first] == ["chars", "chars", "nan"]
    assert math.isnan(first[2][1])
    assert failed == silent == ()
    assert [verdict.failure is None for verdict in verdicts] == [True, True, False, True]


async def test_a_missing_column_is_told_by_name() -> None:
    async with judges(settings("HERE:needs_column")) as called:
        (verdict,) = await called.judge(group("a", answer="a"))
        assert verdict.failure is not None
        assert "needs solution" in verdict.failure.reason
        assert "answer" in verdict.failure.reason
        assert verdict.seconds is None
        (verdict,) = await called.judge(group("a", solution="a"))
        assert verdict.rewards == [1]


@pytest.mark.parametrize("value", [[1.0], [1.0] * 3, [1.0] * 5, []])
def test_a_wrong_number_of_rewards_is_refused(value: list[float]) -> None:
    with pytest.raises(RewardError, match=f"f: expected 4, got {len(value)} rewards"):
        read_rewards(value, number=4, name="f")


@pytest.mark.parametrize("value", [1.0, None, "0.70", {"a": 1}, np.float32(0.5), iter([1, 2])])
def test_what_is_no_list_is_refused(value: Any) -> None:
    with pytest.raises(RewardError, match="f: expected a list of 4 rewards, got"):
        read_rewards(value, number=4, name="f")


@pytest.mark.parametrize("value", ["0.7", [1.0], (1,), {}, 1j, np.array([1.0, 2.0])])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(RewardError, match="f: reward 1 is of type"):
        read_rewards([1, value], number=2, name="f")


def test_two_dimensions_are_refused() -> None:
    with pytest.raises(RewardError, match="reward 0 is of type list"):
        read_rewards(np.zeros((2, 1)), number=2, name="f")


def test_numbers_of_all_kinds_are_taken() -> None:
    given = [True, False, 2, np.float32(0.5), np.int64(3), np.bool_(True), np.array(4.0), None]
    read, num_nonfinite = read_rewards(given, number=8, name="f")
    assert read == [1.0, 0.0, 2.0, 0.5, 3.0, 1.0, 4.0, None]
    assert all(type(reward) is float for reward in read[:-1])
    assert num_nonfinite == 0
    assert read_rewards((1, 2), number=2, name="f") == ([1.0, 2.0], 0)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1e200, 10**400, np.float32("nan")]
)
def test_an_unusable_number_never_reaches_the_baseline(value: Any) -> None:
    assert read_rewards([1, value], number=2, name="f") == ([1.0, None], 1)


async def test_a_refused_answer_ends_the_other_calls() -> None:
    recipe = settings({"function": "HERE:returns", "params": {"value": [1.0]}}, "HERE:async_hangs")
    async with judges(recipe) as called:
        with pytest.raises(RewardError, match="returns: expected 4, got 1"):
            await called.judge(group("a", "b", "c", "d"))
        assert not called._stray


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"function": "no_such_module_xyz:f"}], r"rewards.functions\[0\].function: .*no module"),
        (["HERE:length", "HERE:lenth"], r"functions\[1\].function: .*did you mean length"),
        (["HERE:not_a_function"], "of type int, not a function"),
        (["exact_mach"], "neither module:function nor built in"),
        (["HERE:length", "HERE:length"], r"functions\[1\].name: there are two functions 'length'"),
        ([{"function": "HERE:length", "name": "a/b"}], "must match"),
        ([{"function": "HERE:length", "params": {"beta": 1}}], "takes no argument beta"),
        ([{"function": "HERE:everything", "params": {"texts": 1}}], "given by the scorer"),
    ],
)
def test_what_cannot_be_used_is_a_users_mistake_by_key(entries: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        rewards.resolve(settings(*entries))
    assert "\n" not in str(caught.value)


def test_one_function_may_be_used_twice_under_two_names() -> None:
    recipe = settings("HERE:length", {"function": "HERE:length", "name": "again", "weight": -0.1})
    first, second = rewards.resolve(recipe)
    assert (first.name, second.name, second.weight) == ("length", "again", -0.1)


def test_workers_preload_sync_functions_and_what_built_ins_need() -> None:
    recipe = settings("reasoning_gym", "HERE:length", "HERE:async_length")
    assert rewards.preload(recipe, rewards.resolve(recipe)) == [
        "services.scorer.builtin_rewards:reasoning_gym",
        "reasoning_gym",
        f"{HERE}:length",
    ]
