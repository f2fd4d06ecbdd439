"""Turns to training sequences: what becomes of held tokens when the next prompt is rendered anew.

The whole message list is rendered each turn, so a prompt need not begin with the tokens that the
engine saw and sampled before: text can be tokenised differently at a seam, and templates drop
earlier reasoning. Each transition from one turn to the next is one of three, by the common prefix
of the held tokens and the new prompt; its drift is the number of held tokens beyond it:

- CLEAN: no drift. The rest of the prompt is appended as context.
- REALIGN: the drift is within the last answer and smaller than the threshold. The held tokens are
  cut where the prompt leaves them; the sampled ones among those cut are no longer trained.
- FORK: all else. The held sequence is finished, and a new one has the whole prompt as context,
  also what earlier sequences trained.

After each of them the held tokens are the new prompt and then what was sampled from it. So every
trained token is one that the engine sampled, behind exactly the tokens that it was sampled from.
Pure functions on token ids.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from services.generator.types import SampledTurn, Span, Transitions
from services.generator.types import Sequence as TrainSequence

TokenIds = np.ndarray[Any, np.dtype[np.uint32]]


def to_sequences(
    turns: Sequence[SampledTurn], *, fork_threshold_tokens: int
) -> tuple[tuple[TrainSequence, ...], Transitions]:
    """The sequences of one conversation's turns, oldest first, and the tally of its transitions.

    A sampled token is trained in one sequence at most: in none where it is demoted. Spans cover
    the trained tokens alone. Sequences without a trained token are left out and counted; without
    any sampled token the result is empty. Raises ValueError where there is no turn, and for a turn
    with an empty prompt, with lengths that disagree or with a log-probability that is not finite.

    Example: from [1, 2, 3] the engine samples [10, 11, 12, 13]; then the prompt is [1, 2, 3, 10,
    11, 99, 50, 51], and it samples [20, 21]. The common prefix has 5 tokens of 7, the drift is 2.

    - Threshold 3, REALIGN: one sequence [1, 2, 3, 10, 11, 99, 50, 51, 20, 21] with mask [0, 0, 0,
      1, 1, 0, 0, 0, 1, 1]; 12 and 13 are demoted.
    - Threshold 2, FORK: [1, 2, 3, 10, 11, 12, 13] with mask [0, 0, 0, 1, 1, 1, 1], and [1, 2, 3,
      10, 11, 99, 50, 51, 20, 21] with mask [0, 0, 0, 0, 0, 0, 0, 0, 1, 1].
    """
    if not turns:
        raise ValueError("a conversation without a turn has no sequences")
    for number, turn in enumerate(turns):
        _check(turn, number)
    sequences = [_begin(turns[0])]
    realigned = forked = demoted_tokens = 0
    drifts = []
    for before, turn in pairwise(turns):
        held = sequences[-1]
        kept = common_prefix(held.token_ids, np.array(turn.prompt_ids, np.uint32))
        drift = len(held.token_ids) - kept
        drifts.append(drift)
        if drift == 0:
            sequences[-1] = _continue(held, kept, turn)
        elif drift < fork_threshold_tokens and kept >= len(before.prompt_ids):
            realigned += 1
            demoted_tokens += drift
            sequences[-1] = _continue(held, kept, turn)
        else:
            forked += 1
            sequences.append(_begin(turn))
    trained = tuple(sequence for sequence in sequences if sequence.trained_mask.any())
    return trained, Transitions(
        clean=len(drifts) - realigned - forked,
        realigned=realigned,
        forked=forked,
        demoted_tokens=demoted_tokens,
        drift_tokens=sum(drifts),
        max_drift_tokens=max(drifts, default=0),
        untrained_sequences=len(sequences) - len(trained),
    )


def common_prefix(first: TokenIds, second: TokenIds) -> int:
    """Number of tokens with which both begin.

    Example: [1, 2, 3, 10] and [1, 2, 4, 10, 11] -> 2.
    """
    shorter = min(len(first), len(second))
    differs = first[:shorter] != second[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _begin(turn: SampledTurn) -> TrainSequence:
    """The prompt as context, then every sampled token, trained."""
    context, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.token_ids)
    mask = np.zeros(end, np.uint8)
    mask[context:] = 1
    logprobs = np.zeros(end, np.float32)
    logprobs[context:] = turn.logprobs
    return TrainSequence(
        token_ids=np.array(turn.prompt_ids + turn.token_ids, np.uint32),
        trained_mask=mask,
        logprobs=logprobs,
        spans=tuple(
            Span(span.version, context + span.start, context + span.end)
            for span in turn.spans
            if span.end > span.start
        ),
    )


def _continue(held: TrainSequence, kept: int, turn: SampledTurn) -> TrainSequence:
    """As `_begin`, but the first `kept` tokens, which the prompt shares with `held`, stay trained
    where they were."""
    grown = _begin(turn)
    grown.trained_mask[:kept] = held.trained_mask[:kept]
    grown.logprobs[:kept] = held.logprobs[:kept]
    earlier = tuple(
        Span(span.version, span.start, min(span.end, kept))
        for span in held.spans
        if span.start < kept
    )
    return TrainSequence(
        token_ids=grown.token_ids,
        trained_mask=grown.trained_mask,
        logprobs=grown.logprobs,
        spans=earlier + grown.spans,
    )


def _check(turn: SampledTurn, number: int) -> None:
    """Raises ValueError where a turn breaks what its type promises."""
    num_sampled = len(turn.token_ids)
    if not turn.prompt_ids:
        raise ValueError(f"turn {number} has an empty prompt: its first token has no predecessor")
    if turn.logprobs.shape != (num_sampled,):
        raise ValueError(
            f"turn {number} has {num_sampled} sampled tokens and log-probabilities of shape "
            f"{turn.logprobs.shape}"
        )
    # Here it costs one conversation; a reader of the group would have to refuse the whole group.
    if not np.isfinite(turn.logprobs).all():
        raise ValueError(f"turn {number} has a log-probability that is not finite")
    end = 0
    for span in turn.spans:
        if span.start != end or span.end < span.start:
            break
        end = span.end
    else:
        if end == num_sampled:
            return
    raise ValueError(
        f"turn {number} has {num_sampled} sampled tokens and version spans that do not cover them "
        f"in order: {turn.spans}"
    )
