"""When the policy is evaluated, what is said about it, and what of it a checkpoint remembers.

Before the first step, after every `evaluation.every_steps`th, and after the last. What is found
after k steps is recorded under step k + 1, the one that is open; before the first under 0.

waits_for: generators to serve the version, then their answers. unblocked_by: generators, scorers.
"""

import time

import structlog

from services.common.config import Recipe
from services.common.lifecycle import Lifecycle
from services.common.recorder import Recorder
from services.trainer.dataset import Rows
from services.trainer.evaluation import Evaluation, evaluate, record_evaluation
from services.trainer.policy import PolicyServicer, PolicyStore
from services.trainer.run_queue import RunQueue

SYNCED_WITHIN_S = 300.0
"""Longest wait for the generators to serve a version that is to be evaluated."""


class Evaluator:
    """The evaluations of one run, over all its attempts."""

    def __init__(
        self,
        recipe: Recipe,
        rows: Rows,
        queue: RunQueue,
        store: PolicyStore,
        servicer: PolicyServicer,
        lifecycle: Lifecycle,
        recorder: Recorder,
        *,
        done: list[Evaluation],
    ) -> None:
        self._recipe, self._rows, self._queue = recipe, rows, queue
        self._store, self._servicer = store, servicer
        self._lifecycle, self._record = lifecycle, recorder
        self.done = done
        """What was evaluated so far, in order; a checkpoint holds it."""
        for evaluation in done:
            self._show(evaluation)

    def due(self, steps: int) -> bool:
        """Whether to evaluate after so many steps, with others to come: before the first one, and
        after each `every_steps`th, unless that has been done.

        Example: every 10 steps; restored at step 20 from a checkpoint that holds the evaluations
        after 0, 10 and 20 steps: not due. From one that was written before the last: due.
        """
        settings = self._recipe.evaluation
        if not settings.enabled or any(each.step == steps for each in self.done):
            return False
        every = settings.every_steps
        return not self.done if not steps or every is None else steps % every == 0

    def due_at_end(self, steps: int) -> bool:
        """Whether to evaluate when no step comes any more: unless the very same weights were."""
        last = self.done[-1] if self.done else None
        known = last is not None and (last.step, last.version) == (steps, self._store.version)
        return self._recipe.evaluation.enabled and not known

    async def evaluate(self, steps: int) -> float:
        """Evaluate the current version after so many steps; seconds that the trainer was held.

        Training groups that are under way go on being generated meanwhile. Raises EvaluationFailed.
        """
        begin_s, version = time.monotonic(), self._store.version
        self._lifecycle.enter(f"waiting for generators to serve version {version}")
        if not await self._servicer.wait_served(version, timeout_s=SYNCED_WITHIN_S):
            structlog.get_logger().warning("not all generators serve the version to evaluate")
        when = f"after step {steps}" if steps else "before the first step"
        self._lifecycle.enter(f"evaluating {when}")
        found, answers = await evaluate(
            self._queue,
            self._rows,
            self._recipe,
            number=len(self.done),
            version=version,
            step=steps,
        )
        self.done.append(found)
        self._show(found)
        # The step that is open: an attempt that goes on after step `steps` owns it.
        open_step = steps + 1 if steps else 0
        record_evaluation(self._record, found, answers, step=open_step)
        # Generators were waited for, too: it is what holds the trainer.
        held_s = time.monotonic() - begin_s
        self._record.observe("perf/eval_s", held_s, step=open_step)
        structlog.get_logger().info(
            "evaluated", step=steps, version=version, reward=found.reward, failed=found.failed
        )
        return held_s

    def _show(self, found: Evaluation) -> None:
        """In the trainer's status: what was before training, and the latest since."""
        if found.accuracy is not None:
            when = "after" if found.step else "before"
            self._lifecycle.details[f"eval_{when}"] = f"{found.accuracy:.4f}"
