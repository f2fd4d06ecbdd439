"""The trainer's account of a run, over all its attempts."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from services.trainer.dispatch import Dispatcher
from services.trainer.evaluation import Evaluation
from services.trainer.measure import Totals, drop_reasons


def report(
    book: Dispatcher,
    totals: Totals,
    evaluations: Sequence[Evaluation],
    *,
    versions: int,
    attempts: int,
    started: str,
) -> dict[str, Any]:
    """What trainer.json holds. Steps and tokens are those of the surviving line; groups are those
    of all attempts."""
    assert book.balances(), "dispatched = trained + rolled back + dropped + given up + in flight"
    accuracies = [evaluation.accuracy for evaluation in evaluations]
    rewards = [evaluation.reward for evaluation in evaluations]
    return {
        **totals.summary(),
        "eval_before": accuracies[0] if accuracies else None,
        "eval_after": accuracies[-1] if accuracies else None,
        "eval_reward_before": rewards[0] if rewards else None,
        "eval_reward_after": rewards[-1] if rewards else None,
        "eval_failed": sum(evaluation.failed for evaluation in evaluations),
        "groups": {
            "dispatched": book.dispatched,
            "trained": book.trained,
            "rolled_back": book.rolled_back,
            "dropped": drop_reasons(book.dropped),
            "given_up": book.given_up,
            "in_flight": len(book.outstanding),
            "trained_twice": book.trained_twice,
        },
        "versions_published": versions,
        "attempts": attempts,
        "started": started,
        "finished": datetime.now(UTC).isoformat(),
    }
