"""The judge finds what it is there to find: three accounts of a small run, each spoilt in turn.

Three rows, two epochs, two groups a step: six prompts, one of which is given up.
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.judge import Evidence, judge

TRAINED = {"0.0.1.0": 1, "0.1.1.0": 1, "0.2.1.0": 2, "1.0.1.0": 2, "1.1.1.1": 3}
"""Groups, and their steps."""

GIVEN_UP, DROPPED = "1.2.1.1", "1.1.1.0"

NO_SIGNAL_ROW = 2


def listed(group_id: str, state: str, step: int | None = None) -> dict[str, Any]:
    row = int(group_id.split(".")[1])
    return {"group_id": group_id, "state": state, "step": step, "row_index": row}


def evidence() -> Evidence:
    steps = [
        {
            "attempt": 1,
            "step": number,
            "groups": [group for group, step in TRAINED.items() if step == number],
            "entered": [
                group
                for group, step in TRAINED.items()
                if step == number and group.split(".")[1] != str(NO_SIGNAL_ROW)
            ],
        }
        for number in (1, 2, 3)
    ]
    counts = {"dispatched": 7, "trained": 5, "rolled_back": 0, "given_up": 1, "in_flight": 0}
    return Evidence(
        num_rows=3,
        num_prompts=6,
        without_signal=frozenset({NO_SIGNAL_ROW}),
        witnessed=[{"attempt": 1, "restored": None}, *steps],
        report={
            "steps": 3,
            "attempts": 1,
            "groups": {**counts, "dropped": {"failed": 1, "lost": 0}, "trained_twice": 0},
        },
        book={"done": {"0": [3, []], "1": [3, []]}},
        given_up=frozenset({GIVEN_UP}),
        ledger={**counts, "dropped": 1, "dropped_reasons": {"failed": 1}, "balanced": True},
        groups=[
            *(listed(group, "trained", step) for group, step in TRAINED.items()),
            listed(GIVEN_UP, "given_up"),
            listed(DROPPED, "dropped"),
        ],
        scored={0: 2, 1: 2, 2: 1},
        metric_steps=[1, 3],
    )


def with_step(number: int, **changes: Any) -> Evidence:
    """The evidence with another line of the witness."""
    good = evidence()
    lines = [line | changes if line.get("step") == number else line for line in good.witnessed]
    return replace(good, witnessed=lines)


def test_a_run_as_promised_has_no_problems() -> None:
    verdict = judge(evidence())
    assert verdict.problems == []
    assert (verdict.trained_twice, verdict.unaccounted) == (0, 0)
    assert (verdict.trained, verdict.given_up, verdict.dropped["failed"]) == (5, 1, 1)
    assert verdict.metric_gaps == 1


def test_a_prompt_that_was_trained_again_is_found_though_trainer_and_ledger_are_silent() -> None:
    verdict = judge(with_step(3, groups=["1.1.1.1", "0.0.2.0"], entered=["1.1.1.1", "0.0.2.0"]))
    assert verdict.trained_twice == 1
    assert any("trained twice: [(0, 0)]" in problem for problem in verdict.problems)


def test_a_prompt_that_was_trained_again_is_found_by_the_ledger_alone() -> None:
    good = evidence()
    verdict = judge(replace(good, groups=[*good.groups, listed("0.1.2.0", "trained", 3)]))
    assert verdict.trained_twice == 1
    assert verdict.problems


def test_what_the_trainer_itself_has_counted_twice_is_not_overlooked() -> None:
    good = evidence()
    groups = good.report["groups"] | {"trained_twice": 1}
    assert judge(replace(good, report={**good.report, "groups": groups})).trained_twice == 1


def test_a_prompt_that_was_never_trained_is_found_though_trainer_and_ledger_say_so() -> None:
    verdict = judge(with_step(2, groups=["1.0.1.0"], entered=["1.0.1.0"]))
    assert verdict.unaccounted == 1
    assert any("no end: [(0, 2)]" in problem for problem in verdict.problems)


def test_a_prompt_that_the_trainer_has_not_done_is_found() -> None:
    verdict = judge(replace(evidence(), book={"done": {"0": [3, []], "1": [1, [2]]}}))
    assert verdict.unaccounted == 1
    assert any("no end: [(1, 1)]" in problem for problem in verdict.problems)


def test_a_prompt_that_the_ledger_has_no_end_of_is_found() -> None:
    good = evidence()
    groups = [group for group in good.groups if group["state"] != "given_up"]
    verdict = judge(replace(good, groups=groups))
    assert verdict.unaccounted == 1
    assert any("no end: [(1, 2)]" in problem for problem in verdict.problems)


@pytest.mark.parametrize("change", [{"dispatched": 8}, {"trained": 4, "in_flight": 1}])
def test_a_group_that_the_ledger_lost_or_still_waits_for_is_unaccounted(change: Any) -> None:
    good = evidence()
    verdict = judge(replace(good, ledger={**good.ledger, **change}))
    assert verdict.unaccounted == 1
    assert verdict.problems


def test_a_prompt_of_another_run_is_found() -> None:
    good = evidence()
    verdict = judge(replace(good, groups=[*good.groups, listed("2.0.1.0", "given_up")]))
    assert any("does not have: [(2, 0)]" in problem for problem in verdict.problems)


def test_a_prompt_that_was_trained_and_given_up_is_found() -> None:
    good = evidence()
    verdict = judge(replace(good, groups=[*good.groups, listed("0.0.2.0", "given_up")]))
    assert any("trained and given up: [(0, 0)]" in problem for problem in verdict.problems)


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        (with_step(2, step=4), "the line's steps are [1, 4, 3]"),
        (with_step(3, entered=["1.1.1.1", "0.0.1.0"]), "which are not its own"),
        (with_step(1, entered=["0.0.1.0"]), "entered the gradient: ['0.1.1.0']"),
        (replace(evidence(), given_up=frozenset({"0.0.1.3"})), "given up by the trainer alone"),
        (replace(evidence(), scored={0: 1, 2: 1}), "rows trained and never scored: [1]"),
        (replace(evidence(), ledger={**evidence().ledger, "balanced": False}), "not balance"),
        (
            replace(evidence(), ledger={**evidence().ledger, "dropped_reasons": {"stale": 1}}),
            "dropped: {'stale': 1} by the ledger",
        ),
    ],
)
def test_accounts_that_disagree_are_found(spoilt: Evidence, words: str) -> None:
    assert any(words in problem for problem in judge(spoilt).problems)
