"""The calculator's model as it is really made: it knows how to call, and has much left to learn."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import calculator
from services.generator.parsing import Hermes
from services.launcher import tiny_model, tiny_tasks

NUM_QUESTIONS = 256

OTHER_SEED = 10_000
"""reasoning-gym's row i is that of seed + i: seed 1 would ask what the model was shown."""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads of torch wait for each other in busy loops: on a shared machine that is slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once: half a minute on a quiet core."""
    return tiny_model.make(tmp_path_factory.mktemp("tiny") / "model", task="calculator")


class Player:
    """Samples turns of many conversations at a time with transformers alone."""

    def __init__(self, folder: Path, tools: list[dict[str, Any]]) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._tokenizer.padding_side = "left"
        self._tools = tools

    def say(self, conversations: list[list[dict[str, str]]]) -> None:
        """One more message of the assistant in each."""
        texts = [
            self._tokenizer.apply_chat_template(
                each, tools=self._tools, add_generation_prompt=True, tokenize=False
            )
            for each in conversations
        ]
        prompts = self._tokenizer(
            texts, add_special_tokens=False, padding=True, return_tensors="pt"
        )
        sampled = self._model.generate(
            prompts["input_ids"],
            attention_mask=prompts["attention_mask"],
            do_sample=True,
            top_k=0,
            max_new_tokens=40,
        )
        for each, row in zip(
            conversations, sampled[:, prompts["input_ids"].shape[1] :], strict=True
        ):
            said = self._tokenizer.decode(row).partition("<end>")[0]
            each.append({"role": "assistant", "content": said})


def test_the_warm_start_ends_where_rewards_begin(folder: Path) -> None:
    """Of conversations sampled on other questions, with the recipe's own tools, about as many are
    right as the accuracy says that ended the warm start; many of them with a call."""
    mark = json.loads((folder / tiny_model.MARK_FILE).read_text())
    assert mark["task"] == "calculator"
    assert 0.4 <= mark["sampled_accuracy"] < 0.7
    lessons = tiny_tasks.calculator(OTHER_SEED)
    rows = [each.messages for each in lessons.shown[: 2 * NUM_QUESTIONS : 2]]
    conversations = [messages[:1] for messages in rows]
    player = Player(folder, lessons.tools or [])
    torch.manual_seed(0)
    player.say(conversations)
    calling = [each for each in conversations if run_call(each)]
    player.say(calling)
    right = sum(
        each[-1]["content"] == messages[-1]["content"]
        for each, messages in zip(conversations, rows, strict=True)
    )
    assert 0.3 < len(calling) / NUM_QUESTIONS < 0.8
    assert right / NUM_QUESTIONS == pytest.approx(mark["sampled_accuracy"], abs=0.12)


def run_call(conversation: list[dict[str, str]]) -> bool:
    """Answer the one call of the last message; whether there was one that can be run."""
    calls = Hermes().parse(conversation[-1]["content"]).calls
    if len(calls) != 1 or calls[0].name not in ("add", "multiply"):
        return False
    arguments = calls[0].arguments or {}
    if set(arguments) != {"a", "b"} or not all(isinstance(n, int) for n in arguments.values()):
        return False
    result = getattr(calculator, calls[0].name)(**arguments)
    conversation.append({"role": "tool", "content": str(result)})
    return True
