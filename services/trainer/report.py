"""The trainer's account of a run, over all its attempts."""

from collections.abc import Sequence
from dataclasses import asdict
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
    """What trainer.json holds. Steps, samples, tokens and evaluations are those of the surviving
    line; groups are those of all attempts."""
    assert book.balances(), "dispatched = trained + rolled back + dropped + given up + in flight"
    before = next((each for each in evaluations if each.step == 0), None)
    after = evaluations[-1] if evaluations else None
    return {
        **totals.summary(),
        "eval_before": before and before.accuracy,
        "eval_after": after and after.accuracy,
        "eval_reward_before": before and before.reward,
        "eval_reward_after": after and after.reward,
        "eval_failed": sum(evaluation.failed for evaluation in evaluations),
        "evaluations": [asdict(evaluation) for evaluation in evaluations],
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
