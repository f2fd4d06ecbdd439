"""Log-probabilities at the sampling temperature, in chunks: no tensor of [all positions,
vocabulary] is ever kept.

A temperature divides the logits, then comes log_softmax, in float32 from the head's output on:
dividing a log-probability by T is something else (logits [2, 1, 0] at T = 0.5 give token 0
log_softmax([4, 2, 0])[0] = -0.142932).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable

from services.trainer.packing import PackedRow

CHUNK_BYTES = 64 << 20
"""Float32 logits that exist at a time; a few temporaries of that size come on top."""

SEQUENCE_CHUNK_TOKENS = 16_384
"""Tokens that `in_chunks` has forwarded at a time."""


@dataclass(frozen=True)
class HeadScores:
    """What a model does to the outputs z of its head before they are logits: z' = scale z, then
    c tanh(z' / c).

    Example: Gemma 2 has a softcap of 30 (arXiv:2408.00118), so an output of 30 is a logit of
    30 tanh(1) = 22.848.
    """

    scale: float = 1.0
    softcap: float | None = None


PLAIN_HEAD = HeadScores()
"""The outputs are the logits."""


def token_logprobs(
    hidden: torch.Tensor,
    head: torch.nn.Module,
    *,
    slots: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    scores: HeadScores = PLAIN_HEAD,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of every target, and the entropy at every position.

    hidden: [P, H] final hidden states. head: the output embedding (`weight` [V, H], `bias` [V] or
    None). slots [M]: the position (row of `hidden`) that predicts targets [M].

    Returns logprobs [M] float32, differentiable, and entropy [P] float32 in nats, detached. The
    backward computes the logits once more instead of keeping them. A position whose logits are not
    finite gives NaN and takes no gradient.
    """
    return _TokenLogprobs.apply(  # type: ignore[no-untyped-call, no-any-return]
        hidden, head.weight, getattr(head, "bias", None), slots, targets, temperature, scores
    )


def term_logprobs(
    head: torch.nn.Module,
    states: torch.Tensor,
    row: PackedRow,
    *,
    temperature: float,
    scores: HeadScores = PLAIN_HEAD,
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the final hidden states [N, H] of a packed row: log-probability of every term [M], and
    entropy at every term's position [M]."""
    logprobs, entropy = token_logprobs(
        states.index_select(0, row.positions),
        head,
        slots=row.terms.slots,
        targets=row.terms.targets,
        temperature=temperature,
        scores=scores,
    )
    return logprobs, entropy.index_select(0, row.terms.slots)


def base_model(model: Any) -> Any:
    """What gives a causal language model its final hidden states."""
    base = model.base_model
    # Where transformers' prefix names no attribute (Llama 4), the property gives the model itself.
    return model.model if base is model else base


def packed_states(model: Any, row: PackedRow, **options: Any) -> Any:
    """The base model's output for a packed row, its attention following the row's trie."""
    return base_model(model)(
        input_ids=row.input_ids,
        position_ids=row.position_ids,
        attention_plan=row.attention,
        # With a cache transformers 5 attends across the samples of a row, silently.
        use_cache=False,
        **options,
    )


def plain_logprobs(
    model: Any, token_ids: torch.Tensor, *, temperature: float, scores: HeadScores = PLAIN_HEAD
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward unpadded rows [R, L] of one length: log-probability of every token but the first, and
    entropy at its position, both [R x (L - 1)], row after row."""
    hidden = base_model(model)(input_ids=token_ids, use_cache=False).last_hidden_state
    targets = token_ids[:, 1:].reshape(-1)
    return token_logprobs(
        hidden[:, :-1].flatten(0, 1),
        model.get_output_embeddings(),
        slots=torch.arange(targets.shape[0], device=targets.device),
        targets=targets,
        temperature=temperature,
        scores=scores,
    )


@torch.no_grad()
def in_chunks(
    logprobs: Callable[[torch.Tensor], torch.Tensor],
    rows: NDArray[np.integer[Any]],
    *,
    device: torch.device,
) -> NDArray[np.float32]:
    """Call `logprobs` ([r, L] token ids to [r x (L - 1)]) on at most SEQUENCE_CHUNK_TOKENS tokens
    at a time; [R, L - 1] of all rows."""
    num_rows, length = rows.shape
    at_a_time = max(1, SEQUENCE_CHUNK_TOKENS // length)
    results = []
    for first in range(0, num_rows, at_a_time):
        token_ids = torch.from_numpy(rows[first : first + at_a_time].astype(np.int64)).to(device)
        results.append(logprobs(token_ids).view(-1, length - 1).cpu().numpy())
    return np.concatenate(results)


class _TokenLogprobs(torch.autograd.Function):
    """The head, softmax and gather of token_logprobs, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        slots: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        scores: HeadScores,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = hidden.new_zeros(targets.shape[0], dtype=torch.float32)
        entropy = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        normaliser = torch.empty_like(entropy)
        for chunk in _chunks(hidden.shape[0], weight.shape[0]):
            logits, _ = _logits(hidden[chunk], weight, bias, temperature, scores)
            normaliser[chunk] = logits.logsumexp(-1)
            log_softmax = logits.sub_(normaliser[chunk, None])
            local, inside = _local(slots, chunk)
            logprobs = torch.where(inside, log_softmax[local, targets], logprobs)
            # entr(p) = -p log p with entr(0) = 0, where p * log p would be NaN.
            entropy[chunk] = torch.special.entr(log_softmax.exp_()).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, slots, targets, normaliser)
        ctx.temperature, ctx.scores = temperature, scores
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, slots, targets, normaliser = ctx.saved_tensors
        gradient = gradients[0]
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        per_position = torch.zeros_like(normaliser).index_add_(0, slots, gradient)
        broken = ~normaliser.isfinite()
        for chunk in _chunks(hidden.shape[0], weight.shape[0]):
            # d logprob[t] / d logits = onehot(t) - softmax.
            logits, slope = _logits(hidden[chunk], weight, bias, ctx.temperature, ctx.scores)
            grad_logits = logits.sub_(normaliser[chunk, None]).exp_()
            grad_logits.mul_(-per_position[chunk, None])
            local, inside = _local(slots, chunk)
            grad_logits.index_put_(
                (local, targets), torch.where(inside, gradient, 0.0), accumulate=True
            )
            # 0 x NaN is NaN: a broken position must be cut out, of the states too.
            grad_logits.mul_(slope).masked_fill_(broken[chunk, None], 0.0)
            scaled = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = scaled @ weight
            if grad_weight is not None:
                states = hidden[chunk].masked_fill(broken[chunk, None], 0.0)
                if scaled.dtype == grad_weight.dtype:
                    # In place: the product is as large as the head, and larger than any chunk.
                    grad_weight.addmm_(scaled.T, states)
                else:
                    grad_weight += scaled.T @ states
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _chunks(num_positions: int, vocabulary: int) -> list[slice]:
    """Cut the positions so that a chunk's float32 logits stay below CHUNK_BYTES."""
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    return [slice(first, first + size) for first in range(0, num_positions, size)]


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float,
    scores: HeadScores,
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """[chunk, V] float32 logits, divided by the temperature; and their derivative by the head's
    outputs."""
    outputs = torch.nn.functional.linear(hidden, weight, bias).float()
    if scores.softcap is None:
        slope = scores.scale / temperature
        return outputs.mul_(slope) if scores.scale != 1.0 else outputs.div_(temperature), slope
    capped = outputs.mul_(scores.scale / scores.softcap).tanh_()
    slopes = (1 - capped.square()).mul_(scores.scale / temperature)
    return capped.mul_(scores.softcap / temperature), slopes


def _local(slots: torch.Tensor, chunk: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots counted from the chunk's start (0 where outside), and whether they are inside; no size
    depends on the data."""
    inside = (slots >= chunk.start) & (slots < chunk.stop)
    return torch.where(inside, slots - chunk.start, 0), inside
