"""Two of the cases, as far as the verdict; `make verdict` is all, with what is predicted."""

from pathlib import Path

import pytest

from services.aggregator.rules import RULES
from tests.verdict.cases import BY_NAME, CASES
from tests.verdict.course import live
from tests.verdict.world import make_model


def test_every_verdict_has_a_case() -> None:
    assert {case.says for case in CASES} == {"balanced", *(rule.name for rule in RULES)}
    assert len(BY_NAME) == len(CASES)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["one tool", "weight sync: every third step"])
async def test_what_is_slowed_on_purpose_is_named(name: str, tmp_path: Path) -> None:
    outcome = await live(
        BY_NAME[name],
        tmp_path / "run",
        model=make_model(tmp_path / "model"),
        say=print,
        windows=1,
        faster=False,
    )
    assert outcome.problems == []
    assert len(outcome.answers) == 1
