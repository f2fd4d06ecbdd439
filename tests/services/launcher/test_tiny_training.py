"""Conversations to rows, and the warm start; its model learns in seconds."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from services.launcher import tiny_tasks, tiny_training
from services.launcher.tiny_tasks import Demonstration, Lessons
from services.launcher.tiny_tokenizer import build_tokenizer
from services.launcher.tiny_training import IGNORED, Rows, Schedule

PLAIN = build_tokenizer()
WITH_TOOLS = build_tokenizer(tools=True)
SCHEDULE = Schedule(target=0.3, batch_rows=64)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch wait for each other in busy loops: on a shared machine that is slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def answered(question: str, answer: str, number: int) -> Demonstration:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Demonstration(messages, question=number)


SUMS = [
    answered(f"{first} + {second} =", str(first + second), number=3 * first + second)
    for first in range(4)
    for second in range(3)
]


def small_model() -> tuple[Any, Rows]:
    torch.manual_seed(0)
    return tiny_training.build_model(PLAIN, tied=False), tiny_training.encode(PLAIN, SUMS)


def few(lessons: Lessons, number: int) -> Rows:
    return tiny_training.encode(WITH_TOOLS, lessons.shown[-number:], tools=lessons.tools)


@pytest.mark.parametrize("teach", [tiny_tasks.calculator, tiny_tasks.guess])
def test_all_that_the_assistant_says_is_learnt_and_nothing_else(teach: Any) -> None:
    lessons = teach(0)
    rows = few(lessons, 20)
    for index, each in enumerate(lessons.shown[-20:]):
        text = WITH_TOOLS.apply_chat_template(each.messages, tools=lessons.tools, tokenize=False)
        token_ids = WITH_TOOLS.encode(text, add_special_tokens=False)
        row, labels = rows.token_ids[index], rows.labels[index]
        assert row[: len(token_ids)].tolist() == token_ids
        assert set(row[len(token_ids) :].tolist()) <= {WITH_TOOLS.pad_token_id}
        learnt = labels != IGNORED
        assert torch.equal(labels[learnt], row[learnt])
        said = [m["content"] for m in each.messages if m["role"] == "assistant"]
        assert WITH_TOOLS.decode(row[learnt]) == "".join(f"{content}<end>" for content in said)


def test_accuracy_is_that_of_real_greedy_decoding_and_sampling() -> None:
    model, rows = small_model()
    accuracy = tiny_training.warm_start(model, rows, rows, SCHEDULE, seed=0)
    assert accuracy.greedy >= 0.3
    right, probability = 0, 0.0
    for question, answer in (tuple(m["content"] for m in each.messages) for each in SUMS):
        messages = [{"role": "user", "content": question}]
        prompt = PLAIN.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        wanted = PLAIN.encode(answer + "<end>", add_special_tokens=False)
        said = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=len(wanted),
        )[0, prompt.shape[1] :].tolist()
        right += said == wanted
        probability += probability_of(model, prompt, wanted)
    assert accuracy.greedy == pytest.approx(right / len(SUMS))
    assert accuracy.sampled == pytest.approx(probability / len(SUMS), rel=1e-4)


def probability_of(model: Any, prompt: torch.Tensor, wanted: list[int]) -> float:
    whole = torch.cat([prompt, torch.tensor([wanted])], dim=1)
    with torch.no_grad():
        logprobs = model(input_ids=whole, use_cache=False).logits[0].log_softmax(-1)
    places = range(prompt.shape[1] - 1, whole.shape[1] - 1)
    return float(logprobs[list(places), wanted].sum().exp())


def test_good_answers_to_one_question_add_up() -> None:
    model, _ = small_model()
    apart = [answered("1 =", text, number) for number, text in enumerate(("1", "one"))]
    together = [answered("1 =", text, 7) for text in ("1", "one")]
    one_by_one = tiny_training.measure(model, tiny_training.encode(PLAIN, apart))
    added = tiny_training.measure(model, tiny_training.encode(PLAIN, together))
    assert one_by_one.sampled > 0
    assert added.sampled == pytest.approx(2 * one_by_one.sampled, rel=1e-5)


def gradients(model: Any, logits: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_the_shared_prefix_changes_neither_the_loss_nor_the_gradient() -> None:
    model, rows = small_model()
    shared = gradients(model, *tiny_training.forward(model, rows.token_ids, rows.labels))
    logits = model(input_ids=rows.token_ids, use_cache=False).logits[:, :-1]
    assert_same(shared, gradients(model, logits, rows.labels[:, 1:]))


def test_parts_by_length_change_nothing_and_are_short() -> None:
    rows = few(tiny_tasks.guess(0), 8)
    torch.manual_seed(0)
    model = tiny_training.build_model(WITH_TOOLS, tied=False)
    [whole] = rows.batch(torch.arange(8), parts=1)
    parts = list(rows.batch(torch.arange(8), parts=4))
    widths = [token_ids.shape[1] for token_ids, _ in parts]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1] == whole[0].shape[1]
    each = [gradients(model, *tiny_training.forward(model, *part)) for part in parts]
    summed = [torch.stack(together).sum(0) for together in zip(*each, strict=True)]
    assert_same(summed, gradients(model, *tiny_training.forward(model, *whole)))


def test_a_warm_start_that_gets_nowhere_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_training, "MAX_STEPS", 5)
    model, rows = small_model()
    schedule = Schedule(target=1.0, batch_rows=64)
    with pytest.raises(RuntimeError, match=r"not 1\.0, in 5 steps"):
        tiny_training.warm_start(model, rows, rows, schedule, seed=0)
