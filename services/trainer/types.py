"""What the trainer's numerics work on: samples as numpy arrays, free of wire types and of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class TrainSample:
    """One token sequence to train on. Raises ValueError where an array does not fit the others, the
    first token is trained, or none is.

    Example: prompt `[5, 6]`, completion `[7, 2]`: token_ids `[5, 6, 7, 2]`, trained_mask `[F, F, T,
    T]`. The model has to read `[5, 6, 7]` to say how likely 7 and 2 were, so `num_context` is 3:
    the last trained token itself is never forwarded, it is only a target.
    """

    rollout_id: str
    """`group_id/generation`; samples of the same group are kept together by the planner."""
    token_ids: NDArray[np.int64]
    """[L] tokens, context and completion."""
    trained_mask: NDArray[np.bool_]
    """[L] True where the loss is taken. The first is False: nothing predicts a first token."""
    logprobs: NDArray[np.float32]
    """[L] log-probability when it was sampled, in nats at the sampling temperature; 0 for
    context."""
    advantage: float
    """Of the conversation; every trained token carries it."""
    lags: NDArray[np.int16]
    """[L] optimizer steps between the weights that sampled the token and the current ones; 0 for
    context."""
    conversation_tokens: int | None = None
    """Trained tokens of its whole conversation, all forks together; None when it is all of it."""

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        if len(shape) != 1 or shape[0] == 0:
            raise ValueError(f"sample {self.rollout_id}: token_ids must be [L] with L >= 1")
        for name in ("trained_mask", "logprobs", "lags"):
            if getattr(self, name).shape != shape:
                raise ValueError(
                    f"sample {self.rollout_id}: {name} has shape {getattr(self, name).shape}, "
                    f"token_ids has {shape}"
                )
        if self.trained_mask[0]:
            raise ValueError(f"sample {self.rollout_id}: the first token cannot be trained")
        if not self.trained_mask.any():
            raise ValueError(f"sample {self.rollout_id}: no token is trained; leave it out")
        if self.conversation_tokens is not None and self.conversation_tokens < self.num_trained:
            raise ValueError(
                f"sample {self.rollout_id}: {self.num_trained} tokens are trained, its whole "
                f"conversation has {self.conversation_tokens}"
            )

    @property
    def group_id(self) -> str:
        """The group that the conversation belongs to."""
        return self.rollout_id.rpartition("/")[0]

    @cached_property
    def trained_positions(self) -> NDArray[np.int64]:
        """[number of trained tokens] indices of the trained tokens, rising."""
        return np.flatnonzero(self.trained_mask)

    @property
    def num_trained(self) -> int:
        """Trained tokens."""
        return int(self.trained_positions.size)

    @property
    def token_weight(self) -> float:
        """What each of its trained tokens is of its conversation: 1 over the trained tokens of all
        forks together."""
        return 1 / (self.conversation_tokens or self.num_trained)

    @property
    def num_context(self) -> int:
        """Tokens that have to be forwarded: all before the last trained one."""
        return int(self.trained_positions[-1])

    @property
    def context(self) -> NDArray[np.int64]:
        """[num_context] the tokens that have to be forwarded."""
        return self.token_ids[: self.num_context]


@dataclass(frozen=True, eq=False)
class Row:
    """What one rank forwards in one micro-batch."""

    samples: Sequence[TrainSample]
    """At least one."""
    echo: bool = False
    """Forwarded without loss terms: its samples are trained in another row."""
