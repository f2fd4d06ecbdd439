"""Network policies: what they allow is what services do, and nothing else."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.manifests import (
    ROOT,
    SERVICES,
    Documents,
    of_kind,
    overlays,
    pods,
    recipe,
    render,
    services,
)

OVERLAYS = overlays()
NAMES = [f"{path.parents[1].name}-{path.name}" for path in OVERLAYS]
READERS = {"headrace-reader": "true"}
GROUP = ("trainer", "generator")
"""Who is in a transfer group."""

Edge = tuple[str, str, int]
"""From, to, port. A place outside is a name in capitals."""

DOES = {
    "queue": ("queue", "connect"),
    "trainer": ("network", "trainer"),
    "aggregator": ("network", "aggregator"),
    "generator": ("network", "peer_name"),
}
"""What a service says in its source where it calls another: `queue.connect`, `network.trainer`."""


@pytest.fixture(params=OVERLAYS, ids=NAMES)
def documents(request: pytest.FixtureRequest) -> Documents:
    return render(request.param)


def called_by(service: str) -> set[str]:
    """Whom a service calls, by its source."""
    found = set()
    for file in (ROOT / "services" / service).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                value = node.value
                last = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
                found |= {whom for whom, said in DOES.items() if said == (last, node.attr)}
    return found


def implied(documents: Documents, folder: Path) -> set[Edge]:
    """Who calls whom, by the services' sources and by the addresses that they are given."""
    edges: set[Edge] = set()
    for container in services(documents):
        loaded = recipe(documents, container, folder)
        name = container.spec["name"]
        given = {
            "trainer": loaded.network.trainer,
            "aggregator": loaded.network.aggregator,
            "queue": loaded.queue.url or "",
            "generator": f"dns:///generator:{loaded.network.grpc_port}",  # each by its own address
        }
        addresses = [given[whom] for whom in called_by(name)]
        if name == "aggregator" and loaded.aggregator.database is not None:
            addresses.append(loaded.aggregator.database)
        for address in addresses:
            host, port = re.findall(r"[/@]([\w.-]+):(\d+)", address)[0]
            edges.add((name, "OUTSIDE" if "." in host else host, int(port)))
        if name in GROUP and loaded.weights.transport == "nccl":
            edges |= {(name, peer, 1024) for peer in GROUP if (name, peer) != ("trainer",) * 2}
    # Ranks of several nodes meet, and nodes ask the trainer.
    edges = {edge for edge in edges if edge[:2] != ("trainer", "trainer")}
    if of_kind(documents, "JobSet"):
        edges.add(("trainer", "trainer", 1024))
    return edges


def taken(documents: Documents, selector: dict[str, Any]) -> set[str]:
    """The workloads that a pod selector takes."""
    labels = selector.get("matchLabels", {}).items()
    expressions = selector.get("matchExpressions", [])
    return {
        workload["metadata"]["name"]
        for workload, template in pods(documents)
        if labels <= (own := template["metadata"]["labels"]).items()
        and all(own.get(each["key"]) in each["values"] for each in expressions)
    }


def ends(documents: Documents, rule: dict[str, Any], side: str) -> Iterator[str]:
    """The peers that a rule names."""
    for peer in rule[side]:
        if "ipBlock" in peer:
            yield "OUTSIDE"
        elif "namespaceSelector" in peer:
            yield "READERS" if peer["namespaceSelector"]["matchLabels"] == READERS else "DNS"
        elif peer["podSelector"] == {}:
            yield "NAMESPACE"
        else:
            found = taken(documents, peer["podSelector"])
            assert found, f"a rule for nobody: {peer}"
            yield from found


def allowed(documents: Documents, direction: str) -> set[Edge]:
    """Edges of all policies of one direction; every rule names its peers and its ports."""
    edges: set[Edge] = set()
    side = "from" if direction == "ingress" else "to"
    for policy in of_kind(documents, "NetworkPolicy").values():
        spec = policy["spec"]
        rules = spec.get(direction, [])
        assert not rules or direction.capitalize() in spec["policyTypes"], policy["metadata"]
        for own in taken(documents, spec["podSelector"]):
            for rule in rules:
                assert rule[side], "an empty list would be everybody"
                for peer in ends(documents, rule, side):
                    for port in rule["ports"]:
                        edge = (peer, own) if direction == "ingress" else (own, peer)
                        edges.add((*edge, port["port"]))
    return edges


def test_the_source_says_what_the_picture_says() -> None:
    assert {service: called_by(service) for service in SERVICES} == {
        "generator": {"queue", "trainer", "aggregator", "generator"},
        "scorer": {"queue", "aggregator"},
        # Other nodes of a trainer on several machines ask node 0.
        "trainer": {"queue", "trainer", "aggregator"},
        "aggregator": set(),
    }


def test_nothing_is_allowed_by_default(documents: Documents) -> None:
    spec = of_kind(documents, "NetworkPolicy")["default-deny"]["spec"]
    assert spec == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_what_leaves_is_what_services_call(documents: Documents, tmp_path: Path) -> None:
    leaving = allowed(documents, "egress")
    names = {(own, *rest) for own, *rest in leaving if rest[1] == 53}
    workloads = {workload["metadata"]["name"] for workload, _ in pods(documents)}
    # DNS, and NodeLocal's address for it.
    assert names == {(own, peer, 53) for own in workloads for peer in ("DNS", "OUTSIDE")}
    hub = {("trainer", "OUTSIDE", 443)} & leaving
    fetches = any("hf download" in str(template) for _, template in pods(documents))
    assert bool(hub) == fetches
    assert leaving - names - hub == implied(documents, tmp_path)


def test_what_arrives_is_what_services_are_called_for(documents: Documents, tmp_path: Path) -> None:
    arriving = allowed(documents, "ingress")
    readers = {(peer, "aggregator", 8080) for peer in ("NAMESPACE", "READERS")}
    assert readers <= arriving
    inside = {edge for edge in implied(documents, tmp_path) if edge[1] != "OUTSIDE"}
    assert arriving - readers == inside


def test_ports_of_policies_are_ports_of_containers(documents: Documents) -> None:
    ports: dict[str, set[int]] = {}
    for workload, template in pods(documents):
        for container in template["spec"]["containers"]:
            found = {port["containerPort"] for port in container.get("ports", [])}
            ports.setdefault(workload["metadata"]["name"], set()).update(found)
    for _, own, port in allowed(documents, "ingress"):
        # 1024 is the first of a range: ranks choose theirs, and so does NCCL.
        assert port in ports[own] or (own in GROUP and port == 1024)


def test_an_outside_that_is_the_internet_leaves_out_private_networks(documents: Documents) -> None:
    for name, policy in of_kind(documents, "NetworkPolicy").items():
        for rule in policy["spec"].get("egress", []):
            for block in (peer["ipBlock"] for peer in rule["to"] if "ipBlock" in peer):
                if any(port["port"] == 443 for port in rule["ports"]):
                    assert {"10.0.0.0/8", "169.254.0.0/16"} <= set(block["except"]), name
