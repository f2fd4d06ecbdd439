"""What the view draws: one look at a run, as plain values. What is not known is None, never 0."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Process:
    """One process, as it said itself, or as the launcher knows while it does not answer yet."""

    name: str
    """`service-replica`."""
    service: str
    phase: str
    phase_s: float
    """Seconds in this phase."""
    ready: bool
    restarts: int = 0
    last_death: str = ""
    """How it ended before the last restart: "was killed by SIGKILL"."""


@dataclass(frozen=True)
class Picture:
    """One look."""

    run: str
    page: str
    """URL of the REST interface and its docs."""
    processes: tuple[Process, ...] = ()
    attempt: int | None = None
    step: int | None = None
    """Optimizer steps done."""
    max_steps: int | None = None
    version: int | None = None
    """Newest published policy version."""
    eval_before: float | None = None
    eval_after: float | None = None
    """The latest evaluation after a step."""
    reward: float | None = None
    rewards: tuple[float, ...] = ()
    """Mean reward of each step, oldest first."""
    kl: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    step_s: float | None = None
    """Seconds of a step: the median of the last ones."""
    inflight: float | None = None
    """Conversations running in all generators."""
    generated_tok_s: float | None = None
    scorer_busy_frac: float | None = None
    requests_waiting: float | None = None
    groups_waiting: float | None = None
    samples_waiting: float | None = None
    groups_capacity: int | None = None
    samples_capacity: int | None = None

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace of the last steps."""
        if self.step is None or self.max_steps is None or self.step_s is None:
            return None
        return max(0, self.max_steps - self.step) * self.step_s

    @property
    def training(self) -> bool:
        """Whether a step has been done."""
        return bool(self.step)

    def ended(self, report: Mapping[str, Any]) -> "Picture":
        """The last picture: what the trainer's account (trainer.json) says at the end, and nobody
        left to wait for.
        """
        return replace(
            self,
            processes=(),
            step=report.get("steps"),
            max_steps=report.get("steps"),
            eval_before=report.get("eval_before"),
            eval_after=report.get("eval_after"),
        )

    def count(self, service: str) -> int:
        """Ready processes of a service."""
        return sum(1 for process in self.processes if process.service == service and process.ready)

    def waiting_for(self) -> tuple[Process, ...]:
        """Who is not ready; and the trainer, before its first and after its last step."""
        training = self.training and self.step != self.max_steps
        return tuple(
            process
            for process in self.processes
            if not process.ready or (process.service == "trainer" and not training)
        )
