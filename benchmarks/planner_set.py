"""The samples of one step, always the same: what planners and packings are compared on.

64 groups of 8 conversations: prompts of 50-2,000 tokens, uniform; completions of 20-500 tokens,
lognormal with a median of 120; one conversation in ten has a fork at half its completion.
"""

import numpy as np

from services.trainer.load import Load
from services.trainer.types import TrainSample

SEEDS = (7, 8, 9)

SETTINGS = ((1, 4096), (4, 4096), (8, 4096), (4, 16384))
"""Ranks and tokens of a row."""

LOADS = {
    "pairs": Load(per_token=0, per_pair=1),
    "squares": Load(per_token=0, per_square=1),
}
"""Two readings of what attention costs in a row: pairs of a unique token and one that it sees, and
the sum of squares of its samples' tokens."""


def make_samples(
    *,
    seed: int,
    num_groups: int = 64,
    generations: int = 8,
    prompt_tokens: tuple[int, int] = (50, 2000),
    completion_tokens: tuple[int, int] = (20, 500),
    fork_share: float = 0.1,
    vocabulary: int = 32_000,
) -> list[TrainSample]:
    """A step by its seed, conversation after conversation; a fork is a second sample of its
    conversation, right after it.

    Example: seed 7 gives 562 samples of 734,884 tokens, 158,406 of them unique (157,844 without
    the last token of each sample, which is never forwarded).
    """
    # The order of the draws is part of the set: another one gives other samples.
    draw = np.random.default_rng(seed)
    samples = []
    for group in range(num_groups):
        prompt = draw.integers(3, vocabulary, int(draw.integers(*prompt_tokens)))
        for generation in range(generations):
            size = int(np.clip(draw.lognormal(np.log(120), 0.8), *completion_tokens))
            completion = draw.integers(3, vocabulary, size)
            paths = [(np.concatenate([prompt, completion]), prompt.size)]
            if draw.random() < fork_share:
                kept = np.concatenate([prompt, completion[: size // 2]])
                fork = np.concatenate([kept, draw.integers(3, vocabulary, 40)])
                paths.append((fork, kept.size))
            for token_ids, first_trained in paths:
                trained = np.arange(token_ids.size) >= first_trained
                samples.append(
                    TrainSample(
                        rollout_id=f"{group}/{generation}",
                        token_ids=token_ids,
                        trained_mask=trained,
                        logprobs=np.where(trained, -np.log(vocabulary), 0).astype(np.float32),
                        advantage=1.0 if generation % 2 else -1.0,
                        lags=np.zeros(token_ids.size, np.int16),
                    )
                )
    return samples
