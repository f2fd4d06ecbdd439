"""Probes of the deploy test count as a node's do."""

import asyncio
import contextlib

import pytest

from tests.deploy.containers.health import Health, Probe, watch
from tests.waiting import until

STARTUP = Probe.of("startupProbe", {"grpc": {"port": 1}, "periodSeconds": 1, "failureThreshold": 3})
READINESS = Probe.of("readinessProbe", {"grpc": {"port": 1}, "periodSeconds": 1})
LIVENESS = Probe.of("livenessProbe", {"exec": {"command": ["true"]}, "failureThreshold": 2})
PROBES = {probe.kind: probe for probe in (STARTUP, READINESS, LIVENESS)}


def test_what_a_manifest_leaves_out_is_as_in_kubernetes() -> None:
    probe = Probe.of("readinessProbe", {"grpc": {"port": 50061}})
    assert (probe.period_s, probe.timeout_s, probe.num_failures) == (10, 1, 3)
    assert (probe.port, probe.service) == (50061, "")


def test_a_field_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(ValueError, match="initialDelaySeconds"):
        Probe.of("livenessProbe", {"grpc": {"port": 1}, "initialDelaySeconds": 5})


def test_only_the_startup_probe_is_asked_until_it_succeeds() -> None:
    health = Health()
    assert health.due(PROBES) == [STARTUP]
    health.told(STARTUP, succeeded=False)
    assert health.due(PROBES) == [STARTUP]
    health.told(STARTUP, succeeded=True)
    assert health.due(PROBES) == [READINESS, LIVENESS]
    assert not health.ready


def test_a_container_that_does_not_start_is_killed() -> None:
    health = Health()
    for _ in range(2):
        health.told(STARTUP, succeeded=False)
    assert health.killed_by is None
    health.told(STARTUP, succeeded=False)
    assert health.killed_by == "startupProbe"


def test_readiness_is_lost_after_failures_in_a_row() -> None:
    health = Health(started=True)
    for succeeded in (True, False, False, True, False, False):
        health.told(READINESS, succeeded=succeeded)
    assert health.ready
    health.told(READINESS, succeeded=False)
    assert not health.ready
    assert (health.times_unready, health.most_failing["readinessProbe"]) == (1, 3)
    assert health.killed_by is None, "nobody is killed for not being ready"


def test_a_container_that_is_not_alive_is_killed() -> None:
    health = Health(started=True)
    for succeeded in (False, True, False):
        health.told(LIVENESS, succeeded=succeeded)
    assert health.killed_by is None
    health.told(LIVENESS, succeeded=False)
    assert health.killed_by == "livenessProbe"


async def test_an_answer_that_comes_too_late_is_a_failure() -> None:
    health, never = Health(), asyncio.Event()

    async def ask(probe: Probe) -> bool:
        if probe.kind == "startupProbe":
            return True
        if probe.kind == "readinessProbe":
            await never.wait()
        return True

    watching = asyncio.create_task(watch(health, PROBES, ask))
    await until(lambda: health.failing.get("readinessProbe", 0) >= 1)
    assert health.started
    assert not health.ready
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
