"""`headrace rollout`: what it asks, what it shows, and what it says to mistakes. The engine of its
own is in tests/test_end_to_end_conversations.py.
"""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from headrace.v1 import generator_pb2, rollout_pb2
from rich.console import Console

from services.common.errors import UserError
from services.launcher import rollout_command
from services.launcher.errors import RunFailed
from services.launcher.rollout_view import print_answer
from tests.conftest import free_port
from tests.services.generator.fakes import FakeEngine
from tests.services.generator.river import river

RECIPE = """
run = "r"
[data]
file = "rows.jsonl"
system_prompt = "Be short."
[evaluation]
enabled = false
[trainer]
max_steps = 1
[generation]
max_completion_tokens = 8
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"prompt": f"{n} + 1", "answer": n + 1} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return path


def show(recipe: Path, address: str | None = None, **arguments: Any) -> tuple[int, str]:
    """The exit status and what is printed, without colours."""
    text = io.StringIO()
    given: dict[str, Any] = {"prompt": None, "row": None, "columns": None, "temperature": None}
    status = rollout_command.show(
        recipe,
        overrides=[],
        num=2,
        address=address,
        console=Console(file=text, width=10_000),
        **given | arguments,
    )
    return status, text.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either --prompt TEXT or --row N, a row of the recipe's dataset"),
        ({"prompt": "a", "row": 1}, "give either --prompt TEXT or --row N"),
        ({"row": 3}, "--row 3: the dataset has the rows 0 to 2"),
        ({"row": -1}, "--row -1: the dataset has the rows 0 to 2"),
        ({"prompt": "a", "columns": "{"}, "--columns: not JSON"),
        ({"prompt": "a", "columns": "[1]"}, "--columns: write a JSON object"),
    ],
)
def test_mistakes(recipe: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        show(recipe, "127.0.0.1:1", **arguments)


def test_a_generator_that_is_not_there(recipe: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(RunFailed, match=f"the generator at {address}: "):
        show(recipe, address, prompt="a")


async def test_a_running_generator_answers(recipe: Path, valkey_url: str, tmp_path: Path) -> None:
    async with river(valkey_url, tmp_path) as seen:
        await seen.trainer.publish(1)
        started = seen.start(FakeEngine())
        await started.ready()
        address = f"127.0.0.1:{json.loads(started.announce.read_text())['grpc_port']}"
        status, text = await asyncio.to_thread(show, recipe, address, row=1)
        prompts = {tuple(call["prompt_ids"]) for call in started.engine.calls}
        await started.stop()
    assert status == 0
    assert "conversation 2 of 2" in text
    assert "<system>Be short.<end><user>1 + 1<end><assistant>⟦" in text
    assert "ended: the model stopped" in text
    assert len(prompts) == 1


def test_a_row_gives_its_columns_and_columns_of_ones_own_go_before_them(recipe: Path) -> None:
    from services.common import config

    request = rollout_command._request(
        config.load(recipe), prompt=None, row=1, columns='{"answer": 9}', num=2, temperature=0.0
    )
    assert json.loads(request.row_json) == {"prompt": "1 + 1", "answer": 9}
    assert [(m.role, m.content) for m in request.messages] == [
        ("system", "Be short."),
        ("user", "1 + 1"),
    ]
    sampling = request.sampling
    assert (sampling.temperature, sampling.num_generations) == (0.0, 2)
    assert sampling.max_completion_tokens == 8


def answer() -> generator_pb2.GenerateResponse:
    """One conversation of two turns in an environment, forked into two sequences."""
    rollout = rollout_pb2.Rollout(
        turns=[
            rollout_pb2.Turn(
                num_prompt_tokens=5,
                num_generated_tokens=12,
                finish_reason="stop",
                duration_s=0.25,
                calls=[
                    rollout_pb2.CallResult(
                        name="up", arguments='{"by": 2}', text="2", by_environment=True
                    ),
                    rollout_pb2.CallResult(
                        arguments="<tool_call>{", text="error: no JSON", failed=True
                    ),
                ],
            ),
            rollout_pb2.Turn(
                num_prompt_tokens=20, num_generated_tokens=2, finish_reason="stop", duration_s=0.5
            ),
        ],
        sequences=[rollout_pb2.Sequence(), rollout_pb2.Sequence()],
        end_reason=rollout_pb2.END_REASON_TURNS,
        duration_s=1.0,
        environment="Counter",
        environment_reward=0.5,
        transitions=rollout_pb2.Transitions(forked=1),
        env_s=0.25,
    )
    segment = generator_pb2.Segment
    return generator_pb2.GenerateResponse(
        rollouts=[rollout],
        texts=[
            generator_pb2.SequenceText(
                segments=[
                    segment(trained=False, num_tokens=5, text="<user>[b]q<end>"),
                    segment(trained=True, num_tokens=12, text="ab"),
                ]
            ),
            generator_pb2.SequenceText(segments=[segment(trained=True, num_tokens=2, text="z")]),
        ],
        failed={"timeout": 1},
        why={"timeout": "no turn was finished"},
    )


def test_what_is_shown_without_colours() -> None:
    text = io.StringIO()
    print_answer(answer(), console=Console(file=text, width=10_000))
    assert text.getvalue() == (
        "conversation 1 of 1\n"
        "  turn 1: 5 tokens in, 12 out (stop), 0.25 s\n"
        '    up {"by": 2} in the environment gave in 0.000 s: 2\n'
        "    (no call) <tool_call>{ failed in 0.000 s: error: no JSON\n"
        "  turn 2: 20 tokens in, 2 out (stop), 0.50 s\n"
        "  sequence 1 of 2: 17 tokens, 12 of them trained\n"
        "<user>[b]q<end>⟦ab⟧\n"
        "  sequence 2 of 2: 2 tokens, 2 of them trained\n"
        "⟦z⟧\n"
        "  ended: out of turns (generation.max_turns) · turns joined: 0 clean, 0 realigned (0 "
        "tokens demoted), 1 forked · 1.00 s (engine 0.75, tools 0.00, environment 0.25) · "
        "environment Counter: 0.5\n"
        "\n"
        "1 failed: timeout: no turn was finished\n"
    )


def test_trained_tokens_are_green_on_a_terminal() -> None:
    text = io.StringIO()
    print_answer(
        answer(),
        console=Console(
            file=text, width=200, force_terminal=True, color_system="standard", no_color=False
        ),
    )
    assert "\x1b[1;32mab\x1b[0m" in text.getvalue()
    assert "⟦" not in text.getvalue()
