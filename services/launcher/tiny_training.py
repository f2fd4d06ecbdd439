"""What a tiny model is made of: a small Qwen3, and its supervised warm start.

This module needs torch and transformers; `tiny_model` imports it only when a model has to be made.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from services.launcher.tiny_tasks import Demonstration, Lessons, Message
from services.launcher.tiny_tokenizer import END, MAX_POSITIONS_TOKENS, build_tokenizer

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.99)
WARMUP_STEPS = 10
MAX_STEPS = 800
"""Where a warm start gives up: about three times what one has been seen to take."""
MEASURE_EVERY_STEPS = 5
MAX_THREADS = 1
IGNORED = -100
"""Label of what is not a target: the prompt and the padding."""

Progress = Callable[[float, str], None]
"""Called with the share done (0 to 1) and a line for people."""


@dataclass(frozen=True)
class Schedule:
    """When a warm start ends, and how it gets there."""

    target: float
    """Sampled accuracy."""
    batch_rows: int
    parts: int = 1
    """A batch goes through the model in so many parts, short rows apart from long ones, so that few
    tokens are padding. It makes no difference to the gradient."""


@dataclass(frozen=True)
class Rows:
    """Conversations as tokens, padded on the right."""

    token_ids: Tensor
    """[rows, longest]."""
    labels: Tensor
    """[rows, longest]: the token id where a token is to be learnt, else IGNORED."""
    questions: Tensor
    """[rows]: what each row answers, counted from 0."""

    def batch(self, chosen: Tensor, *, parts: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Token ids and labels of some rows, in parts, each as long as its longest row."""
        if parts > 1:
            places = torch.arange(self.labels.shape[1])
            lengths = (places * (self.labels[chosen] != IGNORED)).amax(1)
            chosen = chosen[lengths.argsort()]
        for part in chosen.chunk(parts):
            token_ids, labels = self.token_ids[part], self.labels[part]
            longest = int((labels != IGNORED).any(0).nonzero().max()) + 1
            yield token_ids[:, :longest], labels[:, :longest]


@dataclass(frozen=True)
class Accuracy:
    """How well a model answers; exact, nothing is sampled to measure it."""

    greedy: float
    """Share of questions one of whose good answers is what greedy decoding gives."""
    sampled: float
    """Mean probability, at temperature 1, that the answer is one of the good ones."""


def train_and_save(
    directory: Path,
    lessons: Lessons,
    schedule: Schedule,
    *,
    tied: bool,
    seed: int,
    progress: Progress | None = None,
) -> Accuracy:
    """Make a model, warm it up on the lessons, and save all of it.

    `directory` exists. Torch's generator, its threads and the progress bars are left as they were.
    """
    tokenizer = build_tokenizer(tools=lessons.tools is not None)
    with _small_machine(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(tokenizer, tied=tied)
        accuracy = warm_start(
            model,
            encode(tokenizer, lessons.shown, tools=lessons.tools),
            encode(tokenizer, lessons.asked, tools=lessons.tools),
            schedule,
            seed=seed,
            progress=progress,
        )
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return accuracy


@contextmanager
def _small_machine() -> Iterator[None]:
    """Few threads (more only wait for each other at this size), and no progress bars."""
    threads, bars = torch.get_num_threads(), transformers_logging.is_progress_bar_enabled()
    torch.set_num_threads(min(threads, MAX_THREADS))
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if bars:
            transformers_logging.enable_progress_bar()


def build_model(tokenizer: Any, *, tied: bool) -> Any:
    """A float32 Qwen3 of 0.8 million parameters, its random weights from torch's generator."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        # Qwen's 0.02 is for wide models: from there this one is a third slower to learn.
        initializer_range=0.05,
        max_position_embeddings=MAX_POSITIONS_TOKENS,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.do_sample = True
    return model


def encode(
    tokenizer: Any,
    demonstrations: Sequence[Demonstration],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
) -> Rows:
    """Conversations through the chat template.

    To be learnt is what the assistant says and the end of its turn, in every turn.
    """
    rows = [_encode(tokenizer, each.messages, tools=tools) for each in demonstrations]
    token_ids = torch.full((len(rows), max(len(row) for row, _ in rows)), tokenizer.pad_token_id)
    labels = torch.full_like(token_ids, IGNORED)
    for index, (row, turns) in enumerate(rows):
        token_ids[index, : len(row)] = torch.tensor(row)
        for start, end in turns:
            labels[index, start:end] = torch.tensor(row[start:end])
    asked = dict.fromkeys(each.question for each in demonstrations)
    numbers = {question: number for number, question in enumerate(asked)}
    questions = torch.tensor([numbers[each.question] for each in demonstrations])
    return Rows(token_ids, labels, questions)


def _encode(
    tokenizer: Any, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] | None
) -> tuple[list[int], list[tuple[int, int]]]:
    """One conversation's tokens, and from where to where the assistant speaks."""
    row: list[int] = []
    turns = []
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(
            messages[:position], tools=tools, add_generation_prompt=True, tokenize=False
        )
        row = tokenizer.encode(prompt, add_special_tokens=False)
        start = len(row)
        row += tokenizer.encode(message["content"] + END, add_special_tokens=False)
        turns.append((start, len(row)))
    return row, turns


def forward(model: Any, token_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [rows, n, vocabulary] and the labels [rows, n] they predict, after the prefix that all
    rows share.

    The prefix (most of a question) goes through the model once and not once a row: seven times
    fewer tokens. Gradients flow through its cached keys and values.
    """
    same = (token_ids == token_ids[0]).all(0) & (labels == IGNORED).all(0)
    # One token of the prompt at least stays with the rows: its logits predict the first token of
    # the answer.
    shared = max(1, int(same.long().cumprod(0).sum()) - 1)
    cache = model(input_ids=token_ids[:1, :shared], use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(token_ids))
    logits = model(input_ids=token_ids[:, shared:-1], past_key_values=cache, use_cache=True).logits
    return logits, labels[:, shared + 1 :]


def measure(model: Any, rows: Rows) -> Accuracy:
    """Accuracy from one forward over rows, each of which is a good answer to its question.

    Greedy decoding follows an answer exactly as long as the answer's next token is the most
    probable one, so nothing has to be generated. Probabilities of different answers to a question
    add up: 0.3 for the one and 0.2 for the other are 0.5 for a good one.
    """
    with torch.no_grad():
        logits, targets = forward(model, rows.token_ids, rows.labels)
    wanted = targets != IGNORED
    hit = ((logits.argmax(-1) == targets) | ~wanted).all(-1)
    logprobs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    probability = (logprobs * wanted).sum(-1).exp()
    num_questions = int(rows.questions.max()) + 1
    each = torch.zeros(2, num_questions)
    each.index_add_(1, rows.questions, torch.stack([hit.float(), probability]))
    return Accuracy(greedy=each[0].mean().item(), sampled=each[1].mean().item())


def warm_start(
    model: Any,
    shown: Rows,
    asked: Rows,
    schedule: Schedule,
    *,
    seed: int,
    progress: Progress | None = None,
) -> Accuracy:
    """Train on batches of `shown` until accuracy over `asked` is the target, and say what it is.

    Cross entropy over answers and ends of turn, AdamW with a linear warm-up. It stops by accuracy
    and not after a number of steps, since float32 sums differ between machines: what GRPO starts
    from must not. By the sampled one, which rises steadily where the greedy one jumps. Raises
    RuntimeError when MAX_STEPS do not suffice.
    """
    target = schedule.target
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0
    )
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, MAX_STEPS + 1):
        chosen = torch.randint(len(shown.token_ids), (schedule.batch_rows,), generator=generator)
        optimizer.zero_grad()
        num_targets = (shown.labels[chosen] != IGNORED).sum()
        for token_ids, labels in shown.batch(chosen, parts=schedule.parts):
            logits, targets = forward(model, token_ids, labels)
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            torch.autograd.backward(loss / num_targets)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
        optimizer.step()
        if step % MEASURE_EVERY_STEPS:
            continue
        accuracy = measure(model, asked)
        if progress is not None:
            progress(
                1.0 if accuracy.sampled >= target else accuracy.sampled / target,
                f"warm start, step {step}: {accuracy.sampled:.0%} of answers right, "
                f"until {target:.0%}",
            )
        if accuracy.sampled >= target:
            return accuracy
    raise RuntimeError(
        f"the warm start reached a sampled accuracy of {accuracy.sampled:.2f}, not {target}, "
        f"in {MAX_STEPS} steps"
    )
