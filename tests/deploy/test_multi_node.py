"""The component for a trainer on several machines: one JobSet, whose numbers fit the recipe."""

import copy
from pathlib import Path
from typing import Any

from services.common.errors import FENCED_STATUS, STOPPED_STATUS
from services.common.lifecycle import USER_ERROR_STATUS
from tests.deploy.manifests import K8S, ROOT, Documents, of_kind, recipe, render, services

NODES = ROOT / "tests" / "deploy" / "overlays" / "multi-node"
WITHOUT = K8S / "overlays" / "production"


def job_of(documents: Documents) -> dict[str, Any]:
    """The only Job of the only JobSet."""
    [jobset] = of_kind(documents, "JobSet").values()
    [job] = jobset["spec"]["replicatedJobs"]
    assert job["replicas"] == 1
    spec: dict[str, Any] = job["template"]["spec"]
    return spec


def test_there_are_as_many_pods_as_the_recipe_has_nodes(tmp_path: Path) -> None:
    documents = render(NODES)
    job = job_of(documents)
    assert "trainer" not in of_kind(documents, "Deployment")
    loaded = [recipe(documents, container, tmp_path) for container in services(documents)]
    assert len(loaded) == 4
    for each in loaded:
        assert each.trainer.nodes == job["completions"] == job["parallelism"]
        assert each.trainer.exit_when_done
    [trainer] = [each for each in services(documents) if each.spec["name"] == "trainer"]
    host, _, port = (recipe(documents, trainer, tmp_path).network.ranks or "").partition(":")
    assert host == "trainer"
    assert int(port) in trainer.ports
    assert job["completionMode"] == "Indexed"
    assert trainer.spec["args"][1:] == ["--node", "$(JOB_COMPLETION_INDEX)"]


def test_what_another_start_would_not_mend_fails_the_set() -> None:
    job = job_of(render(NODES))
    assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (0, "Never")
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == [USER_ERROR_STATUS, FENCED_STATUS]
    assert STOPPED_STATUS not in rule["onExitCodes"]["values"]
    [jobset] = of_kind(render(NODES), "JobSet").values()
    [failing] = jobset["spec"]["failurePolicy"]["rules"]
    assert failing["action"] == "FailJobSet"
    assert failing["onJobFailureReasons"] == ["PodFailurePolicy"]


def test_the_pods_are_those_of_the_deployment() -> None:
    template = copy.deepcopy(job_of(render(NODES))["template"])
    deployment = of_kind(render(WITHOUT), "Deployment")["trainer"]
    before = copy.deepcopy(deployment["spec"]["template"])
    assert template["metadata"] == before["metadata"]
    own, wanted = template["spec"], before["spec"]
    assert own.pop("restartPolicy") == "Never"
    [container], [other] = own.pop("containers"), wanted.pop("containers")
    for key in ("args", "env", "ports"):
        assert container.pop(key)[: len(other[key])] == other[key]
        del other[key]
    # The ConfigMap `place` says more, and so has another name.
    assert container.pop("envFrom") != other.pop("envFrom")
    assert container == other
    assert own == wanted


def test_the_name_trainer_is_the_first_pod() -> None:
    documents = render(NODES)
    selector = of_kind(documents, "Service")["trainer"]["spec"]["selector"]
    assert selector["batch.kubernetes.io/job-completion-index"] == "0"
    claim = of_kind(documents, "PersistentVolumeClaim")["trainer"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_ranks_reach_each_other_and_nobody_else_does() -> None:
    policy = of_kind(render(NODES), "NetworkPolicy")["trainer-ranks"]["spec"]
    trainers = policy["podSelector"]
    [[into], [out]] = policy["ingress"], policy["egress"]
    assert into["from"] == out["to"] == [{"podSelector": trainers}]
    for edge in (into, out):
        assert edge["ports"] == [{"protocol": "TCP", "port": 1024, "endPort": 65535}]
