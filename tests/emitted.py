"""What a run has recorded, held against what is declared."""

from collections.abc import Iterator, Mapping, Set
from urllib.parse import quote

import httpx

from services.aggregator.metric import Catalogue


def emitted(client: httpx.Client, run: str) -> dict[str, set[str]]:
    """By key, the services that have sent it, as an aggregator tells."""
    path = f"/api/v1/runs/{run}/metrics"
    found = {}
    for each in client.get(path).raise_for_status().json()["metrics"]:
        ask = {"group_by": "producer", "max_points": "1"}
        answer = client.get(f"{path}/{quote(each['key'])}", params=ask).raise_for_status()
        producers = answer.json()["by_producer"]
        found[each["key"]] = {name.rpartition("-")[0] for name in producers}
    return found


def disagreements(catalogue: Catalogue, found: Mapping[str, Set[str]]) -> Iterator[str]:
    """What is emitted and not declared so, or declared and not emitted, one line each."""
    seen = set()
    for key, services in found.items():
        if key.startswith("ingest/rejected/"):
            yield f"{key}: deltas were refused; the services' logs name their keys"
        declared = catalogue.find(key)
        if declared is None:
            yield f"{key}: emitted, and not declared"
            continue
        metric = declared.metric
        seen.add(metric.key)
        if metric.since is not None:
            yield f"{key}: emitted, and still declared as planned ({metric.since})"
        if not services <= set(metric.producers):
            others = ", ".join(sorted(services - set(metric.producers)))
            yield f"{key}: emitted by {others}, and declared for {', '.join(metric.producers)}"
    for metric in catalogue.metrics:
        if metric.key not in seen and metric.since is None and metric.only_when is None:
            yield f"{metric.key}: declared, and nobody emits it"
