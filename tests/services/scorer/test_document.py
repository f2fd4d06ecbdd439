"""What docs/rewards.md and docs/metrics.md show is what the scorer does."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from services.common import config, plugins, workers
from services.scorer import rewards
from services.scorer.conversations import Conversation, Conversations, Message
from services.scorer.rewards import Judges

DOCS = Path(__file__).parents[3] / "docs"
DOCUMENT = DOCS / "rewards.md"


def blocks(language: str, document: Path = DOCUMENT) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(), flags=re.DOTALL)


def conversations_of(*completions: list[Message], answer: str) -> Conversations:
    prompt = [{"role": "user", "content": "2 + 5 ="}]
    return Conversations(
        [Conversation(prompt, completion, end_reason="stop") for completion in completions],
        row={"answer": answer},
    )


def said(text: str, *, num_calls: int = 0) -> list[Message]:
    message: Message = {"role": "assistant", "content": text}
    if num_calls:
        message["tool_calls"] = [{"id": str(number)} for number in range(num_calls)]
    return [message]


async def test_the_documents_functions_run_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "my_rewards.py").write_text("\n".join(blocks("python")))
    [recipe] = blocks("toml")
    tree = tomllib.loads(recipe)["rewards"]
    tree["functions"] += [{"function": "my_rewards:frugal"}, {"function": "my_rewards:judged"}]
    settings = config.Rewards.model_validate(tree)
    functions = rewards.resolve(settings)
    conversations = conversations_of(
        said("It is 7"), said("8", num_calls=2), said("x" * 201, num_calls=1), [], answer="7"
    )
    try:
        async with workers.Pool(1, preload=rewards.preload(settings, functions)) as pool:
            judges = Judges(functions, pool, timeout_s=settings.timeout_s)
            verdicts = await judges.judge(conversations)
    finally:
        sys.modules.pop("my_rewards", None)
    assert {verdict.name: verdict.rewards for verdict in verdicts} == {
        "answers_right": [1, 0, 0, 0],
        "short": [1, 1, None, 1],
        "frugal": [1, 0, 1, 1],
        "judged": [1, 1, 1, 0],
    }


def test_the_built_ins_are_all_described() -> None:
    assert rows_of("Built in") == set(plugins.BUILTIN_REWARDS)


def test_what_the_scorer_gives_is_all_described() -> None:
    assert rows_of("What it is called with") == set(rewards.OURS)


def rows_of(heading: str) -> set[str]:
    """Names in the first column of a section's table."""
    section = DOCUMENT.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    body = section.partition("\n|---")[2]
    return set(re.findall(r"^\| `(\w+)` \| ", body, re.MULTILINE))


async def test_a_metric_of_ones_own_is_said_and_declared_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    [function], [declared] = (blocks(kind, DOCS / "metrics.md") for kind in ("python", "toml"))
    (tmp_path / "my_rewards.py").write_text(function)
    path = tmp_path / "recipe.toml"
    path.write_text(f"""
{declared}
[data]
file = "prompts.jsonl"
[trainer]
max_steps = 1
[[rewards.functions]]
function = "my_rewards:answers_right"
""")
    recipe = config.load(path, environ={})
    [(key, metric)] = recipe.metrics.items()
    assert (metric.instrument, metric.default) == ("observation", "p95")
    functions = rewards.resolve(recipe.rewards)
    conversations = conversations_of(said("7"), said("12 "), answer="7")
    try:
        async with workers.Pool(1, preload=rewards.preload(recipe.rewards, functions)) as pool:
            [verdict] = await Judges(functions, pool, timeout_s=60).judge(conversations)
    finally:
        sys.modules.pop("my_rewards", None)
    assert verdict.rewards == [1, 0]
    assert [(f"custom/{name}", value) for name, value in verdict.logged] == [(key, 1), (key, 3)]
