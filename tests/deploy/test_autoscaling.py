"""The autoscaling component asks the aggregator for what it answers, and scales what there is."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.store import Store
from services.common.config import Scorer
from tests.deploy.manifests import ROOT, of_kind, render

OVERLAY = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: headrace
resources: [../../base]
components: [{components}]
configMapGenerator:
  - name: recipe
    literals: [recipe.toml=]
"""

COMPONENTS = {
    "http": ["network-policies", "auth", "autoscaling"],
    "https": ["network-policies", "auth", "autoscaling", "tls", "autoscaling/https"],
}


@pytest.fixture(scope="module", params=sorted(COMPONENTS))
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def documents(scheme: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What an overlay with the component renders to."""
    copied = tmp_path_factory.mktemp(scheme) / "k8s"
    shutil.copytree(ROOT / "deploy" / "k8s", copied)
    overlay = copied / "overlays" / "scaled"
    overlay.mkdir()
    named = ", ".join(f"../../components/{name}" for name in COMPONENTS[scheme])
    (overlay / "kustomization.yaml").write_text(OVERLAY.format(components=named))
    return render(overlay)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The aggregator's OpenAPI document."""
    store = Store.open(f"sqlite:///{tmp_path_factory.mktemp('store') / 'metrics.sqlite'}")
    with ThreadPoolExecutor(1) as writer:
        described: dict[str, Any] = create_app(Backend(store, CATALOGUE, writer)).openapi()
    store.close()
    return described


def answered(document: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema of what a GET of this path is answered with."""
    found = [
        described["get"]
        for pattern, described in document["paths"].items()
        if "get" in described and re.fullmatch(re.sub(r"{\w+}", "[^/]+", pattern), path)
    ]
    assert len(found) == 1, path
    named = found[0]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    schema: dict[str, Any] = document["components"]["schemas"][named.rpartition("/")[2]]
    return schema


def test_what_is_scaled_is_there_and_says_no_number_itself(documents: list[dict[str, Any]]) -> None:
    deployments, scaled = of_kind(documents, "Deployment"), of_kind(documents, "ScaledObject")
    assert set(scaled) == {"generator", "scorer"}
    for name, each in scaled.items():
        assert each["spec"]["scaleTargetRef"] == {"name": name}
        assert "replicas" not in deployments[name]["spec"]
        assert 0 <= each["spec"]["minReplicaCount"] < each["spec"]["maxReplicaCount"]
    assert deployments["trainer"]["spec"]["replicas"] == 1


def test_it_asks_where_a_number_is_answered(
    documents: list[dict[str, Any]], document: dict[str, Any], scheme: str
) -> None:
    services = of_kind(documents, "Service")
    for name, each in of_kind(documents, "ScaledObject").items():
        (trigger,) = each["spec"]["triggers"]
        asked = urlsplit(trigger["metadata"]["url"])
        assert asked.scheme == scheme
        assert asked.path.endswith(f"/runs/-/scale/{name}")
        service, namespace, _ = asked.netloc.split(".")
        assert services[service]["metadata"]["namespace"] == namespace
        (port,) = services[service]["spec"]["ports"]
        assert port["port"] == {"http": 80, "https": 443}[scheme]
        schema, value = answered(document, asked.path), trigger["metadata"]["valueLocation"]
        # Never null: KEDA takes a null for an error.
        assert schema["properties"][value]["type"] == "integer"
        assert value in schema["required"]
        # `replicas` is what there should be: one each.
        assert (trigger["metadata"]["targetValue"], trigger["metricType"]) == ("1", "AverageValue")


def test_it_asks_with_the_token_and_trusts_the_authority(
    documents: list[dict[str, Any]], scheme: str
) -> None:
    (authentication,) = of_kind(documents, "TriggerAuthentication").values()
    taken = {each["parameter"]: each for each in authentication["spec"]["secretTargetRef"]}
    assert taken["token"] == {"parameter": "token", "name": "headrace", "key": "token"}
    assert ("ca" in taken) == (scheme == "https")
    for each in of_kind(documents, "ScaledObject").values():
        (trigger,) = each["spec"]["triggers"]
        assert trigger["authenticationRef"] == {"name": authentication["metadata"]["name"]}
        modes = {"http": {"bearer"}, "https": {"bearer", "tls"}}[scheme]
        assert set(trigger["metadata"]["authMode"].split(",")) == modes


def test_the_comment_on_a_scorers_groups_is_true() -> None:
    text = Path(ROOT / "deploy/k8s/components/autoscaling/scorer.yaml").read_text()
    assert f"scorer.max_groups than {Scorer().max_groups}." in text
