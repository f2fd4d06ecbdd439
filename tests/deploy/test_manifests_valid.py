"""Rendered overlays are valid to the letter, clean for checkov, and the same by every kubectl."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml

from deploy.k8s import render as rendering
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.promql.names import Names
from tests.deploy import custom_resources
from tests.deploy.manifests import (
    K8S,
    ROOT,
    Documents,
    of_kind,
    other_kubectl,
    overlays,
    render,
    text,
)

OVERLAYS = overlays()
NAMES = [f"{path.parents[1].name}-{path.name}" for path in OVERLAYS]
MINORS = ("1.35", "1.36", "1.37")
"""The newest minors that kubernetes-validate has schemas of."""
CHECKOV = ROOT / ".venv" / "checkov"
HEALTH = ("headrace_aggregator_up", "headrace_aggregator_batches_total",
          "headrace_aggregator_last_batch_age_seconds")  # fmt: skip
"""The aggregator's own, which are in no catalogue."""


def documents() -> list[tuple[str, dict[str, Any]]]:
    """Each document of all overlays, once, with the name of the first overlay that has it."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for overlay, name in zip(OVERLAYS, NAMES, strict=True):
        for document in render(overlay):
            found.setdefault(json.dumps(document, sort_keys=True), (name, document))
    return list(found.values())


@pytest.mark.parametrize("minor", MINORS)
def test_every_document_is_valid_to_the_letter(minor: str) -> None:
    found = documents()
    assert len(found) > 60
    for overlay, document in found:
        where = f"{overlay}: {document['kind']}/{document['metadata']['name']}"
        try:
            if custom_resources.is_custom(document):
                custom_resources.validate(document, minor)
            else:
                kubernetes_validate.validate(document, minor, strict=True)
        except Exception as error:
            error.add_note(where)
            raise


def test_minors_are_the_newest() -> None:
    assert kubernetes_validate.latest_version().startswith(MINORS[-1])


def test_a_mistyped_key_of_a_custom_resource_is_found() -> None:
    monitors = of_kind(render(K8S / "overlays" / "production"), "ServiceMonitor")
    broken = json.loads(json.dumps(monitors["aggregator"]))
    broken["spec"]["endpoints"][0]["inteval"] = "15s"
    with pytest.raises(jsonschema.ValidationError, match="inteval"):
        custom_resources.validate(broken, MINORS[-1])


def test_a_mistyped_key_of_a_workload_is_found() -> None:
    broken = json.loads(json.dumps(of_kind(render(K8S / "overlays" / "cpu"), "Deployment")))
    broken["trainer"]["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(broken["trainer"], MINORS[-1], strict=True)


def test_the_example_of_secrets_is_valid() -> None:
    for document in yaml.safe_load_all((K8S / "secrets.example.yaml").read_text()):
        kubernetes_validate.validate(document, MINORS[-1], strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=NAMES)
def test_the_machines_own_kubectl_renders_the_same(overlay: Path) -> None:
    other = other_kubectl()
    if other is None:
        pytest.skip("the machine has no kubectl of its own")
    said = subprocess.run(
        [other, "version", "--client", "-o", "json"], capture_output=True, check=True
    )
    version = json.loads(said.stdout)["clientVersion"]
    if (int(version["major"]), int(version["minor"].rstrip("+"))) < (1, 27):
        pytest.skip(f"kubectl {version['gitVersion']} is older than 1.27, the oldest that will do")
    assert rendering.render(overlay, by=other) == text(overlay)


def test_install_yaml_is_current() -> None:
    wanted = rendering.HEADER + text(K8S / "overlays" / "cpu")
    assert rendering.TARGET.read_text() == wanted, "make manifests"


@pytest.mark.timeout(900)  # seconds of work; on a machine that is busy with other things, minutes
def test_checkov_finds_nothing(tmp_path: Path) -> None:
    if not CHECKOV.is_dir():
        pytest.skip("requirements/checkov.txt is not installed in .venv/checkov: make does")
    for overlay, name in zip(OVERLAYS, NAMES, strict=True):
        (tmp_path / f"{name}.yaml").write_text(text(overlay))
    settings = ["--config-file", str(K8S / ".checkov.yaml"), "-o", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "checkov.main", "-d", str(tmp_path), *settings],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(CHECKOV)},
        cwd=tmp_path,
    )
    report = json.loads(done.stdout)
    found = [
        f"{each['file_path']} {each['resource']}: {each['check_id']} {each['check_name']}"
        for each in report["results"]["failed_checks"]
    ]
    assert found == []
    assert report["summary"]["parsing_errors"] == 0
    # It really looked: some hundred checks an overlay.
    assert report["summary"]["passed"] > 100 * len(OVERLAYS)
    assert done.returncode == 0, done.stderr


def alerts(documents: Documents) -> list[dict[str, Any]]:
    return [
        rule
        for rules in of_kind(documents, "PrometheusRule").values()
        for group in rules["spec"]["groups"]
        for rule in group["rules"]
    ]


def test_alerts_ask_for_metrics_that_there_are() -> None:
    known = {family.name for family in Names(CATALOGUE).families} | set(HEALTH)
    found = alerts(render(K8S / "overlays" / "production"))
    assert len(found) >= 5
    for alert in found:
        asked = selected(promql_parser.parse(alert["expr"]))
        assert asked, alert["expr"]
        assert asked <= known, alert["expr"]


def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    (rules,) = of_kind(render(K8S / "overlays" / "production"), "PrometheusRule").values()
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": rules["spec"]["groups"]}))
    done = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(alerts([rules]))} rules found" in done.stdout


def selected(node: Any) -> set[str]:
    """Names of the metrics in a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        return {str(node.name)}
    if isinstance(node, promql_parser.MatrixSelector):
        return selected(node.vector_selector)
    if isinstance(node, promql_parser.BinaryExpr):
        return selected(node.lhs) | selected(node.rhs)
    if isinstance(node, promql_parser.Call):
        return {name for argument in node.args for name in selected(argument)}
    if isinstance(node, promql_parser.AggregateExpr | promql_parser.ParenExpr):
        return selected(node.expr)
    assert isinstance(node, promql_parser.NumberLiteral), node
    return set()
