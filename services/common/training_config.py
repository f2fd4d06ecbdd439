"""The recipe's sections on how the policy is trained: advantages, loss, optimizer, steps,
checkpoints, evaluation.

Torch-free and import-cheap, as all of the recipe.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from services.common.section import Section

Decay = Annotated[float, Field(ge=0, lt=1)]
"""Of a running mean."""


class Advantage(Section):
    """From rewards to advantages, within a group."""

    scale: Literal["group", "none"] = "group"
    """Divide by the group's population standard deviation, or only centre."""
    min_group: Annotated[int, Field(ge=2)] = 2
    """Fewer scored members: the group is dropped as `unscored`."""


LOSS_LIMITS: dict[str, dict[str, float]] = {
    "clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0},
    "tis": {"tis_cap": 2.0},
    "icepop": {"icepop_low": 0.5, "icepop_high": 5.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
}
"""Keys of each kind of loss, with their defaults; sources in services/trainer/loss_kinds.py."""

GSPO_LARGEST_CLIP = 0.05
"""A sequence's ratio is the geometric mean of its tokens': token-wise distances never clip it."""


class Loss(Section):
    """The policy-gradient loss; docs/training.md has the formulas."""

    kind: Literal["clip", "tis", "icepop", "gspo"] = "clip"
    """clip: PPO's clipped ratio with the dual clip. tis: truncated importance sampling. icepop:
    ratios outside a range are masked. gspo: one clipped ratio a sequence."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Lower clip distance: 0.2 for clip, 0.0003 for gspo; other kinds have none."""
    clip_high: Annotated[float, Field(ge=0)] | None = None
    """Upper clip distance: 0.28 for clip, 0.0004 for gspo; other kinds have none."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=True)] | None = None
    """For A < 0 the loss is at most this times |A|; inf turns it off. 10 for clip; other kinds have
    none."""
    tis_cap: Annotated[float, Field(gt=0)] | None = None
    """Ratios are truncated to this. 2 for tis; other kinds have none."""
    icepop_low: Annotated[float, Field(ge=0, le=1)] | None = None
    """Tokens of a smaller ratio are masked. 0.5 for icepop; other kinds have none."""
    icepop_high: Annotated[float, Field(ge=1)] | None = None
    """Tokens of a larger ratio are masked. 5 for icepop; other kinds have none."""
    normalise: Literal["tokens", "sequence", "constant"] = "tokens"
    """What the step's sum is divided by. tokens: its trained, unguarded tokens. sequence: the mean
    over conversations of their mean over tokens. constant: conversations x
    `generation.max_completion_tokens`."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference model; 0 loads none."""
    reference: str | None = None
    """Folder of the frozen reference model; the initial weights, `model.path`, by default."""
    router_aux_coefficient: Annotated[float, Field(ge=0)] | None = None
    """Weight of the load-balancing loss of a model with routers; its own configuration's
    (`router_aux_loss_coef`) by default."""

    @model_validator(mode="before")
    @classmethod
    def _with_limits(cls, given: Any) -> Any:
        """Fill in what depends on the kind, so that a written default and a silent one are the same
        experiment."""
        if not isinstance(given, dict):
            return given
        kind = given.get("kind", cls.model_fields["kind"].default)
        limits = LOSS_LIMITS.get(kind, {}) if isinstance(kind, str) else {}
        return limits | {key: value for key, value in given.items() if value is not None}

    def limit(self, key: str) -> float:
        """The value of one of the kind's keys.

        Example: `Loss(kind="gspo").limit("clip_low")` is 0.0003.
        """
        value = getattr(self, key)
        assert isinstance(value, int | float), f"loss.{key} is no key of kind {self.kind}"
        return value

    def mistakes(self) -> Iterator[str]:
        """What is wrong between the keys of this section, one line each."""
        keys = LOSS_LIMITS[self.kind]
        for key in sorted({key for of_kind in LOSS_LIMITS.values() for key in of_kind}):
            if key not in keys and getattr(self, key) is not None:
                kinds = [kind for kind, of_kind in LOSS_LIMITS.items() if key in of_kind]
                yield (
                    f"loss.{key}: has no meaning for loss.kind = {self.kind!r}, whose keys are "
                    f"{', '.join(keys)}; leave it out, or take kind = {' or '.join(kinds)}"
                )
        if self.kind == "gspo":
            if self.normalise != "sequence":
                yield (
                    f'loss.normalise: gspo is a loss of sequences, and "{self.normalise}" would '
                    'weigh them by length; set normalise = "sequence"'
                )
            for key in keys:
                if self.limit(key) > GSPO_LARGEST_CLIP:
                    yield (
                        f"loss.{key}: {self.limit(key):g} is a distance for tokens; gspo clips the "
                        f"geometric mean over a sequence, which hardly moves: at most "
                        f"{GSPO_LARGEST_CLIP:g} is allowed, {keys[key]:g} is the default"
                    )
        if self.reference is not None and not self.kl_coefficient:
            yield (
                f"loss.reference: {self.reference} would not be used, since loss.kl_coefficient is "
                "0; set a coefficient, or leave the reference out"
            )


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


class Lora(Section):
    """Train a low-rank adapter (LoRA) of the model, and leave its own weights as they are; more in
    docs/lora.md. Left out, all weights are trained."""

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Of each adapted matrix's change."""
    alpha: Annotated[int, Field(ge=1)] = 32
    """The change is scaled by alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names, or ends of names, of the linear layers that are adapted, as "q_proj"; all but the
    output head by default."""
    publish: Literal["auto", "adapter", "merged"] = "auto"
    """What generators are sent: the adapter alone, or the whole model with the adapter merged into
    it. auto: the adapter where vLLM serves adapters of such a model; the trainer's log says why
    not."""


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
    ranks: Annotated[int, Field(ge=1)] = 1
    """Processes that train together, each with a row of every micro-batch and a part of weights and
    moments (FSDP2), a GPU each where there are GPUs."""
    nodes: Annotated[int, Field(ge=1)] = 1
    """Machines that the ranks are on, equally many each: `headrace trainer RECIPE --node N` on
    every one. More in docs/multi-node.md."""
    attention: Literal["blocks", "flex"] = "blocks"
    """How tokens of a packed row attend: by calls of scaled_dot_product_attention for blocks of the
    row, on any device, or by one of flex_attention, for GPUs only."""
    gradient_checkpointing: bool = False
    """Keep only the layers' inputs of a forward, and compute the rest again in backward: less
    memory, about a third more computing."""
    rows: Literal["tokens", "samples"] = "tokens"
    """How a step is cut into rows: filled up to the two budgets, or `samples_per_row` samples each,
    within the same budgets. The gradient is the same."""
    samples_per_row: Annotated[int, Field(ge=1)] | None = None
    """Samples of a row; with `rows = "samples"` only, and needed there."""
    zero_signal: Literal["skip", "keep"] | None = None
    """Groups whose advantages are all 0: not forwarded and not in the denominator, or both. "skip"
    by default; "keep" with a KL to a reference, which is a signal of its own."""
    refill: bool = False
    """A step waits for as many groups with signal as it has places, instead of as many groups.
    Those without signal are trained (no signal) either way."""
    max_refill: Annotated[int, Field(ge=1)] | None = None
    """With `refill`, a step has at most so many groups beyond `groups_per_step`; without a number,
    as many again."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"cuda" that is not there is an error, never a slow run."""
    seed: int = 0
    """Of everything random in the trainer."""
    exit_when_done: bool = False
    """End the process with the run (`headrace run` sets it); else it stays up, `complete`."""
    eval_timeout_s: Annotated[float, Field(gt=0)] = 900.0
    """Most seconds one evaluation may take; past it the run fails."""
    lora: Lora | None = None
    """Train an adapter instead of all weights."""


class Checkpoint(Section):
    """What a run goes on from after its trainer has died or was stopped."""

    every_steps: Annotated[int, Field(ge=1)] = 50
    """Steps between two checkpoints; what is trained after the last one is trained again."""
    keep: Annotated[int, Field(ge=1)] = 3
    """The newest ones stay: should one be broken, the one before is taken."""


class Evaluation(Section):
    """Greedy evaluation on its own streams: before the first step and after the last, and every so
    many between."""

    enabled: bool = True
    """Whether to evaluate at all."""
    every_steps: Annotated[int, Field(ge=1)] | None = None
    """Also after so many steps, each time; the trainer's next step waits for it. What is evaluated
    is the version that generators have: the weights of that step where `trainer.weight_sync_steps`
    divides it. Without it only before the first step and after the last."""
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
