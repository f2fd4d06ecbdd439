"""One optimizer step: rows in, sums of gradients, one division, clipping, AdamW.

`accumulate` runs forward and backward on a row's sum of losses; `finish` divides by the step's
denominator, which is known only then. So any partition of the same samples into rows gives the same
gradient. Pure torch: no queue, no network.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch

from services.common.training_config import Loss, Optimizer
from services.trainer.compatibility import prepare_model
from services.trainer.logprobs import row_logprobs
from services.trainer.loss import LossStatistics, policy_loss
from services.trainer.masters import MasterWeights
from services.trainer.packing import PackedRow

NO_DENOMINATOR = "no trained tokens"
"""`StepResult.skipped` when nothing was left to divide by."""

NON_FINITE = "non-finite gradients"
"""`StepResult.skipped` when the gradient's norm is not finite."""


@dataclass(frozen=True)
class StepResult:
    """What a step did and what it measured. Ratios come as sums: the aggregator divides."""

    applied: bool
    """Whether weights were changed."""
    skipped: str
    """Why not: NO_DENOMINATOR or NON_FINITE; empty when applied."""
    loss: float | None
    """Sum of losses over the denominator; absent without one."""
    denominator: int
    """Trained, unguarded tokens."""
    statistics: LossStatistics
    grad_norm: float | None
    """Of the divided gradient, before clipping; may be NaN or infinite when skipped for that;
    absent without a denominator."""
    learning_rate: float
    """Of this step."""
    num_rows: int
    num_samples: int
    trained_tokens: int
    """Guarded ones too."""
    forwarded_tokens: int
    """What the model forwarded; shared prefixes once a row, last tokens of samples not at all."""
    raw_tokens: int
    """Tokens of the samples as they came."""
    fwd_s: float
    fwd_bwd_s: float
    """Forward (included), loss and backward."""
    optimizer_s: float
    """Division, clipping and AdamW."""

    @property
    def nonfinite(self) -> dict[str, int]:
        """What was guarded, by place: terms by GUARDS, and 1 gradient for a step skipped for it."""
        return self.statistics.guarded | {"gradients": int(self.skipped == NON_FINITE)}


class OptimizerStep:
    """Accumulates rows and applies them. One per model; the model is prepared (compatibility.py)
    and set to train().

    Raises UserError when the model cannot be trained on packed rows.
    """

    def __init__(self, model: Any, *, optimizer: Optimizer, loss: Loss, temperature: float) -> None:
        prepare_model(model)
        self._model = model.train()
        self._settings = optimizer
        self._loss = loss
        self._temperature = temperature
        self._device = model.get_output_embeddings().weight.device
        self._masters = MasterWeights(model)
        weights = self._masters.by_name.values()
        self._adamw = torch.optim.AdamW(
            [
                {
                    "params": [weight for weight in weights if weight.ndim >= 2],
                    "weight_decay": optimizer.weight_decay,
                },
                # Norms and biases are no directions to shrink.
                {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
            ],
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.eps,
            fused=True,
        )
        self.num_applied = 0
        """Optimizer steps applied so far: what the warm-up counts."""
        self._begin()

    def _begin(self) -> None:
        self._adamw.zero_grad(set_to_none=True)
        self._statistics = LossStatistics()
        self._num_rows = self._num_samples = 0
        self._trained_tokens = self._forwarded_tokens = self._raw_tokens = 0
        self._fwd_s = self._fwd_bwd_s = 0.0

    @property
    def learning_rate(self) -> float:
        """Of the next step: n/w of it in the n-th of w warm-up steps, counted from 1."""
        warmup = self._settings.warmup_steps
        share = min(1.0, (self.num_applied + 1) / warmup) if warmup else 1.0
        return self._settings.learning_rate * share

    def accumulate(self, row: PackedRow) -> None:
        """Forward and backward of one row; its gradient sum is added to the step's."""
        row = row.to(self._device)
        begin_s = self._now_s()
        logprobs, entropy = row_logprobs(self._model, row, temperature=self._temperature)
        forward_end_s = self._now_s()
        total, statistics = policy_loss(
            logprobs,
            entropy,
            row.terms,
            num_samples=row.num_samples,
            settings=self._loss,
        )
        total.backward()  # type: ignore[no-untyped-call]
        self._fwd_s += forward_end_s - begin_s
        self._fwd_bwd_s += self._now_s() - begin_s
        self._statistics = self._statistics.merge(statistics)
        self._num_rows += 1
        self._num_samples += row.num_samples
        self._trained_tokens += row.num_trained
        self._forwarded_tokens += row.num_forwarded
        self._raw_tokens += row.raw_tokens

    def finish(self) -> StepResult:
        """Divide, clip, apply; the next `accumulate` begins a new step."""
        begin_s = self._now_s()
        statistics, learning_rate = self._statistics, self.learning_rate
        denominator = statistics.tokens
        grad_norm, skipped = None, NO_DENOMINATOR
        if denominator:
            grad_norm = self._scale(denominator)
            # A NaN that reached the gradients would reach every weight: leave them as they are.
            skipped = "" if torch.isfinite(torch.tensor(grad_norm)) else NON_FINITE
        if not skipped:
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            self._masters.write_back()
            self.num_applied += 1
        result = StepResult(
            applied=not skipped,
            skipped=skipped,
            loss=statistics.loss_sum / denominator if denominator else None,
            denominator=denominator,
            statistics=statistics,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            num_rows=self._num_rows,
            num_samples=self._num_samples,
            trained_tokens=self._trained_tokens,
            forwarded_tokens=self._forwarded_tokens,
            raw_tokens=self._raw_tokens,
            fwd_s=self._fwd_s,
            fwd_bwd_s=self._fwd_bwd_s,
            optimizer_s=self._now_s() - begin_s,
        )
        self._begin()
        return result

    @torch.no_grad()
    def _scale(self, denominator: int) -> float:
        """Divide the gradients, clip them to max_grad_norm, and return the norm before clipping."""
        weights = [w for w in self._masters.by_name.values() if w.grad is not None]
        gradients = [w.grad for w in weights if w.grad is not None]
        for gradient in gradients:
            gradient.div_(denominator)
        norm = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(weights, self._settings.max_grad_norm, norm)
        return float(norm)

    def tensors(self) -> dict[str, torch.Tensor]:
        """State beyond the model's own weights, flat, for a safetensors checkpoint: moments,
        masters, count of steps."""
        state: dict[str, torch.Tensor] = {"num_applied": torch.tensor(self.num_applied)}
        for name, weight in self._masters.by_name.items():
            state[f"master.{name}"] = weight.detach()
            for moment, value in self._adamw.state.get(weight, {}).items():
                state[f"{moment}.{name}"] = value
        return state

    def load_tensors(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `tensors()` gave, weights included. Raises ValueError when it is of
        another model."""
        wanted = {f"master.{name}" for name in self._masters.by_name}
        found = {key for key in state if key.startswith("master.")}
        if wanted != found:
            odd = ", ".join(sorted(wanted ^ found)[:3])
            raise ValueError(f"the optimizer state is of another model: {odd} is on one side only")
        for name, weight in self._masters.by_name.items():
            self._masters.load(name, state[f"master.{name}"])
            moments = {
                moment: state[f"{moment}.{name}"].to(weight.device).clone()
                for moment in ("step", "exp_avg", "exp_avg_sq")
                if f"{moment}.{name}" in state
            }
            self._adamw.state[weight] = moments
        self._masters.write_back()
        self.num_applied = int(state["num_applied"])
        self._begin()

    def _now_s(self) -> float:
        """Monotonic time once the device is done, so that asynchronous kernels are timed where they
        run."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
