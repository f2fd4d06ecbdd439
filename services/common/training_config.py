"""The recipe's sections on how the policy is trained: advantages, loss, optimizer, steps,
checkpoints, evaluation.

Torch-free and import-cheap, as all of the recipe.
"""

from typing import Annotated, Literal

from pydantic import Field

from services.common.section import Section

Decay = Annotated[float, Field(ge=0, lt=1)]
"""Of a running mean."""


class Advantage(Section):
    """From rewards to advantages, within a group."""

    scale: Literal["group", "none"] = "group"
    """Divide by the group's population standard deviation, or only centre."""
    min_group: Annotated[int, Field(ge=2)] = 2
    """Fewer scored members: the group is dropped as `unscored`."""


class Loss(Section):
    """The policy-gradient loss."""

    kind: Literal["clip"] = "clip"
    """-min(rho A, clip(rho, 1 - low, 1 + high) A) a trained token."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Lower clip distance."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """Upper clip distance."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=True)] = 10.0
    """For A < 0 the loss is at most this times |A|; inf turns it off."""
    normalise: Literal["tokens"] = "tokens"
    """Divide the step's sum by its trained, unguarded tokens."""


class Optimizer(Section):
    """AdamW."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """After warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear from 0."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.999)
    """Decay of the moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled; not on vectors (norms, biases)."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this norm."""


class Trainer(Section):
    """The trainer: steps, pace, budgets."""

    groups_per_step: Annotated[int, Field(ge=1)] = 32
    """Groups of one optimizer step."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps of the run; `data.epochs` may end it earlier."""
    max_staleness: Annotated[int, Field(ge=0)] = 4
    """Versions that a group's oldest token may be behind when a step admits it."""
    weight_sync_steps: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps per published version."""
    stale: Literal["wait", "drop"] = "wait"
    """What a step does about a group that would be stale in the next one: wait for it, or go on
    without. To go on biases: long conversations are the late ones, so that what is trained on is
    shorter than what the policy says."""
    overdue_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest wait of one step for such groups; then it goes on without them."""
    token_budget: Annotated[int, Field(ge=16)] | None = None
    """Unique tokens of one packed row; `generator.max_model_len` by default, and never less."""
    trained_token_budget: Annotated[int, Field(ge=1)] | None = None
    """Trained tokens of one packed row (bounds the logits); `token_budget` by default."""
    zero_signal: Literal["skip", "keep"] = "skip"
    """Groups whose advantages are all 0: not forwarded and not in the denominator, or both."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"cuda" that is not there is an error, never a slow run."""
    seed: int = 0
    """Of everything random in the trainer."""
    exit_when_done: bool = False
    """End the process with the run (`headrace run` sets it); else it stays up, `complete`."""
    eval_timeout_s: Annotated[float, Field(gt=0)] = 900.0
    """Most seconds one evaluation may take; past it the run fails."""


class Checkpoint(Section):
    """What a run goes on from after its trainer has died or was stopped."""

    every_steps: Annotated[int, Field(ge=1)] = 50
    """Steps between two checkpoints; what is trained after the last one is trained again."""
    keep: Annotated[int, Field(ge=1)] = 3
    """The newest ones stay: should one be broken, the one before is taken."""


class Evaluation(Section):
    """Greedy evaluation on its own streams, before the first and after the last step."""

    enabled: bool = True
    """Whether to evaluate at all."""
    every_expression: bool = False
    """Only for reasoning-gym's chain_sum of two terms: every expression of the task instead of
    sampled rows. It measures the policy on the task, not generalisation, since training draws
    from the same set."""
    size: Annotated[int, Field(ge=1)] = 256
    """Rows: generated with `seed`, or the last rows of a file or dataset, which training then
    never sees."""
    seed: int = 1_000_003
    """Of generated rows; differs from the training seed."""
    correct_at: float = 1.0
    """A row counts as correct in the accuracy when its reward is at least this."""
