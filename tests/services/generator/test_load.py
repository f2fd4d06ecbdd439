"""A thousand conversations, a tenth with failing tools, a twentieth with endless ones, a twentieth
with failing environments. How long they take is measured in benchmarks/conversations.py."""

import threading
from pathlib import Path

import psutil
import pytest

from tests.services.generator.fakes import values
from tests.services.generator.load import GENERATIONS, KINDS, SLOTS, kinds, run


@pytest.mark.timeout(240)
async def test_nothing_is_left_behind(tmp_path: Path) -> None:
    threads = threading.active_count()
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    outcome = await run(tmp_path, chosen=kinds(200, endless=True))
    num = {kind: number * GENERATIONS for kind, number in KINDS.items()}
    broken = num["locked"] + num["uncounted"] + num["shut"]
    assert broken == 50
    assert outcome.failed == {"environment": broken}
    assert outcome.finished == 1000 - broken
    # Failing and endless tools end no conversation: each was told to the model, which went on.
    assert outcome.calls == {"fail": 100, "spin": 25, "wait": 25}
    assert (outcome.busy_slots, outcome.unfinished) == (0, 0)
    assert (outcome.tasks, outcome.strays, outcome.live_instances) == (0, 0, 0)
    # As many processes as conversations could use at most, and none is lost to a call.
    assert outcome.idle_processes == outcome.processes <= SLOTS
    assert threading.active_count() <= threads + 1
    left = {child.pid for child in psutil.Process().children(recursive=True)} - children
    assert not left
    found = values(outcome.recorder)
    assert found["tools/failure_frequency"] == (150, 950)
    assert found["rollout/failed/environment"] == 50
