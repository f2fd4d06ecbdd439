"""A step of training in an environment that a server of another project runs: its template,
generated and served by the package openenv."""

from pathlib import Path

import pytest
import torch
from headrace.v1 import rollout_pb2
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.common import workers
from services.common.config import Recipe
from services.generator.group import GroupRunner
from services.generator.slots import Slots
from services.generator.wire import write_group
from services.launcher.tiny_tokenizer import END
from services.scorer import rewards, scoring
from services.scorer.wire import read_conversations, write_scored
from services.trainer.intake import Policy, admit
from services.trainer.learner import Learner
from services.trainer.types import Row
from tests.services.generator.fakes import recorder
from tests.services.generator.spoken import TOKENIZER, Speaker, call, setting_of
from tests.services.generator.test_openenv_client import template as template  # its fixture
from tests.services.generator.test_openenv_client import with_package

MESSAGES = ("a", "bb", "cccc", "dddddddd")


def model_of(folder: Path) -> None:
    """A model of random weights for the tokenizer."""
    config = Qwen3Config(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=TOKENIZER.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


@with_package
async def test_a_step_is_taken_on_what_the_server_rewards(template: str, tmp_path: Path) -> None:
    """The template echoes and gives a tenth of the message's length. Four conversations of 1, 2,
    4 and 8 letters: 0.1, 0.2, 0.4 and 0.8, whose mean is 0.375 and standard deviation 0.26810."""
    opened: list[str] = []

    def say(prompt: str) -> str:
        if "<tool>" in prompt:
            return f"ok{END}"
        opened.append(MESSAGES[len(opened)])
        return f"{call('step', message=opened[-1])}{END}"

    async with setting_of(
        Speaker(say, versions=(1,)),
        tmp_path,
        environments={"classes": [{"environment": "openenv", "params": {"url": template}}]},
        rewards={"functions": [{"function": "environment"}]},
    ) as setting:
        # One slot: the template serves one session at a time.
        runner = GroupRunner(setting, Slots(1), recorder())
        request = rollout_pb2.RolloutRequest(
            group_id="0.0.1.0",
            messages=[rollout_pb2.ChatMessage(role="user", content="Say something.")],
            sampling=rollout_pb2.Sampling(
                num_generations=4, temperature=1.0, max_completion_tokens=128
            ),
        )
        group = await runner.run(request)
        assert (len(group.conversations), group.failed) == (4, {})
        recipe = setting.recipe
    assert group.versions is not None
    message = write_group(
        request, group.conversations, failed={}, versions=group.versions, producer="g"
    )
    assert [len(rollout.turns) for rollout in message.rollouts] == [2] * 4

    judges = rewards.Judges(
        rewards.resolve(recipe.rewards), workers.Pool(1), recipe.rewards.timeout_s
    )
    async with judges.pool:
        judgement = await scoring.score(
            read_conversations(message), judges=judges, recipe=recipe, evaluation=False
        )
    assert judgement.totals == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert judgement.advantages.advantages == pytest.approx(
        [-1.02572, -0.65273, 0.09325, 1.58520], abs=1e-4
    )
    scored = write_scored(message, judgement, scorer="s")

    policy = Policy(version=1, step=0, step_of={1: 0}, max_staleness=0, vocab_size=len(TOKENIZER))
    admitted = admit(scored.SerializeToString(), group_id="0.0.1.0", policy=policy)
    model_of(tmp_path)
    learner = Learner(
        Recipe.model_validate(
            {
                "model": {"path": str(tmp_path)},
                "data": {"file": "prompts.jsonl"},
                "trainer": {"max_steps": 1, "device": "cpu"},
            }
        )
    )
    before = {name: tensor.clone() for name, tensor in learner._own._model.state_dict().items()}
    for row in learner.plan(admitted.samples).rows:
        learner.accumulate([Row([admitted.samples[index] for index in row.samples])])
    assert learner.finish().applied
    after = learner._own._model.state_dict()
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())
