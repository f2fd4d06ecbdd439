"""One optimizer step: rows in, sums of gradients, one division, clipping, AdamW.

`accumulate` runs forward and backward on a row's sum of losses; `finish` divides by the step's
denominator, which is known only then. So any partition of the same samples into rows, micro-batches
and ranks gives the same gradient. With several ranks each runs this on its own rows, all of them
the same calls in the same order.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from services.common.errors import UserError
from services.common.training_config import Loss, Optimizer
from services.trainer.compatibility import prepare_model
from services.trainer.flops import Flops
from services.trainer.forward import PolicyForward, RowOutput
from services.trainer.loss import LossStatistics, policy_loss, with_router_loss
from services.trainer.masters import MasterWeights
from services.trainer.packing import PackedRow
from services.trainer.ranks import Group
from services.trainer.reference import AdapterOff, Reference
from services.trainer.sharding import ShardedWeights
from services.trainer.tally import Tally, gather

NO_DENOMINATOR = "no trained tokens"
"""`StepResult.skipped` when nothing was left to divide by."""

NON_FINITE = "non-finite gradients"
"""`StepResult.skipped` when the gradient's norm is not finite."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's, of the size of a weight."""


@dataclass(frozen=True)
class StepResult:
    """What a step did and what it measured. Ratios come as sums: the aggregator divides."""

    applied: bool
    """Whether weights were changed."""
    skipped: str
    """Why not: NO_DENOMINATOR or NON_FINITE; empty when applied."""
    loss: float | None
    """Sum of losses over the denominator; absent without one."""
    denominator: float
    """By `loss.normalise`: trained, unguarded tokens, or conversations, or those times the most
    tokens that one may have."""
    statistics: LossStatistics
    grad_norm: float | None
    """Of the divided gradient, before clipping; may be NaN or infinite when skipped for that;
    absent without a denominator."""
    learning_rate: float
    """Of this step."""
    num_rows: int
    """Without echoes, as all counts here."""
    num_samples: int
    trained_tokens: int
    """Guarded ones too."""
    forwarded_tokens: int
    """What the model forwarded; shared prefixes once a row, last tokens of samples not at all."""
    raw_tokens: int
    """Tokens of the samples as they came."""
    flops: float
    """Of the model in forward and backward, over all ranks (flops.py)."""
    fwd_s: float
    """Of rank 0, as `fwd_bwd_s` and `optimizer_s`."""
    fwd_bwd_s: float
    """Forward (included), loss and backward."""
    optimizer_s: float
    """Division, clipping and AdamW."""
    rank_fwd_bwd_s: list[float]
    """Of every rank; the waits for the others' shards are in it."""

    @property
    def nonfinite(self) -> dict[str, int]:
        """What was guarded, by place: terms by GUARDS, and 1 gradient for a step skipped for it."""
        return self.statistics.guarded | {"gradients": int(self.skipped == NON_FINITE)}


class OptimizerStep:
    """Accumulates rows and applies them. One per model; the model is prepared (compatibility.py),
    set to train(), and with several ranks sharded.

    max_completion_tokens: of a conversation, for `loss.normalise = "constant"`. Raises UserError
    when the model cannot be trained.
    """

    def __init__(
        self,
        model: Any,
        *,
        optimizer: Optimizer,
        loss: Loss,
        temperature: float,
        max_completion_tokens: int | None = None,
        reference: Reference | type[AdapterOff] | None = None,
        group: Group | None = None,
        attention: str = "blocks",
    ) -> None:
        self._group = group or Group()
        way = prepare_model(model, kernel=attention)
        if self._group.size > 1 and not way.shares_prefixes:
            raise UserError(
                f"trainer.ranks: {type(model).__name__} forwards {way}, so that ranks would not "
                "make the same number of forwards; set it to 1"
            )
        self.shares_prefixes = way.shares_prefixes
        """How `accumulate` wants its rows packed."""
        self._device = model.get_output_embeddings().weight.device
        self.flops = Flops.of_model(model)
        """Of its forward."""
        self.forward = PolicyForward(model.train(), temperature=temperature, way=way)
        self.weights = (
            ShardedWeights(self.forward, self._group)
            if self._group.size > 1
            else MasterWeights(model)
        )
        self._settings, self._loss = optimizer, loss
        self._max_completion_tokens = max_completion_tokens
        self._reference: Reference | AdapterOff | None = (
            reference(self.forward) if isinstance(reference, type) else reference
        )
        self._router_coefficient = loss.router_aux_coefficient
        if self._router_coefficient is None:
            config = model.config.get_text_config()
            self._router_coefficient = float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)
        vectors = {name for name, parameter in model.named_parameters() if parameter.ndim < 2}
        by_name = self.weights.by_name
        self._adamw = torch.optim.AdamW(
            [
                {
                    "params": [w for name, w in by_name.items() if name not in vectors],
                    "weight_decay": optimizer.weight_decay,
                },
                # Norms and biases are no directions to shrink.
                {
                    "params": [w for name, w in by_name.items() if name in vectors],
                    "weight_decay": 0.0,
                },
            ],
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.eps,
            fused=True,
        )
        self.num_applied = 0
        """Optimizer steps applied so far: what the warm-up counts."""
        self.abandon()

    def abandon(self) -> None:
        """Forget the rows accumulated since the last `finish`: weights and moments are as then."""
        self.weights.clear()
        self._tally = Tally()

    @property
    def learning_rate(self) -> float:
        """Of the next step: n/w of it in the n-th of w warm-up steps, counted from 1."""
        warmup = self._settings.warmup_steps
        share = min(1.0, (self.num_applied + 1) / warmup) if warmup else 1.0
        return self._settings.learning_rate * share

    def accumulate(self, row: PackedRow, *, echo: bool = False) -> None:
        """Forward and backward of one row; its gradient sum is added to the step's. An echo is
        forwarded for the sake of the other ranks, and adds nothing."""
        row = row.to(self._device)
        begin_s = self._now_s()
        output: RowOutput = self.forward(row)
        forward_end_s = self._now_s()
        total, statistics = policy_loss(
            output.logprobs,
            output.entropy,
            row.terms,
            num_samples=row.num_samples,
            settings=self._loss,
            reference_logprobs=None if self._reference is None else self._reference(row),
            max_completion_tokens=self._max_completion_tokens,
        )
        if output.aux_loss is not None and self._router_coefficient:
            total, statistics = with_router_loss(
                total, statistics, output.aux_loss, coefficient=self._router_coefficient
            )
        if echo:
            total = total * 0.0
        total.backward()  # type: ignore[no-untyped-call]
        times = Tally(fwd_s=forward_end_s - begin_s, fwd_bwd_s=self._now_s() - begin_s)
        self._tally = self._tally.merge(times)
        if not echo:
            counted = Tally.of_row(row, statistics, flops=self.flops.of_row(row))
            self._tally = self._tally.merge(counted)

    def finish(self) -> StepResult:
        """Divide, clip, apply; the next `accumulate` begins a new step."""
        begin_s = self._now_s()
        learning_rate = self.learning_rate
        self.weights.collect()
        tallies, squares = gather(self._tally, self._group, self._square_norm())
        own, total = self._tally, reduce(Tally.merge, tallies)
        statistics, denominator = total.statistics, total.statistics.denominator
        grad_norm, skipped = None, NO_DENOMINATOR
        if denominator:
            grad_norm = math.sqrt(sum(square for [square] in squares)) / denominator
            # A NaN that reached the gradients would reach every weight: leave them as they are.
            skipped = "" if math.isfinite(grad_norm) else NON_FINITE
        if not skipped:
            assert grad_norm is not None
            self._scale(denominator, grad_norm)
            for parameters in self._adamw.param_groups:
                parameters["lr"] = learning_rate
            self._adamw.step()
            self.weights.write_back()
            self.num_applied += 1
        self.abandon()
        return StepResult(
            applied=not skipped,
            skipped=skipped,
            loss=statistics.loss_sum / denominator if denominator else None,
            denominator=denominator,
            statistics=statistics,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            num_rows=total.num_rows,
            num_samples=total.num_samples,
            trained_tokens=total.trained_tokens,
            forwarded_tokens=total.forwarded_tokens,
            raw_tokens=total.raw_tokens,
            flops=total.flops,
            fwd_s=own.fwd_s,
            fwd_bwd_s=own.fwd_bwd_s,
            optimizer_s=self._now_s() - begin_s,
            rank_fwd_bwd_s=[each.fwd_bwd_s for each in tallies],
        )

    @torch.no_grad()
    def _square_norm(self) -> float:
        """Of the sums of gradients that this rank holds."""
        gradients = [w.grad for w in self.weights.by_name.values() if w.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients).double().square())

    @torch.no_grad()
    def _scale(self, denominator: float, grad_norm: float) -> None:
        """Divide the gradients, and clip them to max_grad_norm."""
        # torch.nn.utils.clip_grad_norm_ has the same small number, for a norm of 0.
        clip = min(1.0, self._settings.max_grad_norm / (grad_norm + 1e-6))
        for weight in self.weights.by_name.values():
            if weight.grad is not None:
                weight.grad.div_(denominator).mul_(clip)

    def tensors(self) -> dict[str, torch.Tensor]:
        """State beyond the model's own weights, flat, for a checkpoint: moments, masters, count of
        steps; of each weight the rows that this rank holds."""
        state: dict[str, torch.Tensor] = {"num_applied": torch.tensor(self.num_applied)}
        for name, weight in self.weights.by_name.items():
            state[f"master.{name}"] = weight.detach()
            for moment, value in self._adamw.state.get(weight, {}).items():
                state[f"{moment}.{name}"] = value
        return state

    def load_tensors(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `tensors()` gave, weights included. Raises ValueError when it is of
        another model."""
        by_name = self.weights.by_name
        wanted = {f"master.{name}" for name in by_name}
        found = {key for key in state if key.startswith("master.")}
        if wanted != found:
            odd = ", ".join(sorted(wanted ^ found)[:3])
            raise ValueError(f"the optimizer state is of another model: {odd} is on one side only")
        for name, weight in by_name.items():
            for kind in ("master", *MOMENTS):
                value = state.get(f"{kind}.{name}", weight)
                # AdamW's fused kernel does not look, and writes beyond the end.
                if value.shape != weight.shape:
                    raise ValueError(
                        f"{kind}.{name} has shape {tuple(value.shape)}, not {tuple(weight.shape)}"
                    )
            with torch.no_grad():
                weight.copy_(state[f"master.{name}"])
            self._adamw.state[weight] = {
                moment: state[f"{moment}.{name}"].to(weight.device).clone()
                for moment in ("step", *MOMENTS)
                if f"{moment}.{name}" in state
            }
        self.weights.write_back()
        self.num_applied = int(state["num_applied"])
        self.abandon()

    def _now_s(self) -> float:
        """Monotonic time once the device is done, so that asynchronous kernels are timed where they
        run."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
