"""What the tiny model is made of: a character tokenizer, a small Qwen3, and its supervised warm
start.

This module needs torch and transformers; `tiny_model` imports it only when a model has to be made.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

PAD, UNKNOWN, END = "<pad>", "<unk>", "<end>"
ROLES = ("system", "user", "assistant", "tool")
ALPHABET = ("\n", *(chr(code) for code in range(32, 127)))
"""Newline and printable ASCII, one token each; any other character is UNKNOWN."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role: ' ~ message['role']) }}"
    "{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}<end>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""One token opens a message and one ends it, so that prompts stay short."""

MAX_POSITIONS_TOKENS = 2048
BATCH_ROWS = 64
LEARNING_RATE = 1e-3
BETAS = (0.9, 0.99)
WARMUP_STEPS = 10
MAX_STEPS = 400
"""Where the warm start gives up: about three times what it has been seen to take."""
MEASURE_EVERY_STEPS = 5
MAX_THREADS = 1
IGNORED = -100
"""Label of what is not a target: the prompt and the padding."""

Progress = Callable[[float, str], None]
"""Called with the share done (0 to 1) and a line for people."""


@dataclass(frozen=True)
class Accuracy:
    """How well a model answers, over all questions of the task; exact, nothing is sampled to
    measure it.
    """

    greedy: float
    """Share of questions whose greedy completion is the answer and the end of turn."""
    sampled: float
    """Mean probability of the answer and the end of turn, at temperature 1."""


def train_and_save(
    directory: Path,
    pairs: Sequence[tuple[str, str]],
    *,
    tied: bool,
    target: float,
    seed: int,
    progress: Progress | None = None,
) -> Accuracy:
    """Make a model, warm it up on (question, answer) pairs until `target`, and save all of it.

    `directory` exists. Torch's generator, its threads and the progress bars are left as they were.
    """
    tokenizer = build_tokenizer()
    with _small_machine(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(tokenizer, tied=tied)
        token_ids, labels = encode(tokenizer, pairs)
        accuracy = warm_start(model, token_ids, labels, target=target, seed=seed, progress=progress)
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


def build_tokenizer() -> Any:
    """A tokenizer with one token a character; decoding gives back exactly the text that was
    encoded.
    """
    tokens = [PAD, UNKNOWN, END, *(f"<{role}>" for role in ROLES), *ALPHABET]
    inner = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN)
    )
    # "." would not match a newline, and a newline dropped here is dropped from every prompt.
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    # Without a decoder, words (here: characters) are joined by spaces.
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[f"<{role}>" for role in ROLES],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


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


def encode(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both [rows, longest], of (question, answer) pairs.

    A row is the question through the chat template, the answer and the end of turn, padded on the
    right. Labels are the token ids where a token belongs to the answer or ends the turn, else
    IGNORED.
    """
    rows, answers = [], []
    for question, answer in pairs:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        completion = tokenizer.encode(answer + END, add_special_tokens=False)
        rows.append(tokenizer.encode(prompt, add_special_tokens=False) + completion)
        answers.append(len(completion))
    token_ids = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
    labels = torch.full_like(token_ids, IGNORED)
    for index, (row, length) in enumerate(zip(rows, answers, strict=True)):
        token_ids[index, : len(row)] = torch.tensor(row)
        labels[index, len(row) - length : len(row)] = torch.tensor(row[-length:])
    return token_ids, labels


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


def measure(model: Any, token_ids: Tensor, labels: Tensor) -> Accuracy:
    """Accuracy from one forward over rows of `encode()`.

    Greedy decoding follows the answer exactly as long as the answer's next token is the most
    probable one, so nothing has to be generated.
    """
    with torch.no_grad():
        logits, targets = forward(model, token_ids, labels)
    wanted = targets != IGNORED
    hit = (logits.argmax(-1) == targets) | ~wanted
    logprobs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    probability = (logprobs * wanted).sum(-1).exp()
    return Accuracy(greedy=hit.all(-1).float().mean().item(), sampled=probability.mean().item())


def warm_start(
    model: Any,
    token_ids: Tensor,
    labels: Tensor,
    *,
    target: float,
    seed: int,
    progress: Progress | None = None,
) -> Accuracy:
    """Train on batches of the rows until sampled accuracy reaches `target`, and say what it is.

    Cross entropy over answers and ends of turn, AdamW with a linear warm-up. It stops by accuracy
    and not after a number of steps, since float32 sums differ between machines: what GRPO starts
    from must not. By the sampled one, which rises steadily where the greedy one jumps. Raises
    RuntimeError when MAX_STEPS do not suffice.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0
    )
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, MAX_STEPS + 1):
        batch = torch.randint(len(token_ids), (BATCH_ROWS,), generator=generator)
        logits, targets = forward(model, token_ids[batch], labels[batch])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
        optimizer.step()
        if step % MEASURE_EVERY_STEPS:
            continue
        accuracy = measure(model, token_ids, labels)
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
