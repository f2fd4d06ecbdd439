"""The recipes with tools and with an environment, made short, through the command line: real vLLM,
queue server, gRPC, torch and aggregator.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from services.aggregator.catalogue import CATALOGUE
from services.aggregator.declared.rollout import CALLED, EQUIPPED, LIVED, REWARDS, TURNS
from tests.emitted import disagreements, emitted
from tests.launching import ROOT, launched, metrics_of

LIMIT_S = 280
"""Patience with one run, the making of its model and the start of vLLM included."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S * 2)]

SETTINGS = {
    "trainer.max_steps": 3,
    "trainer.groups_per_step": 4,
    "generation.num_generations": 8,
    "generator.max_inflight": 64,
    "evaluation.size": 8,
    "recorder.flush_s": 0.5,
    "aggregator.http_port": 0,
}


def value(client: Any, run: str, key: str) -> float:
    """Over the whole run, by the key's own reduction."""
    answer = client.get(f"/api/v1/runs/{run}/metrics/{key}", params={"max_points": 1})
    [point] = answer.raise_for_status().json()["points"]
    found: float = point["value"]
    return found


@pytest.mark.parametrize(
    ("name", "recorded_when"),
    [
        ("calculator", {EQUIPPED, CALLED, TURNS}),
        ("guess", {EQUIPPED, CALLED, TURNS, LIVED, REWARDS}),
    ],
)
def test_a_recipe_with_conversations(name: str, recorded_when: set[str], tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / f"{name}.toml"
    with launched(recipe, folder=tmp_path, run=name, settings=SETTINGS) as process:
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, output
    summary = json.loads((tmp_path / name / "summary.json").read_text())
    groups = summary["groups"]
    assert (summary["steps"], groups["trained"], groups["in_flight"]) == (3, 12, 0)
    # Sequences of several turns, tools' results between them: the trainer computes for each
    # trained token what the engine did.
    assert summary["max_logprob_gap"] <= 1e-3
    assert summary["gap_tokens"] > 0
    with metrics_of(tmp_path, name) as client:
        found = emitted(client, name)
        assert not list(disagreements(CATALOGUE, found))
        assert value(client, name, "rollout/turns_mean") > 1
        assert value(client, name, "tools/call_frequency") > 0
        missing = {
            metric.key
            for metric in CATALOGUE.metrics
            if metric.only_when in recorded_when
            and not any(CATALOGUE.find(key).metric is metric for key in found)  # type: ignore[union-attr]
        }
        assert not missing
        # Their templates preserve prefixes: only letters for a piece of a call make them drift.
        assert value(client, name, "rollout/fork_frac") <= 0.02
